"""Ensembles become batched products: values, gradients and written state stay, and what differs is left alone."""

import copy

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import graphrl as grl
from graphrl import KeyedGraph
from graphrl.compiler.passes.eliminate_dead_code import eliminate_dead_code
from graphrl.compiler.passes.fuse_parallel_networks import MIN_LANES, MIN_ROWS, fuse_parallel_networks
from graphrl.compiler.passes.pipeline import run_passes

ROWS, LANES = max(16, MIN_ROWS), max(3, MIN_LANES)


def net(width=5, out=1, act=nn.ReLU, inp=4):
    return nn.Sequential(nn.Linear(inp, width), act(), nn.Linear(width, width), act(), nn.Linear(width, out)).double()


def ensemble(lanes=LANES, **options):
    torch.manual_seed(0)
    return nn.ModuleList(net(**options) for _ in range(lanes))


def rows(seed=0, n=ROWS, width=4):
    return torch.randn(n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def traced(*nodes, **inputs):
    td = TensorDict(inputs, batch_size=[len(next(iter(inputs.values())))])
    return eliminate_dead_code(grl.trace(KeyedGraph(*nodes), td)), td


def counts(program):
    names = [str(n.target).removeprefix("aten.") for n in program.graph_module.graph.nodes if n.op == "call_function"]
    return {name.split(".")[0]: sum(n.split(".")[0] == name.split(".")[0] for n in names) for name in names}


def assert_same(before, after, *inputs):
    after.graph_module.graph.lint()
    for a, b in zip(before.run(*inputs), after.run(*inputs), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-13)


def listed(critics):
    return lambda x: tuple(c(x) for c in critics)


def names(n, prefix="q"):
    return [f"{prefix}{i}" for i in range(n)]


def test_before_and_after():
    layers = [nn.Linear(2, 3).double() for _ in range(3)]
    program, _ = traced((lambda x: torch.stack([m(x).relu() for m in layers]).sum(0), ["x"], ["y"]), x=rows(width=2))
    body = fuse_parallel_networks(program).code.split("):\n", 1)[1].strip().splitlines()
    assert [line.split("  #")[0].strip().replace("torch.ops.aten.", "") for line in body] == [
        "cat = cat.default([layers_0_weight, layers_1_weight, layers_2_weight])",
        "view = view.default(cat, [3, 3, 2])",
        "cat_1 = cat.default([layers_0_bias, layers_1_bias, layers_2_bias])",
        "view_1 = view.default(cat_1, [3, 3])",
        "permute = permute.default(view, [0, 2, 1])",
        "unsqueeze = unsqueeze.default(x, 0)",
        "expand = expand.default(unsqueeze, [3, -1, -1])",
        "bmm = bmm.default(expand, permute)",
        "view_2 = view.default(view_1, [3, 1, 3])",
        "add = add.Tensor(bmm, view_2)",
        "relu = relu.default(add)",
        "view_3 = view.default(relu, [48, 3])",
        "view_4 = view.default(view_3, [3, 16, 3])",
        "sum_1 = sum.dim_IntList(view_4, [0])",
        "return (sum_1,)",
    ]


@pytest.mark.parametrize("lanes", [LANES, 10])
def test_an_ensemble_becomes_one_product_a_layer(lanes):
    critics = ensemble(lanes)
    program, td = traced((listed(critics), ["x"], names(lanes)), x=rows())
    after = fuse_parallel_networks(program)
    assert counts(after)["bmm"] == 3 and "addmm" not in counts(after) and counts(after)["relu"] == 2
    assert after.state == program.state, "the modules keep their weights"
    assert_same(program, after, td["x"])
    results = after.run(td["x"])
    assert len({t.untyped_storage().data_ptr() for t in results}) == lanes, "outputs are tensors of their own"


def test_weights_stay_live():
    critics = ensemble()
    program, td = traced((listed(critics), ["x"], names(LANES)), x=rows())
    after = fuse_parallel_networks(program)
    with torch.no_grad():
        critics[1][0].weight.mul_(3.0)
    assert_same(program, after, td["x"])


def test_lanes_may_read_inputs_of_their_own():
    critics = ensemble()
    inputs = {f"x{i}": rows(i) for i in range(LANES)}
    program, td = traced((lambda *xs: tuple(c(x.tanh()) for c, x in zip(critics, xs, strict=True)),
                          list(inputs), names(LANES)), **inputs)  # fmt: skip
    assert_same(program, fuse_parallel_networks(program), *inputs.values())


@pytest.mark.parametrize("case", ["one", "shapes", "activations in turn", "few rows", "chain", "scalars"])
def test_what_differs_is_left_alone(case):
    critics = ensemble()
    n = ROWS
    if case == "one":
        function = lambda x: critics[0](x)  # noqa: E731
    elif case == "shapes":
        mixed = nn.ModuleList(net(width) for width in (3, 5, 7))
        function = lambda x: sum(m(x) for m in mixed)  # noqa: E731
    elif case == "activations in turn":
        mixed = nn.ModuleList(net(act=act) for act in (nn.ReLU, nn.Tanh, nn.ELU))
        function = lambda x: sum(m(x) for m in mixed)  # noqa: E731
    elif case == "few rows":
        n = MIN_ROWS - 1
        function = lambda x: sum(m(x) for m in critics)  # noqa: E731
    elif case == "chain":  # equal layers, but each reads the one before
        square = nn.Sequential(*(nn.Linear(4, 4).double() for _ in range(4)))
        function = lambda x: square(x)  # noqa: E731
    else:
        function = lambda x: sum((i + 2.0) * m[0](x) for i, m in enumerate(critics))  # noqa: E731
    program, td = traced((function, ["x"], ["y"]), x=rows(n=n))
    after = fuse_parallel_networks(program)
    expected = {"activations in turn": 1, "scalars": 1}.get(case, 0)
    assert counts(after).get("bmm", 0) == expected
    assert_same(program, after, td["x"])


def test_gradients_through_a_compiled_ensemble():
    critics = ensemble()
    other = copy.deepcopy(critics)
    graph = KeyedGraph((nn.ModuleList(critics)[0], ["x"], ["q0"]),
                       *((c, ["x"], [f"q{i}"]) for i, c in enumerate(critics) if i))  # fmt: skip
    x = rows().requires_grad_()
    fast = grl.compile(graph, TensorDict(x=x, batch_size=[ROWS]), backend="eager", strict=True)
    out = fast(TensorDict(x=x, batch_size=[ROWS]))
    sum((i + 1) * out[f"q{i}"].square().mean() for i in range(LANES)).backward()
    again = x.detach().clone().requires_grad_()
    sum((i + 1) * c(again).square().mean() for i, c in enumerate(other)).backward()
    torch.testing.assert_close(x.grad, again.grad, rtol=1e-11, atol=1e-12)
    for a, b in zip(critics.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-12)


class Ensemble:
    """A small REDQ: critics, Polyak targets, an actor that is judged by all critics, three kinds of clipping."""

    def __init__(self, lanes=LANES, clip=False, minimum=False):
        self.critics = ensemble(lanes, inp=6)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.actor = net(out=2)
        self.optimizer = torch.optim.Adam(self.critics.parameters(), 1e-2)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), 1e-2)
        self.clip, self.minimum = clip, minimum

    def step(self, batch):
        with torch.no_grad():
            x = torch.cat([batch["next"], self.actor(batch["next"]).tanh()], -1)
            goal = batch["r"] + 0.9 * torch.stack([t(x) for t in self.targets]).min(0).values
        x = torch.cat([batch["x"], batch["a"]], -1)
        loss = sum((c(x) - goal).square().mean() for c in self.critics)
        self.optimizer.zero_grad()
        loss.backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.critics.parameters(), 0.5)
        self.optimizer.step()
        x = torch.cat([batch["x"], self.actor(batch["x"]).tanh()], -1)
        values = torch.stack([c(x) for c in self.critics])
        value = -(values.min(0).values if self.minimum else values.mean(0)).mean()
        self.actor_optimizer.zero_grad()
        value.backward()
        self.actor_optimizer.step()
        with torch.no_grad():
            for p, t in zip(self.critics.parameters(), self.targets.parameters(), strict=True):
                t.lerp_(p, 0.05)
        return {"loss": loss, "value": value}

    def tensors(self):
        parameters = [*self.critics.parameters(), *self.targets.parameters(), *self.actor.parameters()]
        return parameters + [v for s in self.optimizer.state.values() for v in s.values()]


def batch(seed):
    return TensorDict({"x": rows(seed), "next": rows(seed + 1), "a": rows(seed + 2, width=2),
                       "r": rows(seed + 3, width=1)}, batch_size=[ROWS])  # fmt: skip


@pytest.mark.parametrize(("clip", "minimum"), [(False, False), (True, True)])
def test_a_whole_update_trains_as_eager(clip, minimum):
    fused, eager = Ensemble(clip=clip, minimum=minimum), Ensemble(clip=clip, minimum=minimum)
    update = grl.compile_update(fused.step, batch(0), backend="eager", strict=True)
    program = update.entries()[0].program
    found = counts(program)
    assert found["bmm"] >= 12 and found["mm"] + found["addmm"] <= 12, "only the actor's products stand alone"
    for seed in range(20):
        out, expected = update(batch(seed)), eager.step(batch(seed))
        torch.testing.assert_close(out["loss"], expected["loss"].detach(), rtol=1e-9, atol=1e-12)
    for a, b in zip(fused.tensors(), eager.tensors(), strict=True):
        torch.testing.assert_close(a.double(), b.detach().double(), rtol=1e-8, atol=1e-9)


def test_the_pass_is_done_after_one_run_and_leaves_its_argument_alone():
    program, _ = traced((listed(ensemble()), ["x"], names(LANES)), x=rows())
    text = program.code
    once = fuse_parallel_networks(program)
    assert program.code == text and fuse_parallel_networks(once).code == once.code


def test_one_optimiser_may_serve_both_ensembles():
    """State of equal shapes, read in another order by a second pack."""
    critics = ensemble()

    def both(x):
        return sum(c(x) for c in critics) + sum(c(x.cos()) for c in reversed(critics))

    program, td = traced((both, ["x"], ["y"]), x=rows())
    assert_same(program, run_passes(program), td["x"])
