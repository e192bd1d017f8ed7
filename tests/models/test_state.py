"""State nodes against the sentence that defines each, step by step in Python."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

import graphrl as grl
from graphrl.errors import GraphError
from graphrl.models import LowPassFilter, ObservationHistory, PhaseClock, PreviousAction

F64 = torch.float64
STEPS, ROWS, SIZE = 9, 3, 2


def starts() -> Tensor:
    """[T, B, 1]: each row starts at 0; the second again at 4, the third at 3 and 4."""
    flags = torch.zeros(STEPS, ROWS, 1, dtype=torch.bool)
    flags[0], flags[4, 1], flags[3, 2], flags[4, 2] = True, True, True, True
    return flags


def walked(module, x, flags, state=None):
    """The module's outputs [T, B, ...], its state fed back, from garbage at first."""
    rows = x.shape[1:-1]
    state = torch.full((*rows, *module.state_shape), 7.0, dtype=x.dtype) if state is None else state
    outs = []
    for t in range(x.shape[0]):
        td = TensorDict({module.state_key: state, "observation": x[t], "is_init": flags[t]}, batch_size=rows)
        td = module(td)
        outs.append(td[module.out_keys[0]])
        state = td["next", module.state_key]
    return torch.stack(outs)


def since(flags: Tensor, t: int, row: int) -> int:
    """The step at which the episode of step t began."""
    return max(k for k in range(t + 1) if flags[k, row])


@pytest.mark.parametrize("padding", ["same", "constant"])
@pytest.mark.parametrize("order", ["oldest_first", "newest_first"])
def test_a_history_holds_the_last_observations_of_its_episode(order: str, padding: str) -> None:
    module = ObservationHistory(SIZE, 4, order=order, padding=padding, padding_value=-3.0, dtype=F64)
    x, flags = torch.randn(STEPS, ROWS, SIZE, dtype=F64), starts()
    found = walked(module, x, flags)
    assert found.shape == (STEPS, ROWS, 8)
    for t in range(STEPS):
        for row in range(ROWS):
            begin = since(flags, t, row)
            before = x[begin, row] if padding == "same" else torch.full((SIZE,), -3.0, dtype=F64)
            frames = [x[k, row] if k >= begin else before for k in range(t - 3, t + 1)]
            wanted = torch.cat(frames if order == "oldest_first" else frames[::-1])
            assert torch.equal(found[t, row], wanted)


def test_a_history_that_is_not_flattened_keeps_time_as_an_axis() -> None:
    module = ObservationHistory(SIZE, 4, flatten=False, dtype=F64)
    x = torch.randn(STEPS, 2, ROWS, SIZE, dtype=F64)  # two batch dims
    flags = torch.zeros(STEPS, 2, ROWS, 1, dtype=torch.bool)
    flags[0] = True
    found = walked(module, x, flags)
    assert found.shape == (STEPS, 2, ROWS, 4, SIZE)
    assert torch.equal(found[5], x[2:6].movedim(0, -2))


@pytest.mark.parametrize("initial", [None, 0.0, (1.0, -2.0)])
def test_a_filter_follows_its_equation_from_where_it_starts(initial: object) -> None:
    module = LowPassFilter(SIZE, cutoff_hz=4.0, rate_hz=50.0, initial=initial, dtype=F64)
    assert module.alpha == pytest.approx(1 - math.exp(-2 * math.pi * 4 / 50), rel=1e-12)
    x, flags = torch.randn(STEPS, ROWS, SIZE, dtype=F64), starts()
    found = walked(module, x, flags)
    for row in range(ROWS):
        y = None
        for t in range(STEPS):
            if flags[t, row]:
                y = x[t, row] if initial is None else torch.tensor(initial, dtype=F64)
            y = y + module.alpha * (x[t, row] - y)
            torch.testing.assert_close(found[t, row], y, rtol=1e-12, atol=0)


def test_a_clock_runs_through_its_phase_and_stays_on_the_circle() -> None:
    module = PhaseClock(1.5, 50.0, offsets=(0.0, 0.5, 0.25), dtype=F64)
    flags = starts()
    found = walked(module, torch.zeros(STEPS, ROWS, 1, dtype=F64), flags)
    offsets = torch.tensor([0.0, 0.5, 0.25], dtype=F64)
    for t in range(STEPS):
        for row in range(ROWS):
            phase = 2 * math.pi * (1.5 * (t - since(flags, t, row)) / 50 + offsets)
            torch.testing.assert_close(found[t, row], torch.cat([phase.sin(), phase.cos()]), rtol=0, atol=1e-13)
    single = PhaseClock(1.5, 50.0)
    state = single.initial_state(1)
    for _ in range(20_000):  # 600 cycles in float32, back at the start
        state = single._step(state, state)[1]
    torch.testing.assert_close(state, single.initial_state(1), rtol=0, atol=2e-3)
    assert float(state.norm()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("clip", [None, (-1.0, (0.5, 1.0))])
def test_the_previous_action_is_that_of_the_step_before(clip: object) -> None:
    previous = PreviousAction(SIZE, initial=(0.5, -0.25), clip=clip, dtype=F64)
    graph = grl.KeyedGraph(
        previous, (lambda p, x: 0.3 * p + 3 * x, ["previous_action", "observation"], ["action"]), previous.feedback()
    )
    x, flags = torch.randn(STEPS, ROWS, SIZE, dtype=F64), starts()
    state = torch.full((ROWS, SIZE), 7.0, dtype=F64)
    action = state
    for t in range(STEPS):
        td = graph(TensorDict(observation=x[t], previous_action_state=state, is_init=flags[t], batch_size=[ROWS]))
        kept = action if clip is None else torch.clamp(action, torch.tensor(-1.0), torch.tensor([0.5, 1.0], dtype=F64))
        wanted = torch.where(flags[t], torch.tensor([0.5, -0.25], dtype=F64), kept)
        assert torch.equal(td["previous_action"], wanted)
        action, state = td["action"], td["next", "previous_action_state"]


MAKERS = {
    "same": lambda **k: ObservationHistory(SIZE, 3, **k),
    "constant": lambda **k: ObservationHistory(SIZE, 3, padding="constant", order="newest_first", **k),
    "first": lambda **k: LowPassFilter(SIZE, alpha=0.3, **k),
    "value": lambda **k: LowPassFilter(SIZE, alpha=0.3, initial=0.2, **k),
    "clock": lambda **k: PhaseClock(3.0, 50.0, **k),
}


@pytest.mark.parametrize("name", MAKERS)
def test_over_time_is_one_step_after_the_other(name: str) -> None:
    module = MAKERS[name](dtype=F64)
    x, flags = torch.randn(STEPS, ROWS, SIZE, dtype=F64), starts()
    flags[0, 0] = False  # goes on from the state that is there
    state = torch.randn(ROWS, *module.state_shape, dtype=F64)
    rows = TensorDict({"observation": x.transpose(0, 1), "is_init": flags.transpose(0, 1)}, batch_size=[ROWS, STEPS])
    rows[module.state_key] = state[:, None].expand(ROWS, STEPS, *module.state_shape)
    found = module.over_time()(rows)
    torch.testing.assert_close(found[module.out_keys[0]].transpose(0, 1), walked(module, x, flags, state))


@pytest.mark.parametrize("name", ["same", "constant", "first", "value"])
def test_gradient_flows_to_input_and_state(name: str) -> None:
    module = MAKERS[name](dtype=F64).over_time()
    flags = starts().transpose(0, 1)

    def run(x: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        rows = TensorDict({"observation": x, "is_init": flags, module.state_key: state}, batch_size=[ROWS, STEPS])
        out = module(rows)
        return out[module.out_keys[0]], out[module.out_keys[1]]

    x = torch.randn(ROWS, STEPS, SIZE, dtype=F64, requires_grad=True)
    state = torch.randn(ROWS, STEPS, *module.state_shape, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (x, state), fast_mode=True)


def everything() -> grl.KeyedGraph:
    previous = PreviousAction(2, initial=(0.5, -0.5), clip=(-1.0, 1.0))
    net = nn.Sequential(nn.Linear(6 + 2 + 2 + 4, 8), nn.Tanh(), nn.Linear(8, 2))
    keys = ["history", "previous_action", "filtered", "phase"]
    return grl.KeyedGraph(
        ObservationHistory(SIZE, 3), previous, LowPassFilter(SIZE, cutoff_hz=5.0, rate_hz=50.0),
        PhaseClock(2.0, 50.0, offsets=(0.0, 0.5)), (lambda *x: 2 * net(torch.cat(x, -1)), keys, ["action"]),
        previous.feedback(),
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["inductor", "native", "onnx"])
def test_a_compiled_policy_carries_every_kind_of_state(backend: str) -> None:
    torch.manual_seed(0)
    graph = everything()
    if backend == "onnx":
        pytest.importorskip("onnxruntime")
    fast = grl.compile(graph, backend=backend, strict=True)
    carried = [key for key in graph.in_keys if ("next", key) in graph.out_keys]
    assert carried == ["history_state", "previous_action_state", "filtered_state", "phase_state"]
    nodes = {m.state_key: m for m in graph.modules() if hasattr(m, "state_key")}
    state = {key: torch.full((ROWS, *nodes[key].state_shape), 7.0) for key in carried}
    other = dict(state)
    with torch.no_grad():
        for flags in starts():
            given = {"observation": torch.randn(ROWS, SIZE), "is_init": flags}
            a, b = (f(TensorDict({**given, **s}, batch_size=[ROWS])) for f, s in ((fast, state), (graph, other)))
            torch.testing.assert_close(a["action"], b["action"], rtol=1e-5, atol=1e-6)
            state, other = ({key: td["next", key] for key in carried} for td in (a, b))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ObservationHistory(2, 0), "0 for a size or length"),
        (lambda: ObservationHistory(2, 3, order="last"), "order='last'.*'newest_first'"),
        (lambda: ObservationHistory(2, 3, padding="zero"), "padding='zero'.*'constant'"),
        (lambda: LowPassFilter(2), "give alpha, or cutoff_hz and rate_hz"),
        (lambda: LowPassFilter(2, cutoff_hz=1.0, rate_hz=0.0), "expected positive numbers"),
        (lambda: LowPassFilter(2, alpha=0.5, initial=()), "0 entries"),
        (lambda: ObservationHistory(2, 2, padding="constant", padding_value=math.nan), "expected finite numbers"),
        (lambda: PhaseClock(1.0, 50.0, offsets=(math.nan,)), "all of them finite"),
        (lambda: PreviousAction(2, clip=(1.0, (2.0, 0.5))), "no low above its high"),
        (lambda: PreviousAction(2, clip=(1.0,)), r"expected \(low, high\)"),
        (lambda: PreviousAction(2).feedback()(TensorDict(action=torch.zeros(1, 3))), r"\[1, 3\]: expected \[\*B, 2\]"),
        (lambda: LowPassFilter(2, alpha=0.1, cutoff_hz=1.0, rate_hz=50.0), "give alpha, or"),
        (lambda: LowPassFilter(2, alpha=1.5), "alpha is 1.5"),
        (lambda: LowPassFilter(2, alpha=0.5, initial=(1.0, 2.0, 3.0)), "3 entries; expected one number, or 2"),
        (lambda: PhaseClock(30.0, 50.0), "up to half the rate"),
        (lambda: PreviousAction(2, initial=(1.0,)), "1 entries; expected one number, or 2"),
        (lambda: walked(ObservationHistory(2, 3), torch.zeros(1, 1, 2), torch.zeros(1, 1, 1)), "expected bool"),
        (lambda: walked(ObservationHistory(3, 3), torch.zeros(1, 1, 2), starts()[:1, :1], torch.zeros(1, 3, 2)),
         r"'observation' is \[1, 2\]: expected \[\*B, 3\]"),
        (lambda: walked(ObservationHistory(2, 3), torch.zeros(1, 1, 2), starts()[:1, :1], torch.zeros(1, 2, 2)),
         r"'history_state' is \[1, 2, 2\], expected \[1, 3, 2\]"),
    ],
)  # fmt: skip
def test_what_makes_no_state_is_refused(make: object, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        make()
