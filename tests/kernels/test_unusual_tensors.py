"""Tensors whose memory does not hold their numbers: the shortest way to the C functions must leave them alone."""

import pytest
import torch

from graphrl.kernels import SumTree, discounted_sum, gae, n_step_return, sum_tree_search, td_lambda, vtrace
from graphrl.kernels._lib import lib

SHAPE = 3, 5
FLAG = torch.zeros(SHAPE, dtype=torch.bool)
CALLS = {
    "gae": lambda x, flag: gae(x, x, x, flag, flag, 0.9, 0.8),
    "td_lambda": lambda x, flag: td_lambda(x, x, flag, flag, 0.9, 0.8),
    "discounted_sum": lambda x, flag: discounted_sum(x, flag, 0.9),
    "n_step_return": lambda x, flag: n_step_return(x, flag, flag, 0.9, 2),
    "vtrace": lambda x, flag: vtrace(x, x, x, flag, flag, x, 0.9),
}


def draw():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


UNUSUAL = {
    "to be negated": lambda: torch._neg_view(draw()),
    "the imaginary part of a conjugate": lambda: torch.complex(draw(), draw())[:1, :1].conj().imag,
    "zeros without memory": lambda: torch._efficientzerotensor(SHAPE),
    "functional": lambda: torch._to_functional_tensor(draw()),
}


@pytest.mark.parametrize("unusual", UNUSUAL)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_tensor_that_is_not_its_memory_counts_as_what_it_is(call, unusual):
    x = UNUSUAL[unusual]()
    assert not lib.ordinary(x) and lib.trajectories(x, 1, None) is None
    plain = torch._from_functional_tensor(x) if unusual == "functional" else x.clone()
    assert lib.ordinary(plain)
    flag = FLAG[: x.shape[0], : x.shape[1]]
    found, expected = (y if isinstance(y, tuple) else (y,) for y in (call(x, flag), call(plain, flag)))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(torch._from_functional_tensor(a) if unusual == "functional" else a, b)


def test_a_sum_tree_reads_them_too():
    tree = SumTree(4, dtype=torch.float32)
    tree.update(torch.arange(4), torch._neg_view(torch.tensor([-1.0, -2.0, -3.0, -4.0])))
    assert tree.leaves.tolist() == [1, 2, 3, 4]
    assert tree.search(torch._neg_view(torch.tensor([-2.5])))[0].tolist() == [1]
    tree.update(torch.arange(4), torch._efficientzerotensor((4,)))
    assert tree.total == 0
    tree.update(torch._efficientzerotensor((4,), dtype=torch.int64), 1.0)
    assert sum_tree_search(tree.leaves, tree.inner, torch._efficientzerotensor((2,)))[0].tolist() == [0, 0]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_memory_that_was_given_back_is_an_error_and_no_crash(call):
    for give_back in (0, 1):
        args = [draw(), FLAG.clone()]
        args[give_back].untyped_storage().resize_(0)
        with pytest.raises(ValueError, match="no memory"):
            call(*args)


def test_an_empty_tensor_needs_no_memory():
    tree = SumTree(3)
    tree.update(torch.empty(0, dtype=torch.int64), torch.empty(0))
    assert tree.search(torch.empty(0))[0].shape == (0,) and lib.ordinary(torch.empty(0), 1, None)
