"""bfloat16 products: what is rounded, what is not, and how far results may move."""

import copy

import pytest
import torch
from regression import Regression, batch
from tensordict import TensorDict
from torch import nn

import graphrl as grl
from graphrl import KeyedGraph
from graphrl.compiler.passes.lower_precision import lower_precision
from graphrl.compiler.passes.pipeline import run_passes
from graphrl.compiler.verify import product_rounding, relative_error
from graphrl.errors import CompileError, SpecError

U = 2**-8  # bfloat16's unit roundoff


def mlp(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def traced(function, x):
    td = TensorDict(x=x, batch_size=[len(x)])
    return run_passes(grl.trace(KeyedGraph((function, ["x"], ["y"])), td))


def lines(program):
    body = program.code.split("):\n", 1)[1].strip().splitlines()
    return [line.split("  #")[0].strip().replace("torch.ops.aten.", "") for line in body]


def test_before_and_after():
    layer = nn.Linear(6, 3)
    program = traced(lambda x: layer(x), torch.randn(8, 6))
    assert lines(program) == [
        "permute = permute.default(layer_weight, [1, 0])",
        "addmm = addmm.default(layer_bias, x, permute)",
        "return (addmm,)",
    ]
    assert lines(lower_precision(program)) == [
        "_to_copy_1 = _to_copy.default(layer_weight, dtype=torch.bfloat16)",
        "_to_copy = _to_copy.default(x, dtype=torch.bfloat16)",
        "permute_1 = permute.default(_to_copy_1, [1, 0])",
        "mm = mm.default(_to_copy, permute_1)",
        "_to_copy_2 = _to_copy.default(mm, dtype=torch.float32)",
        "add = add.Tensor(_to_copy_2, layer_bias)",
        "return (add,)",
    ]


def test_a_factor_of_two_products_is_rounded_once_and_the_pass_is_done_after_one_run():
    w = torch.randn(6, 6)
    once = lower_precision(traced(lambda x: x @ w + x @ w.t() + w @ x.t() @ x, torch.randn(6, 6)))
    casts = [n for n in once.graph_module.graph.nodes if n.kwargs.get("dtype") == torch.bfloat16]
    assert len(casts) == 3, "x, w, and the product that is a factor itself"
    assert lower_precision(once).code == once.code


def test_only_products_are_rounded():
    program = lower_precision(traced(lambda x: (x.exp().sum(-1) / 7).log(), torch.randn(8, 6)))
    assert all(n.meta["val"].dtype == torch.float32 for n in program.placeholders())
    assert "bfloat16" not in program.code and product_rounding(program) == 0


@pytest.mark.parametrize("make", [
    lambda: nn.Conv2d(2, 3, 3, padding=1),
    lambda: nn.Conv2d(2, 3, 3, bias=False),
    lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, 4)),
], ids=["convolution", "no bias", "linear"])  # fmt: skip
def test_values_and_gradients_within_the_rounding_of_products(make):
    torch.manual_seed(0)
    module = make()
    wide = copy.deepcopy(module).double()
    x = torch.randn(5, 2, 6, 6, requires_grad=True)
    fast = grl.compile(KeyedGraph((module, ["x"], ["y"])), TensorDict(x=x, batch_size=[5]), backend="eager",
                       strict=True, precision="bf16")  # fmt: skip
    y = fast(TensorDict(x=x, batch_size=[5]))["y"]
    y.square().sum().backward()
    again = x.detach().double().requires_grad_()
    expected = wide(again)
    expected.square().sum().backward()
    pairs = [(y, expected), (x.grad, again.grad)]
    pairs += [(p.grad, q.grad) for p, q in zip(module.parameters(), wide.parameters(), strict=True)]
    errors = [relative_error(a.detach(), b.detach()) for a, b in pairs]
    assert all(a.dtype == torch.float32 for a, _ in pairs)
    assert 1e-5 < max(errors) < 4 * U


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_network_and_its_gradients(backend):
    module, wide = mlp(), mlp(torch.float64)
    x = torch.randn(32, 6)
    fast = grl.compile(KeyedGraph((module, ["x"], ["y"])), TensorDict(x=x, batch_size=[32]), backend=backend,
                       strict=True, precision="bf16")  # fmt: skip
    y = fast(TensorDict(x=x, batch_size=[32]))["y"]
    y.square().mean().backward()
    expected = wide(x.double())
    expected.square().mean().backward()
    assert 1e-5 < relative_error(y.detach(), expected.detach()) < 3 * U * 3**0.5
    for p, q in zip(module.parameters(), wide.parameters(), strict=True):
        assert relative_error(p.grad, q.grad) < 3 * U * 5**0.5


def test_an_update_keeps_master_weights():
    agent, eager = Regression(dtype=torch.float32), Regression(dtype=torch.float32)
    update = grl.compile_update(agent.step, batch(dtype=torch.float32), backend="eager", precision="bf16")
    entry = update.entries()[0]
    assert entry.program.history[-1].name == "lower_precision"
    for seed in range(50):
        found = update(batch(dtype=torch.float32, seed=seed))["loss"]
        expected = eager.step(batch(dtype=torch.float32, seed=seed))["loss"]
        assert abs(found - expected) < 0.05 * expected + 1e-3
    assert all(t.dtype in (torch.float32, torch.float64) for t in agent.tensors())
    moved = [relative_error(a.detach(), b.detach()) for a, b in zip(agent.net.parameters(), eager.net.parameters(),
                                                                     strict=True)]  # fmt: skip
    assert 0 < max(moved) < 0.1


def test_a_gradient_that_rounding_turns_to_zero_is_no_disagreement():
    weight = nn.Parameter(torch.zeros(4, 1))
    adam = torch.optim.Adam([weight])

    def step(td):
        y = td["x"] @ weight.T
        loss = (y[0] - y[1]).sum()
        adam.zero_grad()
        loss.backward()
        adam.step()
        return {"loss": loss}

    # Every gradient is 2^-9: Adam's first step is 1e-3. In bfloat16 x is 1 in both rows, and there is no step.
    td = TensorDict(x=torch.tensor([[1 + 2**-9], [1.0]]), batch_size=[2])
    grl.compile_update(step, td, backend="eager", strict=True)(td)
    assert (weight < -0.9e-3).all()
    with torch.no_grad():
        weight.zero_()
    adam.state.clear()
    grl.compile_update(step, td, backend="eager", strict=True, precision="bf16")(td)
    assert (weight == 0).all()


def test_a_wrong_product_is_still_refused(monkeypatch):
    from graphrl.compiler.backends.eager import BACKEND
    from graphrl.errors import ParityError

    lower = BACKEND.lower
    monkeypatch.setattr(type(BACKEND), "lower", lambda self, program: lambda v: [1.2 * t for t in lower(program)(v)])
    with pytest.raises(ParityError, match="wrongly"):
        grl.compile(KeyedGraph((mlp(), ["x"], ["y"])), TensorDict(x=torch.randn(8, 6), batch_size=[8]),
                    backend="eager", precision="bf16")(TensorDict(x=torch.randn(8, 6), batch_size=[8]))  # fmt: skip


@pytest.mark.parametrize("backend", ["native", "onnx"])
def test_backends_that_know_no_bfloat16_say_so(backend):
    with torch.no_grad(), pytest.raises(CompileError, match="bfloat16|bf16"):
        grl.compile(KeyedGraph((mlp(), ["x"], ["y"])), TensorDict(x=torch.randn(8, 6), batch_size=[8]),
                    backend=backend, strict=True, precision="bf16")  # fmt: skip


def test_float64_and_unknown_precisions_are_refused():
    graph = KeyedGraph((mlp(torch.float64), ["x"], ["y"]))
    td = TensorDict(x=torch.randn(8, 6, dtype=torch.float64), batch_size=[8])
    with pytest.raises(CompileError, match="float64"):
        grl.compile(graph, td, backend="eager", precision="bf16")
    with pytest.raises(SpecError, match="'bf16'"):
        grl.compile(graph, precision="fp8")
    with pytest.raises(SpecError, match="'bf16'"):
        grl.compile_update(lambda td: {}, precision="half")
