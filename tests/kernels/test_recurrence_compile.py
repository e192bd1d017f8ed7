"""Every recurrence under tracers and compilers: one node, one shape rule, the same numbers."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, as_tuple
from tensordict import TensorDict
from torch.fx.experimental.proxy_tensor import make_fx

import graphrl as grl

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def operators(family):
    ops = torch.ops.graphrl
    return getattr(ops, family.name).default, getattr(ops, f"{family.name}_backward").default


def count(graph_module, target):
    return sum(node.target is target for node in graph_module.graph.nodes)


def tensors_of(family, shape, **draw):
    return [x for x in family.draw(shape, torch.float32, **draw).values() if isinstance(x, torch.Tensor)]


def on_tensors(family):
    """The function of tensors only, its coefficients numbers."""

    def run(*tensors):
        return family.function(*tensors, *([0.99, 0.95][: len(family.coefficients)]))

    return run


def loss_and_gradient(family):
    run = on_tensors(family)

    def loss(reward, *others):
        reward = reward.detach().requires_grad_()
        out = run(reward, *others)
        total = sum(x.square().sum() for x in as_tuple(out))
        return total, torch.autograd.grad(total, reward)[0]

    return loss


@every_family
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_sees_one_node(family, mode):
    run = on_tensors(family)
    program = make_fx(run, tracing_mode=mode)(*tensors_of(family, (4, 20, 1)))
    assert count(program, operators(family)[0]) == 1
    calls = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert calls <= {f"graphrl.{family.name}.default", "aten.full.default", "<built-in function getitem>"}, calls
    other = tensors_of(family, (4, 20, 1) if mode != "symbolic" else (7, 33, 1), seed=5)
    torch.testing.assert_close(program(*other), run(*other), rtol=0, atol=0)


@every_family
def test_pre_dispatch_trace_sees_one_node(family):
    program = make_fx(on_tensors(family), pre_dispatch=True)(*tensors_of(family, (4, 20, 1)))
    assert count(program, operators(family)[0]) == 1


@every_family
@pytest.mark.parametrize("mode", ["real", "fake"])
def test_gradient_is_one_node_more(family, mode):
    tensors, loss = tensors_of(family, (4, 20, 1)), loss_and_gradient(family)
    program = make_fx(loss, tracing_mode=mode)(*tensors)
    assert [count(program, op) for op in operators(family)] == [1, 1]
    torch.testing.assert_close(program(*tensors), loss(*tensors))


@every_family
def test_a_keyed_graph_traces_to_one_node(family):
    arguments = {k: v for k, v in family.draw((4, 20, 1), torch.float32).items() if isinstance(v, torch.Tensor)}
    out = ["first", "second"][: len(family(family.draw((2, 3, 1))))]
    graph = grl.KeyedGraph((on_tensors(family), list(arguments), out))
    td = TensorDict(arguments, batch_size=[4, 20])
    program = grl.trace(graph, td)
    assert str(program).count(f"graphrl.{family.name}") == 1
    fast = grl.compile(graph, td, backend="eager")
    for name in out:
        assert torch.equal(fast(td.clone())[name], graph(td.clone())[name])


@every_family
def test_compiles_without_graph_breaks(family):
    run, tensors = on_tensors(family), tensors_of(family, (4, 20, 1))
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*tensors), run(*tensors), rtol=0, atol=0)


@every_family
def test_compiled_gradient_equals_eager(family):
    def loss(*tensors):
        out = family.function(*tensors)
        return sum(x.square().sum() for x in as_tuple(out))

    results = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        leaves = family.leaves(arguments := family.draw((4, 20, 1)))
        function(*arguments.values()).backward()
        results.append([x.grad for x in leaves])
    torch.testing.assert_close(*results)


@every_family
@pytest.mark.parametrize("kind", ["numbers", "per step", "no flags"])
def test_registration_passes_torchs_own_checks(family, kind):
    recurrence, (op, backward) = family.recurrence, operators(family)
    arguments = family.draw((3, 9, 1))
    shape = () if kind == "numbers" else (3, 9, 1)
    arguments |= {name: torch.full(shape, 0.9).double() for name in family.coefficients}
    if kind == "no flags":
        if not recurrence.optional_flags:
            pytest.skip("its flags are not optional")
        arguments |= dict.fromkeys(recurrence.flags)
    family.leaves(arguments)
    torch.library.opcheck(op, (*arguments.values(), -2, *options_of(family)))
    detached = {k: v if v is None else v.detach() for k, v in arguments.items()}
    reward = detached["reward"]
    read = [detached[name] for name in recurrence.read]
    tail = [detached[name] for name in (*recurrence.constants, *recurrence.flags, *recurrence.coefficients)]
    for wants in (False, True):
        grads = [reward] * len(recurrence.outputs)
        call = (*grads, *read, reward, *tail, -2, *options_of(family), wants)
        torch.library.opcheck(backward, call, test_utils=("test_schema", "test_faketensor"))


def options_of(family):
    return [1.0] * len(family.recurrence.options)


@every_family
def test_meta_tensors_give_meta_results(family):
    arguments = family.draw((3, 9, 1), torch.bfloat16)
    meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    for x in family(meta):
        assert x.device.type == "meta" and x.shape == (3, 9, 1) and x.dtype == torch.bfloat16


@every_family
def test_eager_short_cut_and_operator_agree_to_the_bit(family):
    arguments = family.draw((9, 700, 1), torch.float32)
    tensors = {name: torch.tensor(arguments[name]) for name in family.coefficients}
    operator = getattr(torch.ops.graphrl, family.name)
    expected = as_tuple(operator(*(arguments | tensors).values(), -2, *options_of(family)))
    if family.recurrence.outputs[-1] == "advantage":  # the functions return it first
        expected = expected[::-1]
    for found in (family(arguments), family(arguments | tensors)):
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x, y)
