"""Tensors whose memory does not hold their numbers: the shortest way to the C functions must leave them alone."""

import pytest
import torch

from graphrl.errors import SpecError
from graphrl.kernels import (
    SumTree,
    discounted_sum,
    gae,
    n_step_return,
    sum_tree_search,
    sum_tree_update,
    td_lambda,
    vtrace,
)
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


def test_a_tree_may_be_written_from_its_own_memory():
    tree, order = SumTree(9), torch.tensor([8, 3, 1, 0, 7, 2, 6, 5, 4])
    tree.update(torch.arange(9), torch.arange(1.0, 10.0))
    expected = torch.empty(9, dtype=torch.float64).scatter(0, order, tree.leaves)
    tree.update(order, tree.leaves)
    assert tree.leaves.equal(expected) and tree.total == 45
    tree.leaves.zero_()
    tree.update(tree.leaves.view(torch.int64), 2.0)  # nine times the leaf 0, which is no 0 after the first write
    assert tree.leaves.tolist() == [2.0] + [0.0] * 8


def test_a_tree_on_two_devices_is_refused():
    tree = SumTree(9)
    with pytest.raises(SpecError, match="leaves are on cpu, inner on meta"):
        sum_tree_update(tree.leaves, tree.inner.to("meta"), torch.tensor([0]), torch.tensor([1.0]))
    with pytest.raises(SpecError, match="leaves are on cpu, inner on meta"):
        sum_tree_search(tree.leaves, tree.inner.to("meta"), torch.tensor([0.5]))


def test_a_sum_that_overflows_is_refused_by_the_search():
    tree = SumTree(9)
    tree.update(torch.arange(9), 1e308)
    with pytest.raises(SpecError, match="sum is not in this dtype"):
        tree.sample(2)


def test_autograd_notices_a_write_to_a_tree():
    tree, x = SumTree(3), torch.ones(3, dtype=torch.float64, requires_grad=True)
    y = (tree.leaves * x).sum()
    tree.update(0, 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("bad", [{"strata": -1}, {"prefix": torch.tensor([1j])}])
def test_a_search_that_means_nothing_is_refused(bad):
    tree = SumTree(3)
    tree.update(0, 1.0)
    with pytest.raises(SpecError, match="expected"):
        sum_tree_search(tree.leaves, tree.inner, **({"prefix": torch.tensor([0.5])} | bad))


def test_empty_lists_and_lists_of_priorities_are_read():
    tree = SumTree(3)
    tree.update([], [])
    tree.build([1.0, 2.0])
    assert tree.leaves.tolist() == [1, 2, 0]
    with pytest.raises(SpecError, match="index is torch.float32"):
        tree.update([0.5], 1.0)
