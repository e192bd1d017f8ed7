"""The sum tree under tracers and compilers: one node a call, written in place, the same numbers."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch.fx.experimental.proxy_tensor import make_fx

import graphrl as grl
from graphrl.errors import SpecError
from graphrl.kernels import SumTree, sum_tree_search, sum_tree_update

OPS = torch.ops.graphrl


def tree_and_batch(capacity=100):
    tree = SumTree(capacity)
    tree.build(torch.rand(capacity))
    return tree, torch.randint(capacity, (16,)), torch.rand(16).double(), torch.rand(8).double()


def use(leaves, inner, index, priority, uniform):
    sum_tree_update(leaves, inner, index, priority)
    return sum_tree_search(leaves, inner, uniform, 1)


def step(tree, index, priority, uniform):
    tree.update(index, priority)
    found, weight = tree.search(uniform * tree.total)
    return found, (tree.min / weight) ** 0.5, tree.max


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_traced_program_is_pure_but_for_what_it_writes_back(mode):
    tree, *batch = tree_and_batch()
    traced = make_fx(use, tracing_mode=mode)(tree.leaves.clone(), tree.inner.clone(), *batch)
    calls = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    for target in (OPS.sum_tree_updated.default, OPS.sum_tree_search.default):
        assert calls.count(target) == 1
    others = {str(target) for target in calls} - {"graphrl.sum_tree_updated.default", "graphrl.sum_tree_search.default"}
    assert others <= {"<built-in function getitem>", "aten.copy_.default"}
    leaves, inner = tree.leaves.clone(), tree.inner.clone()
    found, expected = traced(leaves, inner, *batch), use(tree.leaves, tree.inner, *batch)
    assert torch.equal(leaves, tree.leaves) and torch.equal(inner, tree.inner)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    functional = make_fx(torch.func.functionalize(use, remove="mutations"))(leaves, inner, *batch)
    assert OPS.sum_tree_updated.default in {node.target for node in functional.graph.nodes}


def test_compiles_without_graph_breaks_and_writes_in_place():
    tree, *batch = tree_and_batch()
    other = SumTree(100)
    other.load_state_dict(tree.state_dict())
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        for found, expected in zip(compiled(other, *batch), step(tree, *batch), strict=True):
            torch.testing.assert_close(found, expected)
        assert torch.equal(tree.leaves, other.leaves) and torch.equal(tree.inner, other.inner)
        batch[0] = batch[0].flip(0)


def test_compiled_sampling_has_no_graph_breaks():
    tree, *_ = tree_and_batch()
    compiled = torch.compile(lambda t: t.sample(50, stratified=True), backend="aot_eager", fullgraph=True)
    index, priority = compiled(tree)
    assert torch.equal(priority, tree[index]) and (index.diff() >= 0).all()


def test_an_update_program_carries_the_tree():
    def make():
        torch.manual_seed(0)
        net, tree = torch.nn.Linear(3, 1).double(), SumTree(50)
        tree.build(torch.ones(50))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def update(batch):
            error = (net(batch["x"]) - batch["y"]).squeeze(-1)
            weight = (tree.min / tree[batch["index"]]) ** 0.4
            loss = (weight * error**2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tree.update(batch["index"], error.abs() + 0.01)  # needs no detach: nothing flows through a tree
            return {"loss": loss.detach(), "total": tree.total}

        return tree, update

    def batch(seed):
        g = torch.Generator().manual_seed(seed)
        x, y = torch.randn(8, 3, generator=g).double(), torch.randn(8, 1, generator=g).double()
        return TensorDict(x=x, y=y, index=torch.randint(50, (8,), generator=g), batch_size=[8])

    (tree, update), (other, eager) = make(), make()
    compiled = grl.compile_update(update, batch(0), backend="eager")
    for seed in range(4):
        found, expected = compiled(batch(seed)), eager(batch(seed))
        torch.testing.assert_close(found["loss"], expected["loss"])
        torch.testing.assert_close(found["total"], expected["total"])
    torch.testing.assert_close(tree.state_dict(), other.state_dict())


def test_registrations_pass_torchs_own_checks():
    tree, index, priority, uniform = tree_and_batch(20)
    for op in (OPS.sum_tree_update.default, OPS.sum_tree_updated.default):
        torch.library.opcheck(op, (tree.leaves.clone(), tree.inner.clone(), index, priority))
    torch.library.opcheck(OPS.sum_tree_search.default, (tree.leaves, tree.inner, uniform, 1))


def test_short_cut_and_operator_agree_to_the_bit():
    tree, *batch = tree_and_batch()
    leaves, inner = tree.leaves.clone(), tree.inner.clone()
    OPS.sum_tree_update(leaves, inner, *batch[:2])
    found = OPS.sum_tree_search(leaves, inner, batch[2], 1)
    expected = use(tree.leaves, tree.inner, *batch)
    assert torch.equal(inner, tree.inner) and all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    with pytest.raises(SpecError, match="outside the tree"):
        OPS.sum_tree_update(leaves, inner, batch[0] + 1000, batch[1])


def test_many_searches_and_many_trees_under_vmap():
    trees = [tree_and_batch()[0] for _ in range(3)]
    leaves, inner = torch.stack([t.leaves for t in trees]), torch.stack([t.inner for t in trees])
    prefix = torch.rand(3, 5).double()
    index, _ = torch.vmap(sum_tree_search)(leaves, inner, prefix)
    assert torch.equal(index, torch.stack([t.search(p)[0] for t, p in zip(trees, prefix, strict=True)]))
    index, _ = torch.vmap(lambda p: trees[0].search(p), in_dims=1)(prefix)
    assert torch.equal(index, trees[0].search(prefix.T)[0])


def test_meta_tensors_give_meta_results():
    tree = SumTree(10, device="meta", dtype=torch.float32)
    tree.update(torch.zeros(3, dtype=torch.int64, device="meta"), torch.zeros(3, device="meta"))
    index, priority = tree.sample(4)
    assert index.device.type == "meta" and (index.dtype, priority.dtype) == (torch.int64, torch.float32)
