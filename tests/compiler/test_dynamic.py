"""One program for any batch size: its numbers, its count, its limits."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import graphrl as grl
from graphrl import KeyedGraph
from graphrl.compiler import compiled as compiled_module
from graphrl.compiler.backends import get_backend
from graphrl.compiler.verify import relative_error
from graphrl.errors import CompileError, GraphError
from graphrl.models import GaussianActor

SIZES = (5, 3, 2, 17, 64, 1, 0, 131, 5)


def node(function):
    return lambda: KeyedGraph((function, ["x"], ["y"]))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(3, 4, batch_first=True)

    def forward(self, x):
        return self.cell(x.unsqueeze(1).expand(-1, 3, -1))[0]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.MultiheadAttention(4, 2, batch_first=True)
        self.embed = nn.Linear(3, 4)

    def forward(self, x):
        h = self.embed(x).unsqueeze(1).expand(-1, 5, -1)
        return self.layer(h, h, h, need_weights=False)[0]


GRAPHS = {
    "layers": lambda: KeyedGraph((nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), ["x"], ["y"])),
    "normalised over the batch": lambda: KeyedGraph((nn.BatchNorm1d(3), ["x"], ["y"])),
    "layer norm": lambda: KeyedGraph((nn.LayerNorm(3), ["x"], ["y"])),
    "recurrent": lambda: KeyedGraph((Recurrent(), ["x"], ["y"])),
    "attention": lambda: KeyedGraph((Attention(), ["x"], ["y"])),
    "convolution": lambda: KeyedGraph(
        (lambda x: x[:, None].expand(-1, 2, -1), ["x"], ["h"]), (nn.Conv1d(2, 3, 2), ["h"], ["y"])
    ),
    "sum over the batch": node(lambda x: x - x.mean(0)),
    "softmax over the batch": node(lambda x: x.softmax(0)),
    "running sum over the batch": node(lambda x: x.cumsum(0)),
    "flattened and back": node(lambda x: x.reshape(-1).tanh().view(x.shape[0], 3)),
    "pairs of rows": node(lambda x: (x[:, None] - x[None]).square().sum((-1, -2))[:, None]),
    "the batch size as a number": node(lambda x: x.sum(0, keepdim=True).expand_as(x) / x.shape[0]),
    "two copies": node(lambda x: torch.cat([x, 2 * x]).view(2, -1, 3).sum(0)),
    "sorted rows": node(lambda x: x.sort(0).values),
    "shifted rows": node(lambda x: x.roll(1, 0)),
    "made in the node": node(lambda x: x * torch.arange(x.shape[0])[:, None] + torch.ones(x.shape[0], 3)),
    "a draw": node(lambda x: x + torch.randn(x.shape[0], 3)),
    "a draw of two rows each": node(lambda x: x + torch.rand(2 * x.shape[0], 3).view(2, -1, 3).sum(0)),
    "a draw across": node(lambda x: x * torch.randn(3, x.shape[0]).t()),
    "a permutation": node(lambda x: x[torch.randperm(x.shape[0])]),
    "dropout": lambda: KeyedGraph((nn.Dropout(0.5), ["x"], ["y"])),
    "a loss": node(lambda x: x.square().mean().expand(x.shape[0])),
}


def rows(n, dtype=torch.float32):
    return TensorDict(x=torch.randn(n, 3, dtype=dtype), other=torch.zeros(n), batch_size=[n])


def outcome(module, td, seed):
    """Outputs, gradients and buffers of one seeded call."""
    td = td.clone()
    td["x"].requires_grad_(torch.is_grad_enabled())
    module.zero_grad()
    torch.manual_seed(seed)
    x, y = td["x"], module(td)["y"]
    grads = []
    if y.requires_grad:
        wanted = [x, *module.parameters()]
        weights = torch.linspace(-1, 1, y.numel()).view(y.shape)
        grads = torch.autograd.grad((y * weights).sum(), wanted, allow_unused=True)
        grads = [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, grads, strict=True)]
    return [y.detach(), *grads, *module.buffers()]


def assert_like_eager(make, backend, grad, sizes=SIZES):
    torch.manual_seed(0)
    graph, other = make(), make()
    dtype = torch.float64 if backend == "eager" else torch.float32
    graph.to(dtype), other.to(dtype)
    other.load_state_dict(graph.state_dict())
    fast = grl.compile(graph, backend=backend)
    with torch.set_grad_enabled(grad):
        for n in sizes:
            if n < 2 and any(isinstance(m, nn.BatchNorm1d) for m in graph.modules()):
                continue  # eager refuses
            td = rows(n, dtype)
            for found, expected in zip(outcome(fast, td, n), outcome(other, td, n), strict=True):
                assert relative_error(found, expected) < (1e-10 if dtype == torch.float64 else 1e-4)
    return fast


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("grad", [False, True])
def test_values_and_gradients_equal_eager_at_every_size(name, grad):
    fast = assert_like_eager(GRAPHS[name], "eager", grad)
    dynamic = [e for e in fast.entries() if e.program.dynamic]
    assert len(dynamic) == 1, [e.refusals for e in fast.entries()]
    assert len(fast.entries()) == 2 + 2 * (name != "normalised over the batch")  # sizes 0 and 1 have their own


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "name", ["layers", "normalised over the batch", "pairs of rows", "a draw across", "a permutation"]
)
def test_inductor_equals_eager_at_every_size(name, grad):
    fast = assert_like_eager(GRAPHS[name], "inductor", grad, (5, 3, 2, 17, 1000))
    assert [e.backend for e in fast.entries()] == ["inductor"] * 2 and fast.entries()[1].program.dynamic


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_two_programs_serve_all_sizes_and_nothing_is_traced_again(backend):
    fast = grl.compile(GRAPHS["layers"](), backend=backend)
    with torch.no_grad():
        fast(rows(4)), fast(rows(6))
        assert len(fast.retraces) == 1
        for n in range(2, 40):
            fast(rows(n)), fast.call(torch.zeros(n, 3))
    assert len(fast.entries()) == 2 and len(fast.retraces) == 1


def test_one_program_at_once_or_one_for_each_size():
    with torch.no_grad():
        once = grl.compile(GRAPHS["layers"](), rows(4), backend="eager", dynamic=True)
        once(rows(9)), once(rows(4))
        assert len(once.entries()) == 1 and once.retraces == []
        each = grl.compile(GRAPHS["layers"](), rows(4), backend="eager", dynamic=False)
        each(rows(9)), each(rows(5))
        assert len(each.entries()) == 3 and not any(e.program.dynamic for e in each.entries())


def test_a_rollout_of_one_row_does_not_open_the_batch_size():
    fast = grl.compile(GRAPHS["layers"](), backend="eager")
    with torch.no_grad():
        fast(rows(1)), fast(rows(64)), fast(rows(1)), fast(rows(0))
        assert not any(e.program.dynamic for e in fast.entries())
        fast(rows(32))
    assert [e.program.dynamic for e in fast.entries()] == [False, False, False, True]


def test_the_other_batch_dims_stay_fixed():
    graph = KeyedGraph((nn.Linear(3, 2), ["x"], ["h"]), (lambda h: h.cumsum(1), ["h"], ["y"]))
    fast = grl.compile(graph, backend="eager")
    with torch.no_grad():
        for n, t in ((4, 5), (6, 5), (7, 5), (4, 3), (9, 3), (8, 3)):
            td = TensorDict(x=torch.randn(n, t, 3), batch_size=[n, t])
            torch.testing.assert_close(fast(td.clone())["y"], graph(td.clone())["y"])
    assert [e.program.dynamic for e in fast.entries()] == [False, True, False, True]


def test_several_inputs_of_different_rank_and_dtype():
    def mix(x, index, scale, image):
        return x * scale[:, None] + image.mean((1, 2))[:, None] + index[:, None]

    keys = ["x", ("next", "index"), "scale", "image"]
    graph = KeyedGraph((mix, keys, [("next", "y")]))
    fast = grl.compile(graph, backend="inductor")
    with torch.no_grad():
        for n in (4, 6, 9, 2):
            td = TensorDict(
                {"x": torch.randn(n, 3), ("next", "index"): torch.arange(n), "scale": torch.rand(n),
                 "image": torch.randn(n, 2, 2)}, batch_size=[n]
            )  # fmt: skip
            torch.testing.assert_close(fast(td.clone())["next", "y"], graph(td.clone())["next", "y"])
            odd = td.clone()
            odd["x"] = odd["x"].repeat(1, 2)[:, ::2]  # another memory layout
            torch.testing.assert_close(fast(odd)["next", "y"], graph(odd.clone())["next", "y"])
    assert len(fast.entries()) == 2
    with pytest.raises(GraphError, match="node 0"):
        fast.call(torch.randn(5, 3), torch.arange(5), torch.rand(4), torch.randn(5, 2, 2))


# ---- where one program cannot serve all


def test_code_that_asks_for_the_size_gets_the_answer_of_each_size():
    graph = KeyedGraph((lambda x: x if x.shape[0] < 10 else 2 * x, ["x"], ["y"]))
    fast = grl.compile(graph, backend="eager")
    with torch.no_grad():
        for n in (4, 6, 9, 10, 12, 6, 30):
            td = rows(n)
            assert torch.equal(fast(td.clone())["y"], graph(td.clone())["y"]), n
    assert [e.program.dynamic for e in fast.entries()] == [False, True, True]
    assert "from 2 to 9" in fast.entries()[1].reason and "from 10" in fast.entries()[2].reason


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x if x.shape[0] % 2 else 2 * x,
        lambda x: x * int(x.shape[0]),
        lambda x: x + torch.ones(len(x), 3),
        lambda x: x * torch.tensor(float(x.shape[0])),
        lambda x: x * x.tolist()[0][0] if x.shape[0] > 10**6 else sum(x[i : i + 1] for i in range(x.shape[0])) + x,
    ],
)
def test_code_that_fixes_the_size_gets_a_program_for_each(function):
    graph = KeyedGraph((function, ["x"], ["y"]))
    fast = grl.compile(graph, backend="eager")
    with torch.no_grad():
        for n in (4, 6, 7, 2, 11, 4):
            td = rows(n)
            torch.testing.assert_close(fast(td.clone())["y"], graph(td.clone())["y"])
    if not any(e.program.dynamic for e in fast.entries()):
        assert len(fast.entries()) == 5 and "for a program of any batch size:" in str(grl.explain(fast))


def test_a_batch_that_must_divide_fails_as_in_eager():
    graph = KeyedGraph((lambda x: x.view(-1, 2, 3).flip(1).view(-1, 3), ["x"], ["y"]))
    fast = grl.compile(graph, backend="eager")
    with torch.no_grad():
        for n in (4, 6, 10):
            td = rows(n)
            assert torch.equal(fast(td.clone())["y"], graph(td.clone())["y"])
        with pytest.raises(GraphError, match="node 0"):
            fast(rows(5))


def test_numbers_that_are_wrong_at_another_size_are_never_returned(monkeypatch):
    backend = get_backend("inductor")
    lower = type(backend).lower

    def wrong(self, program):
        run = lower(self, program)

        def shifted(values):
            off = float(values[0].shape[0] == 131)
            return [t + off for t in run(values)]

        return shifted if program.dynamic else run

    monkeypatch.setattr(type(backend), "lower", wrong)
    graph = GRAPHS["layers"]()
    fast = grl.compile(graph, backend="inductor")
    with torch.no_grad():
        for n in (4, 6, 131):
            td = rows(n)
            torch.testing.assert_close(fast(td.clone())["y"], graph(td.clone())["y"])
    assert not any(e.program.dynamic for e in fast.entries())
    assert "from eager at batch size [131]" in fast.entries()[1].refusals[0]
    with pytest.raises(CompileError, match=r"no program for any batch size.*batch size \[131\]"):
        grl.compile(graph, rows(4), backend="inductor", dynamic=True, strict=True)


@pytest.mark.parametrize("backend", ["native", "onnx"])
def test_backends_of_fixed_shapes_keep_a_program_for_each_size(backend):
    pytest.importorskip("onnxruntime") if backend == "onnx" else None
    graph = GRAPHS["layers"]()
    fast = grl.compile(graph, backend=backend)
    with torch.no_grad():
        for n in (4, 6, 9):
            td = rows(n)
            torch.testing.assert_close(fast(td.clone())["y"], graph(td.clone())["y"])
    assert [e.backend for e in fast.entries()] == [backend] * 3
    assert f"refused by {backend} for a program of any batch size" in str(grl.explain(fast)).replace("\n", " ")


def test_the_number_of_programs_stays_bounded(monkeypatch):
    monkeypatch.setattr(compiled_module, "MAX_PROGRAMS", 3)
    fast = grl.compile(GRAPHS["layers"](), backend="eager")
    with torch.no_grad():
        for n in range(2, 30):
            fast(rows(n))
        fast(rows(1)), fast(rows(0))
    assert [e.backend for e in fast.entries()] == ["eager", "eager", "eager", "eager graph"]


def test_weights_stay_live_and_replaced_ones_are_seen():
    graph = GRAPHS["layers"]()
    fast = grl.compile(graph, rows(4), backend="inductor", dynamic=True)
    with torch.no_grad():
        fast(rows(6))
        graph.load_state_dict({k: torch.zeros_like(v) for k, v in graph.state_dict().items()}, assign=True)
        assert (fast(rows(8))["y"] == 0).all() and fast.retraces == []
        graph.double()
        assert fast(rows(8, torch.float64))["y"].dtype == torch.float64


def test_sampling_follows_eager_s_generator_at_every_size():
    actor = GaussianActor(3, 2)
    fast = grl.compile(actor, backend="inductor")
    for n in (4, 9, 4, 30, 9):
        td = TensorDict(observation=torch.randn(n, 3), batch_size=[n])
        with torch.no_grad():
            torch.manual_seed(n)
            found, state = fast(td.clone()), torch.get_rng_state()
            torch.manual_seed(n)
            expected = actor(td.clone())
        assert torch.equal(state, torch.get_rng_state())
        torch.testing.assert_close(found["action"], expected["action"])
    assert len(fast.entries()) == 2


# ---- what explain says


def test_the_reason_of_every_program_names_what_changed():
    graph = KeyedGraph((nn.Dropout(0.5), ["x"], ["h"]), (torch.mul, ["h", "s"], ["y"]))
    fast = grl.compile(graph, backend="eager")

    def call(n=4, width=3, dtype=torch.float32):
        x, s = torch.zeros(n, width), torch.zeros(n, 1, dtype=dtype)
        fast(TensorDict(x=x, s=s, batch_size=[n]))
        return fast.retraces[-1] if fast.retraces else None

    with torch.no_grad():
        assert call() is None
        assert call(6).startswith("batch size 4 -> 6: ") and call(6).endswith("one program for any batch size from 2")
        assert call(dtype=torch.float64).startswith("dtype of s float32 -> float64: ")
        assert call(width=5).startswith("shape of x [4, 3] -> [4, 5]: ")
        graph.eval()
        assert call().startswith("1 module(s) train -> eval: ")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert call().startswith("autocast on the CPU off -> bfloat16: ")
    assert "dtype of s float32 -> float64" in str(grl.explain(fast))


def test_gradients_switched_on_are_a_reason():
    fast = grl.compile(GRAPHS["layers"](), rows(4), backend="eager")
    fast(rows(4))
    assert fast.retraces[-1].startswith("gradients off -> on: ")


def test_the_print_of_a_program_for_any_size_runs():
    program = grl.trace(GRAPHS["two copies"](), rows(4), dynamic=True)
    scope: dict = {}
    exec(program.code, scope)
    x = torch.randn(7, 3)
    torch.testing.assert_close(scope["program"](x)[0], program.run(x)[0])
    torch.testing.assert_close(program.run(x)[0], 3 * x)
    assert "any batch size from 2" in program.code
