"""Every kernel that is a recurrence against its float64 reference, over shapes, dtypes, layouts and coefficients."""

from __future__ import annotations

import itertools

import pytest
import torch
from families import FAMILIES
from instruction_sets import copy_of_library, only_x86

from graphrl.errors import SpecError
from graphrl.kernels import _recurrence
from graphrl.kernels._recurrence import extents

SHAPES = [
    ((1, 1, 1), -2),
    ((3, 7, 1), -2),
    ((8, 128, 1), -2),
    ((2, 3, 40, 1), -2),
    ((13, 530, 1), -2),  # more rows than lanes, several tiles
    ((1, 1100, 1), -2),  # one long row
    ((2, 523, 1), -2),
    ((50,), -1),
    ((6, 50), -1),
    ((50, 6), 0),
    ((20, 300), 0),  # time-major: lanes along memory
    ((4, 60, 3, 1), -3),  # agents
    ((11, 150, 7, 1), -3),
    ((3, 20, 17, 1), 1),
    ((0, 5, 1), -2),
    ((5, 0, 1), -2),
    ((5, 4, 0, 1), -3),
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.06, torch.float16: 0.008}

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def assert_matches_reference(family, arguments, time_dim=None, tolerance=None):
    reward = arguments["reward"]
    tolerance = tolerance or TOLERANCE[reward.dtype]
    for found, expected in zip(family(arguments, time_dim), family.judge(arguments, time_dim), strict=True):
        assert found.dtype == reward.dtype and found.shape == reward.shape and found.is_contiguous()
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@every_family
@pytest.mark.parametrize(("shape", "time_dim"), SHAPES, ids=str)
def test_equals_the_reference(family, shape, time_dim):
    for dtype in DTYPES[: 2 if shape[time_dim] > 200 else 4]:  # half precision runs through float32's kernels
        assert_matches_reference(family, family.draw(shape, dtype), time_dim)


@every_family
@pytest.mark.parametrize(("shape", "time_dim"), SHAPES, ids=str)
def test_per_step_coefficients_equal_the_reference(family, shape, time_dim):
    arguments = family.draw(shape)
    steps = {name: torch.rand(shape).double() for name in family.coefficients}
    assert_matches_reference(family, arguments | steps, time_dim)
    if shape[time_dim] < 200:
        for name in family.coefficients:  # one per step, the other a number
            assert_matches_reference(family, arguments | {name: steps[name]}, time_dim)


@every_family
@pytest.mark.parametrize("number", [0.0, 1.0])
def test_coefficients_of_exactly_zero_and_one_equal_the_reference(family, number):
    arguments = family.draw((4, 50, 1))
    for name in family.coefficients:
        assert_matches_reference(family, arguments | {name: number})
        assert_matches_reference(family, arguments | {name: torch.full((50, 1), number).double()})


@every_family
@pytest.mark.parametrize(
    ("shape", "time_dim"), [((30,), -1), ((4, 30), -1), ((4, 30, 1), -2), ((4, 30, 3), -1), ((2, 4, 30, 1), -2)]
)
def test_time_is_last_but_for_a_trailing_one(family, shape, time_dim):
    arguments = family.draw(shape)
    for found, expected in zip(family(arguments), family(arguments, time_dim), strict=True):
        assert torch.equal(found, expected)
    for found, expected in zip(family.judge(arguments), family.judge(arguments, time_dim), strict=True):
        assert torch.equal(found, expected)


@every_family
def test_one_trajectory_is_the_same_in_every_layout(family):
    flat = family.draw((2, 30, 3))  # B, T, agents
    expected = family(flat, 1)

    def laid_out(edit, time_dim):
        return family({k: edit(v) if isinstance(v, torch.Tensor) else v for k, v in flat.items()}, time_dim)

    for i, x in enumerate(expected):
        for found, part in (
            (laid_out(lambda v: v[0, :, 0], None), x[0, :, 0]),
            (laid_out(lambda v: v[..., 0], None), x[..., 0]),
            (laid_out(lambda v: v[..., :1], None), x[..., :1]),
            (laid_out(lambda v: v.unsqueeze(-1), -3), x.unsqueeze(-1)),
            (laid_out(lambda v: v.movedim(1, 0), 0), x.movedim(1, 0)),
        ):
            torch.testing.assert_close(found[i], part)


@every_family
@pytest.mark.parametrize("shape", [(1, 100_000, 1), (100_000, 9)], ids=str)
def test_a_hundred_thousand_steps_stay_accurate(family, shape):
    almost_one = 1 - 2**-10  # a number that float32 holds
    arguments = family.draw(shape, torch.float32, end=1e-4) | dict.fromkeys(family.coefficients, almost_one)
    exact = arguments | {name: arguments[name].double() for name in family.differentiable}
    time_dim = shape.index(100_000)
    for found, expected in zip(family(arguments, time_dim), family(exact, time_dim), strict=True):
        scale = expected.abs().max()
        torch.testing.assert_close(found.double() / scale, expected / scale, rtol=0, atol=3e-6)


@every_family
def test_no_cut_over_many_tiles_equals_the_reference(family):
    for shape in ((1, 1100, 1), (9, 530, 1), (3, 300, 2, 1)):
        arguments = family.draw(shape, end=0.0) | dict.fromkeys(family.coefficients, 1.0)
        assert_matches_reference(family, arguments, 1)


@every_family
def test_large_batch_on_several_threads_equals_one_thread(family):
    for shape, time_dim in (((600, 500, 1), -2), ((500, 600, 1), 0)):
        arguments, threads = family.draw(shape, torch.float32), torch.get_num_threads()
        results = []
        for n in (1, 4):
            torch.set_num_threads(n)
            try:
                results.append(family(arguments, time_dim))
            finally:
                torch.set_num_threads(threads)
        torch.testing.assert_close(*results, rtol=0, atol=0)
        corner = {k: v.narrow(time_dim, 400, 100) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        for found, expected in zip(results[1], family.judge(corner, time_dim), strict=True):
            torch.testing.assert_close(found.narrow(time_dim, 400, 100).double(), expected, rtol=2e-5, atol=2e-5)


@every_family
def test_non_contiguous_inputs_equal_contiguous_ones(family):
    arguments = family.draw((5, 30, 4, 1))
    for view in (lambda x: x.transpose(1, 2), lambda x: x[:, ::2], lambda x: x[..., :1, :].expand(5, 30, 4, 1)):
        views = {k: view(v) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        dense = {k: v.contiguous() if isinstance(v, torch.Tensor) else v for k, v in views.items()}
        for x, y in zip(family(views), family(dense), strict=True):
            assert torch.equal(x, y) and x.is_contiguous()


@every_family
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_integer_flags_equal_boolean_ones(family, dtype):
    arguments = family.draw((4, 20, 1))
    integer = {k: v.to(dtype) * 2 if k in ("done", "terminated") else v for k, v in arguments.items()}
    for x, y in zip(family(integer), family(arguments), strict=True):
        assert torch.equal(x, y)


@every_family
def test_coefficients_broadcast_and_keep_their_precision(family):
    arguments = family.draw((4, 20, 1), torch.bfloat16)
    for name in family.coefficients:
        for shape in ((20, 1), (4, 1, 1), (1,), (4, 20, 1)):
            x = torch.rand(shape, dtype=torch.float64)
            small, full = (family(arguments | {name: v})[0] for v in (x, x.expand(4, 20, 1)))
            assert torch.equal(small, full)
        small, full = (family(arguments | {name: v})[0] for v in (0.99, torch.tensor(0.99)))
        assert torch.equal(small, full)
        small, full = (family(arguments | {name: v})[0] for v in (1, 1.0))
        assert torch.equal(small, full)


@every_family
def test_wrong_arguments_are_refused(family):
    arguments, name = family.draw((4, 9, 1)), family.function.__name__
    wrong = [
        ({"done": arguments["done"][:1]}, r"done is \[1, 9, 1\].*Nothing is broadcast"),
        ({"done": arguments["done"].float()}, r"done is torch.float32, expected bool or an integer.*done.bool\(\)"),
        ({"done": arguments["done"].tolist()}, r"done is a list, expected a torch.Tensor"),
        ({"done": arguments["done"].to("meta")}, r"done is on meta, but reward is on cpu"),
        ({"reward": arguments["reward"].long()}, r"reward is torch.int64, expected float32.*reward.float\(\)"),
        ({"gamma": torch.ones(5, 1)}, r"gamma is \[5, 1\] and does not broadcast to reward \[4, 9, 1\]"),
        ({"gamma": torch.ones(1, 4, 9, 1)}, r"gamma is \[1, 4, 9, 1\] and does not broadcast"),
        ({"gamma": torch.tensor(True)}, r"gamma is torch.bool, expected a float"),
    ]
    for change, message in wrong:
        with pytest.raises(SpecError, match=f"{name}: {message}"):
            family(arguments | change)
    for time_dim in (3, -4):
        with pytest.raises(SpecError, match=rf"{name}: time_dim={time_dim} is not a dimension of reward \[4, 9, 1\]"):
            family(arguments, time_dim)
    with pytest.raises(SpecError, match="at least one dimension"):
        family(family.draw(()))


@every_family
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(("shape", "time_dim"), [((9, 600, 1), -2), ((1, 900, 1), -2), ((600, 40, 1), 0)], ids=str)
def test_non_finite_values_stay_on_their_side_of_a_cut(family, shape, time_dim, bad):
    arguments = family.draw(shape)
    if "next_value" in arguments:
        hidden = {"next_value": arguments["next_value"].masked_fill(arguments["terminated"], bad)}
        for found, expected in zip(family(arguments | hidden, time_dim), family(arguments, time_dim), strict=True):
            assert torch.equal(found, expected)
    # Another trajectory's reward is lost: steps before its start keep their results.
    cut, lost = arguments["done"].clone(), arguments["reward"].clone()
    cut.select(time_dim, 299).fill_(True)
    lost.narrow(time_dim, 300, 1).fill_(bad)
    before, after = (
        family(arguments | {"done": cut}, time_dim),
        family(arguments | {"done": cut, "reward": lost}, time_dim),
    )
    for found, expected in zip(after, before, strict=True):
        assert torch.equal(found.narrow(time_dim, 0, 300), expected.narrow(time_dim, 0, 300))
        assert not found.narrow(time_dim, 300, 1).isfinite().any()


@only_x86
def test_every_instruction_set_equals_the_reference(monkeypatch, tmp_path):
    versions = {}
    for isa in ("base", "avx2"):
        (tmp_path / isa).mkdir()
        versions[isa] = copy_of_library(tmp_path / isa, monkeypatch)
    for family in FAMILIES.values():
        for shape, time_dim in (((13, 530, 1), 1), ((1, 600, 1), 1), ((20, 9), 0), ((5, 20, 3, 1), 1)):
            drawn = family.draw(shape, torch.float32)
            wanted = _values_and_gradients(family, family.judge, drawn, torch.float64, time_dim)
            for isa, dtype in itertools.product(versions, (torch.float32, torch.float64)):
                monkeypatch.setenv("GRAPHRL_ISA", isa)
                monkeypatch.setattr(_recurrence, "_native", versions[isa])
                found = _values_and_gradients(family, family, drawn, dtype, time_dim)
                for x, y in zip(found, wanted, strict=True):
                    scale = y.abs().max()
                    torch.testing.assert_close(x.double() / scale, y / scale, rtol=1e-4, atol=1e-5)


def _values_and_gradients(family, function, drawn, dtype, time_dim):
    floats = (x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in drawn.values())
    arguments = dict(zip(drawn, floats, strict=True))
    leaves = family.leaves(arguments)
    out = function(arguments, time_dim)
    return [*out, *torch.autograd.grad(out[0].square().sum(), leaves)]


def test_small_work_wakes_no_thread():
    assert extents(torch.Size((8, 128, 1)), -2) == (8, 128, 1, 1)
    assert extents(torch.Size((1000, 1000, 1)), -2)[3] == min(15, torch.get_num_threads())
