import pytest
import torch
from tensordict import TensorDict
from torch import nn

import graphrl as grl
from graphrl import KeyedGraph
from graphrl.compiler.backends import eager
from graphrl.compiler.verify import float64_reference, relative_error, verify_lowered
from graphrl.errors import ParityError

INF, NAN = float("inf"), float("nan")


def program(width=64):
    graph = KeyedGraph((nn.Sequential(nn.Linear(width, width), nn.Tanh()), ["x"], ["y"]))
    x = torch.randn(4, width)
    traced = grl.trace(graph, TensorDict(x=x, batch_size=[4]))
    return traced, traced.arguments([x])


def test_the_interpreter_passes_and_the_tensors_given_are_untouched():
    traced, arguments = program()
    before = [t.clone() for t in arguments]
    assert verify_lowered(traced, eager.BACKEND.lower(traced), "eager", arguments) < 1e-6
    assert all(torch.equal(a, b) for a, b in zip(before, arguments, strict=True))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda y: y + 1e-3,
        lambda y: y.roll(1, 0),
        lambda y: y.double(),
        lambda y: y[:1],
        lambda y: torch.where(torch.arange(4)[:, None] == 2, NAN, y),
    ],
    ids=["offset", "order", "dtype", "shape", "nan"],
)
def test_a_wrong_result_names_backend_and_key(spoil):
    traced, arguments = program()
    with pytest.raises(ParityError, match="faulty computes 'y' of program wrongly"):
        verify_lowered(traced, lambda a: [spoil(traced.graph_module(*a)[0])], "faulty", arguments)


def test_a_constant_is_found_out_by_fresh_inputs():
    traced, arguments = program()
    frozen = traced.graph_module(*arguments)
    with pytest.raises(ParityError):
        verify_lowered(traced, lambda a: frozen, "faulty", arguments)


def test_written_state_is_compared_too():
    graph = KeyedGraph((nn.BatchNorm1d(3), ["x"], ["y"]))
    x = torch.randn(8, 3)
    traced = grl.trace(graph, TensorDict(x=x, batch_size=[8]))
    with pytest.raises(ParityError, match="computes nodes.0.module.(running_|num_)"):
        forgetful = lambda a: traced.graph_module(*(t.clone() for t in a))  # noqa: E731
        verify_lowered(traced, forgetful, "faulty", traced.arguments([x]))


def test_the_reference_is_computed_in_float64():
    traced, arguments = program(512)
    x = arguments[0]
    (reference,) = float64_reference(traced, [x])
    assert reference.dtype == torch.float64
    with torch.no_grad():
        exact = torch.tanh(x.double() @ arguments[1].double().t() + arguments[2].double())
    torch.testing.assert_close(reference, exact, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("found", "reference", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.2], [1.0, 2.0], 0.1),
        ([NAN, 2.0], [NAN, 2.0], 0.0),
        ([INF, 2.0], [INF, 2.0], 0.0),
        ([INF, 2.0], [-INF, 2.0], INF),
        ([NAN, 2.0], [INF, 2.0], INF),
        ([NAN, 2.0], [1.0, 2.0], INF),
        ([1.0, 2.0], [NAN, 2.0], INF),
        ([0.0, 2.0], [NAN, 2.0], INF),
        ([], [], 0.0),
        ([1.0], [1.0, 2.0], INF),
    ],
)
def test_relative_error(found, reference, expected):
    assert relative_error(torch.tensor(found), torch.tensor(reference)) == pytest.approx(expected, abs=1e-6)


def test_integers_are_equal_or_not():
    assert relative_error(torch.tensor([1, 2]), torch.tensor([1, 2])) == 0.0
    assert relative_error(torch.tensor([1, 3]), torch.tensor([1, 2])) == INF


def test_a_result_that_rounding_alone_decides_is_no_error_but_a_wrong_one_is():
    """The sign of a difference that cancels, as an optimiser's first step is."""
    graph = KeyedGraph((lambda x: (x * 3 / 3 - x).sign().double().float(), ["x"], ["y"]))
    td = TensorDict(x=torch.randn(64, 1), batch_size=[64])
    program = grl.trace(graph, td)
    with torch.no_grad():
        verify_lowered(program, lambda values: [(values[0] / 3 * 3 - values[0]).sign()], "other", [td["x"]])
        steady = grl.trace(KeyedGraph((lambda x: 2 * x, ["x"], ["y"])), td)
        with pytest.raises(ParityError, match="other computes 'y'"):
            verify_lowered(steady, lambda values: [2.001 * values[0]], "other", [td["x"]])
