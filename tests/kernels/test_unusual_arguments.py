"""Numbers that are no plain Python numbers, and coefficients far outside [0, 1]."""

import numpy as np
import pytest
import torch

from graphrl.errors import SpecError
from graphrl.kernels import discounted_sum, gae, lambda_return, mlp_forward, n_step_return, td0, vtrace

X, FLAG = torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool)


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), torch.tensor(0.5, dtype=torch.float64)])
def test_any_kind_of_number_is_a_coefficient(number):
    assert discounted_sum(X, FLAG, number).equal(discounted_sum(X, FLAG, 0.5))


@pytest.mark.parametrize("wrong", [None, "0.9", [0.9], 1j, np.array([0.9])], ids=repr)
def test_what_is_no_number_is_refused_as_a_coefficient(wrong):
    for call in (
        lambda: gae(X, X, X, FLAG, FLAG, wrong, 0.9),
        lambda: lambda_return(X, X, 0.9, wrong),
        lambda: td0(X, X, FLAG, wrong),
        lambda: n_step_return(X, FLAG, FLAG, wrong, 1),
        lambda: vtrace(X, X, X, FLAG, FLAG, X, 0.9, rho_clip=wrong),
    ):
        with pytest.raises(SpecError, match=type(wrong).__name__):
            call()


@pytest.mark.parametrize("wrong", [1.5, "x", X], ids=lambda x: type(x).__name__)
def test_a_time_dimension_is_an_integer(wrong):
    for call in (
        lambda: gae(X, X, X, FLAG, FLAG, 0.9, 0.9, time_dim=wrong),
        lambda: discounted_sum(X, FLAG, 0.9, time_dim=wrong),
    ):
        with pytest.raises(SpecError, match="time_dim is a"):
            call()
    with pytest.raises(SpecError, match="is not a dimension"):
        gae(X, X, X, FLAG, FLAG, 0.9, 0.9, time_dim=2**70)


def test_a_numpy_integer_is_a_horizon():
    for a, b in zip(*(n_step_return(X, FLAG, FLAG, 0.9, n) for n in (np.int64(2), 2)), strict=True):
        assert a.equal(b)


def test_autocast_leaves_the_dtype_of_a_perceptron_alone():
    layers = [torch.ones(4, 3)], [None], ["tanh"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = mlp_forward(X, *layers)
    assert y.dtype == torch.float32 and y.equal(mlp_forward(X, *layers))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("last", "gamma"), [(torch.nan, 0.01), (torch.inf, 0.01), (-torch.inf, 0.5), (0.0, 1e30)])
def test_one_long_row_carries_what_many_short_rows_carry(dtype, last, gamma):
    """Products of coefficients over a segment vanish or overflow where the steps themselves do not."""
    reward, flag = torch.zeros(1, 1500, dtype=dtype), torch.zeros(1, 1500, dtype=torch.bool)
    reward[0, -1], reward[0, 2] = last, 1.0
    one = discounted_sum(reward, flag, gamma)
    many = discounted_sum(reward.expand(8, -1), flag.expand(8, -1), gamma)[:1]
    torch.testing.assert_close(one, many, equal_nan=True, rtol=0, atol=0)
    assert one[0, 3:].isfinite().all() == (last == 0)
