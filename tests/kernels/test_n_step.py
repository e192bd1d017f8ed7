"""n-step returns against the float64 reference: borders, horizons, gradients, batching and tracers."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import copy_of_library, only_x86
from tensordict import TensorDict
from torch.fx.experimental.proxy_tensor import make_fx
from trajectories import random_trajectory

import graphrl as grl
from graphrl.errors import SpecError
from graphrl.kernels import gae, n_step_return
from graphrl.kernels.n_step import op as n_step_op
from graphrl.kernels.n_step.reference import n_step_reference

OP, BACKWARD = torch.ops.graphrl.n_step_return.default, torch.ops.graphrl.n_step_return_backward.default
SHAPES = [
    ((1, 1, 1), -2),
    ((2, 3, 40, 1), -2),
    ((3, 520, 1), -2),  # more than one tile
    ((50,), -1),
    ((6, 50), -1),
    ((50, 30), 0),  # time-major
    ((4, 60, 3, 1), -3),  # agents
    ((0, 5, 1), -2),
    ((5, 0, 1), -2),
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.05, torch.float16: 0.008}
seeds = st.integers(0, 2**31)
few = settings(max_examples=30, deadline=None)


def arguments(shape, dtype=torch.float64, end=0.1):
    t = random_trajectory(shape, dtype, end=end)
    return t.reward, t.done, t.terminated


def horizons(shape, time_dim, kind):
    """An int, one horizon per trajectory, or one per step; some below 1, which count as 1, or longer than the batch."""
    if kind == "int":
        return 4
    generator = torch.Generator().manual_seed(3)
    shape = list(shape)
    if kind == "per trajectory":
        shape[time_dim] = min(1, shape[time_dim])
    n = torch.randint(0, 12, shape, generator=generator)
    n.view(-1)[-1:] = 10**6
    return n


def leaves(*tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


@pytest.mark.parametrize("kind", ["int", "per trajectory", "per step"])
@pytest.mark.parametrize(("shape", "time_dim"), SHAPES, ids=str)
def test_equals_the_reference(shape, time_dim, kind):
    n = horizons(shape, time_dim, kind)
    for dtype in TOLERANCE if shape == (2, 3, 40, 1) else [torch.float64]:
        for gamma in (0.99, torch.rand(shape).to(dtype)):
            found = n_step_return(*arguments(shape, dtype), gamma, n, time_dim=time_dim)
            expected = n_step_reference(*arguments(shape, dtype), gamma, n, time_dim=time_dim)
            assert found[2].dtype == torch.int64 and torch.equal(found[2], expected[2])
            for x, y in zip(found[:2], expected[:2], strict=True):
                assert x.dtype == dtype and x.shape == shape and x.is_contiguous()
                torch.testing.assert_close(x.double(), y, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("n", [1, 3, 10**9, 10**12])
def test_long_rows_on_several_threads_equal_one_thread(n):
    data, threads = arguments((600, 500, 1), torch.float32), torch.get_num_threads()
    results = []
    for count in (1, 4):
        torch.set_num_threads(count)
        try:
            results.append(n_step_return(*data, 0.99, n))
        finally:
            torch.set_num_threads(threads)
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)
    expected = n_step_reference(*(x[597:, 400:] for x in data), 0.99, n)
    for x, y in zip(results[0], (*expected[:2], expected[2] + 400), strict=True):
        torch.testing.assert_close(x[597:, 400:].to(y.dtype), y, rtol=2e-5, atol=2e-5)


def test_non_contiguous_inputs_and_integer_flags_equal_contiguous_and_boolean_ones():
    data = [x.transpose(1, 2) for x in arguments((5, 30, 4, 1))]
    expected = n_step_return(*(x.contiguous() for x in data), 0.9, 3)
    for flags in (data[1:], [x.long() * 2 for x in data[1:]]):
        for x, y in zip(n_step_return(data[0], *flags, 0.9, 3), expected, strict=True):
            assert torch.equal(x, y) and x.is_contiguous()


def test_horizons_of_any_integer_dtype_and_size_are_taken():
    data, small = arguments((3, 20, 1)), torch.tensor([1, 3, 20]).view(3, 1, 1)
    expected = n_step_return(*data, 0.9, small)
    for n in (small.to(torch.uint8), small.to(torch.int32), torch.tensor([-(2**40), 3, 2**40]).view(3, 1, 1)):
        for x, y in zip(n_step_return(*data, 0.9, n), expected, strict=True):
            assert torch.equal(x, y)


# --- what n steps mean ---


def test_three_steps_are_three_rewards_and_none_of_the_next_episode():
    """A five-step episode of ones, truncated or terminated, with another episode behind it."""
    for end in ("truncated", "terminated"):
        reward = torch.tensor([1.0] * 5 + [100.0] * 4, dtype=torch.float64)
        done = torch.arange(9) == 4
        terminated = done & (end == "terminated")
        found, discount, index = n_step_return(reward, done, terminated, 0.9, 3)
        torch.testing.assert_close(found[:5], torch.tensor([2.71, 2.71, 2.71, 1.9, 1.0]).double())
        assert (index[:5] + 1).tolist() == [3, 4, 5, 5, 5]  # the row behind the last one used, as buffers count
        kept = [0.729, 0.729] + ([0.729, 0.81, 0.9] if end == "truncated" else [0.0] * 3)
        torch.testing.assert_close(discount[:5], torch.tensor(kept).double())


def test_discount_has_the_power_of_the_rewards_taken():
    reward, never = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.bool)
    found, discount, index = n_step_return(reward, never, never, 0.9, 2)
    action_value = torch.full((2,), 10.0, dtype=torch.float64)
    target = found + discount * action_value.gather(0, index)
    torch.testing.assert_close(target[0].item(), 10.0)  # 10.9 where gamma keeps the power of one step


@few
@given(seeds, st.integers(1, 6), st.integers(1, 40), st.floats(0.0, 1.0))
def test_one_step_is_the_reward(seed, batch, length, gamma):
    t = random_trajectory((batch, length, 1), seed=seed)
    found, discount, index = n_step_return(t.reward, t.done, t.terminated, gamma, 1)
    assert torch.equal(found, t.reward)
    torch.testing.assert_close(discount, torch.where(t.terminated, 0.0, gamma).double())
    assert torch.equal(index, torch.arange(length).view(1, length, 1).expand(batch, length, 1))


@few
@given(seeds, st.integers(1, 6), st.integers(1, 40), st.floats(0.0, 1.0))
def test_all_steps_are_the_bootstrapped_return(seed, batch, length, gamma):
    t = random_trajectory((batch, length, 1), seed=seed)
    found, discount, index = n_step_return(t.reward, t.done, t.terminated, gamma, length)
    shifted = torch.cat([t.value[:, 1:], t.next_value[:, -1:]], 1)
    next_value = torch.where(t.done, t.next_value, shifted)
    expected = gae(t.reward, t.value, next_value, t.done, t.terminated, gamma, 1.0)[1]
    torch.testing.assert_close(found + discount * next_value.gather(1, index), expected)


@few
@given(seeds, st.integers(1, 6), st.integers(2, 40), st.integers(1, 50), st.booleans(), st.data())
def test_a_cut_makes_two_independent_trajectories(seed, batch, length, n, truncated, data):
    t = random_trajectory((batch, length, 1), seed=seed)
    at = data.draw(st.integers(1, length - 1))
    t.done[:, at - 1], t.terminated[:, at - 1] = True, not truncated
    row = (t.reward, t.done, t.terminated)
    whole = n_step_return(*row, 0.9, n)
    first, second = (n_step_return(*(x[:, part] for x in row), 0.9, n) for part in (slice(at), slice(at, None)))
    second = (*second[:2], second[2] + at)
    for x, y, z in zip(whole, first, second, strict=True):
        torch.testing.assert_close(x, torch.cat([y, z], 1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_stay_on_their_side_of_a_cut(bad):
    for shape, time_dim in (((9, 600, 1), -2), ((600, 40, 1), 0)):
        reward, done, terminated = arguments(shape)
        done.select(time_dim, 299).fill_(True)
        gamma = torch.rand(shape, dtype=torch.float64)
        before = n_step_return(reward, done, terminated, gamma, 5, time_dim=time_dim)
        lost = [reward.clone(), gamma.masked_fill(terminated, bad)]  # a gamma behind a terminal step counts for nothing
        for x in lost:
            x.narrow(time_dim, 300, 1).fill_(bad)
        inputs = leaves(*lost)
        after = n_step_return(inputs[0], done, terminated, inputs[1], 5, time_dim=time_dim)
        for x, y in zip(before, after, strict=True):
            assert torch.equal(x.narrow(time_dim, 0, 300), y.narrow(time_dim, 0, 300))
        head = (x.narrow(time_dim, 0, 300) for x in after[:2])
        for g in torch.autograd.grad(sum(x.square().sum() for x in head), inputs):
            assert g.narrow(time_dim, 0, 300).isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 0}, r"n=0, expected at least 1"),
        ({"n": 2.5}, r"n is a float, expected an int or an integer tensor"),
        ({"n": True}, r"n is a bool, expected an int"),
        ({"n": torch.ones(4, 1, 1)}, r"n is torch.float32, expected an integer dtype. n.long\(\)"),
        ({"n": torch.ones(4).long()}, r"n is \[4\] and does not broadcast to reward \[4, 9, 1\].*per trajectory"),
        ({"done": torch.zeros(4, 9).bool()}, r"done is \[4, 9\], but reward is \[4, 9, 1\].*done.unsqueeze\(-1\)"),
        ({"gamma": torch.ones(5, 1)}, r"gamma is \[5, 1\] and does not broadcast to reward \[4, 9, 1\]"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(change, message):
    right = dict(zip(("reward", "done", "terminated"), arguments((4, 9, 1)), strict=True)) | {"gamma": 0.9, "n": 3}
    with pytest.raises(SpecError, match=f"n_step_return: {message}"):
        n_step_return(**(right | change))


# --- gradients ---


@pytest.mark.parametrize("kind", ["int", "per step"])
@pytest.mark.parametrize(("shape", "time_dim"), [((1, 6, 1), -2), ((4, 2), 0)], ids=str)
def test_first_and_second_derivatives_match_finite_differences(shape, time_dim, kind):
    reward, done, terminated = arguments(shape)
    n = horizons(shape, time_dim, kind)
    sometimes_zero = torch.rand(shape).double().masked_fill(done.roll(1, time_dim), 0.0)
    for gamma in (torch.tensor(0.8).double(), sometimes_zero):
        inputs = leaves(reward, gamma)

        def run(reward, gamma):
            return n_step_return(reward, done, terminated, gamma, n, time_dim=time_dim)[:2]

        assert torch.autograd.gradcheck(run, inputs)
        assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("kind", ["int", "per trajectory", "per step"])
@pytest.mark.parametrize(("shape", "time_dim"), [((1, 520, 1), -2), ((40, 3), 0), ((2, 30, 3, 1), 1)], ids=str)
def test_gradients_equal_the_references(shape, time_dim, kind):
    reward, done, terminated = arguments(shape, end=0.03)
    weights = random_trajectory(shape, seed=2)[:2]
    n, gamma = horizons(shape, time_dim, kind), torch.rand(shape).double()
    grads = []
    for function in (n_step_return, n_step_reference):
        inputs = leaves(reward, gamma)
        out = function(inputs[0], done, terminated, inputs[1], n, time_dim=time_dim)[:2]
        grads.append(torch.autograd.grad(sum((x * w).sum() for x, w in zip(out, weights, strict=True)), inputs))
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected)
    alone = reward.clone().requires_grad_()  # without gamma's, a kernel of its own
    out = n_step_return(alone, done, terminated, gamma, n, time_dim=time_dim)[0]
    torch.testing.assert_close(torch.autograd.grad(out, alone, weights[0])[0], grads[1][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_keep_the_dtype_of_their_inputs(dtype):
    reward, done, terminated = arguments((4, 30, 1), dtype)
    inputs = leaves(reward, torch.tensor(0.9).double())
    out = n_step_return(inputs[0], done, terminated, inputs[1], 3)
    assert [x.dtype for x in torch.autograd.grad(out[0].sum() + out[1].sum(), inputs)] == [dtype, torch.float64]
    assert not out[2].requires_grad


def test_empty_trajectories_have_empty_gradients():
    for shape in ((0, 5, 1), (5, 0, 1)):
        reward, done, terminated = arguments(shape)
        inputs = leaves(reward, torch.tensor(0.9))
        for create_graph in (False, True):
            out = n_step_return(inputs[0], done, terminated, inputs[1], 3)[0]
            grads = torch.autograd.grad(out.sum(), inputs, create_graph=create_graph)
            assert [g.shape for g in grads] == [x.shape for x in inputs] and grads[1].item() == 0


def test_vmap_equals_a_loop():
    reward, done, terminated = arguments((6, 4, 20, 1))
    gamma, n = torch.rand(6).double(), torch.randint(1, 6, (6, 4, 1, 1))

    def loss(reward, done, terminated, gamma, n):
        found, discount, _ = n_step_return(reward, done, terminated, gamma, n)
        return found.square().sum() + discount.square().sum()

    for horizon, dim in ((n, 0), (3, None)):
        row = (reward, done, terminated, gamma, horizon)
        gradient = torch.func.grad(loss, argnums=(0, 3))
        mapped = torch.vmap(n_step_return, (0, 0, 0, 0, dim))(*row)
        mapped_gradient = torch.vmap(gradient, (0, 0, 0, 0, dim))(*row)
        for i in range(6):
            one = [x[i] if isinstance(x, torch.Tensor) else x for x in row]
            for found, expected in zip(mapped + mapped_gradient, n_step_return(*one) + gradient(*one), strict=True):
                torch.testing.assert_close(found[i], expected)


# --- tracers ---


def count(program, target):
    return sum(node.target is target for node in program.graph.nodes)


def sums_and_gradient(reward, done, terminated):
    reward = reward.detach().requires_grad_()
    found, discount, index = n_step_return(reward, done, terminated, 0.99, 3)
    return found.detach(), discount, index, torch.autograd.grad(found.square().sum(), reward)[0]


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_trace_has_one_node_and_one_more_for_the_gradient(mode):
    program = make_fx(sums_and_gradient, tracing_mode=mode)(*arguments((4, 20, 1)))
    assert count(program, OP) == 1 and count(program, BACKWARD) == 1
    other = arguments((4, 20, 1) if mode != "symbolic" else (7, 33, 1), end=0.2)
    torch.testing.assert_close(program(*other), sums_and_gradient(*other))


def test_a_keyed_graph_traces_to_one_node():
    def run(reward, done, terminated):
        return n_step_return(reward, done, terminated, 0.9, 3)

    names = ["reward", "done", "terminated"]
    graph = grl.KeyedGraph((run, names, ["n_step_reward", "discount", "bootstrap_index"]))
    td = TensorDict(dict(zip(names, arguments((4, 20, 1), torch.float32), strict=True)), batch_size=[4, 20])
    assert str(grl.trace(graph, td)).count("graphrl.n_step_return") == 1
    fast = grl.compile(graph, td, backend="eager")
    for name in graph.out_keys:
        assert torch.equal(fast(td.clone())[name], graph(td.clone())[name])


def test_compiles_without_graph_breaks():
    def run(reward, done, terminated, gamma, n):
        return n_step_return(reward, done, terminated, gamma, 3), n_step_return(reward, done, terminated, 0.9, n)

    data = (*arguments((4, 20, 1)), torch.tensor(0.9).double(), torch.randint(1, 6, (4, 1, 1)))
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*data), run(*data))
    results = []
    for function in (run, compiled):
        gamma = data[3].clone().requires_grad_()
        function(*data[:3], gamma, data[4])[0][0].sum().backward()
        results.append(gamma.grad)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("kind", ["int", "per step"])
def test_registration_passes_torchs_own_checks(kind):
    reward, done, terminated = arguments((3, 9, 1))
    gamma = torch.full(() if kind == "int" else (3, 9, 1), 0.9).double()
    hidden = (done, terminated, gamma, None if kind == "int" else torch.randint(1, 5, (3, 9, 1)), 3, -2)
    torch.library.opcheck(OP, (reward.requires_grad_(), *hidden))
    torch.library.opcheck(BACKWARD, (reward.detach(), *hidden), test_utils=("test_schema", "test_faketensor"))


@only_x86
def test_smallest_instruction_set_equals_the_reference(monkeypatch, tmp_path):
    monkeypatch.setattr(n_step_op, "_native", copy_of_library(tmp_path, monkeypatch))
    monkeypatch.setenv("GRAPHRL_ISA", "base")
    for shape, time_dim in (((1, 520, 1), 1), ((40, 9), 0)):
        for dtype, n in itertools.product((torch.float32, torch.float64), (3, torch.randint(1, 9, shape))):
            results = []
            for function in (n_step_return, n_step_reference):
                reward, done, terminated = arguments(shape, dtype)
                out = function(reward.requires_grad_(), done, terminated, 0.99, n, time_dim=time_dim)
                results.append((*out, *torch.autograd.grad(out[0].square().sum(), reward)))
            for x, y in zip(*results, strict=True):
                torch.testing.assert_close(x.double(), y.double(), rtol=1e-4, atol=1e-4)
