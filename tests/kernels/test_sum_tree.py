"""The sum tree against running sums over all leaves, and its rules."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrl.errors import SpecError
from graphrl.kernels import SumTree
from graphrl.kernels.sum_tree.reference import sum_tree_search_reference, sum_tree_update_reference

SIZES = [1, 2, 3, 7, 8, 9, 1000, 4097]
DTYPES = [torch.float64, torch.float32]


def built(priority, dtype=torch.float64):
    tree = SumTree(len(priority), dtype=dtype)
    tree.build(torch.as_tensor(priority, dtype=dtype))
    return tree


def dyadic(n, generator=None):
    """Priorities whose sums are exact in float32, a third of them zero."""
    return torch.randint(0, 12, (n,), generator=generator).sub(4).clamp(min=0) / 4.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_every_prefix_finds_the_leaf_that_holds_it(n, dtype):
    priority = dyadic(n)
    priority[n // 2] = 1.5
    tree = built(priority, dtype)
    total = priority.sum()
    assert tree.total == total and tree.min == priority[priority > 0].min() and tree.max == priority.max()
    edges = torch.cat([torch.zeros(1), priority.cumsum(0)])  # exactly between two leaves: the next one holds it
    prefix = torch.cat([edges, edges[:-1] + 0.125, torch.tensor([-1.0, -math.inf, total, total + 1, math.inf])])
    index, found = tree.search(prefix)
    assert index.dtype == torch.int64 and found.dtype == dtype and len(tree) == n
    assert torch.equal(index, sum_tree_search_reference(priority, prefix))
    assert torch.equal(found, tree[index]) and (found > 0).all()


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(SIZES), st.sampled_from(DTYPES), st.integers(0, 2**31), st.integers(1, 6))
def test_interleaved_updates_and_searches_equal_the_reference(n, dtype, seed, rounds):
    g = torch.Generator().manual_seed(seed)
    tree, leaves = SumTree(n, dtype=dtype), torch.zeros(n, dtype=torch.float64)
    for _ in range(rounds):
        count = int(torch.randint(0, 40, (), generator=g))
        index = torch.randint(n, (count,), generator=g)  # repetitions and, for small trees, many of them
        priority = dyadic(count, g)
        tree.update(index, priority)
        leaves = sum_tree_update_reference(leaves, index, priority)
        assert torch.equal(tree[:].double(), leaves)
        assert tree.total == leaves.sum() and tree.max == leaves.max()
        above_zero = leaves[leaves > 0]
        assert tree.min == (above_zero.min() if len(above_zero) else 0)
        if len(above_zero):
            prefix = torch.rand(30, generator=g) * leaves.sum()
            assert torch.equal(tree.search(prefix)[0], sum_tree_search_reference(leaves, prefix.to(dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_history_leaves_the_tree_that_is_built_afresh(dtype):
    tree = SumTree(4097, dtype=dtype)
    for scale in (1e-6, 1e6, 1.0) * 30:  # differences would leave the rounding of 1e6 behind
        tree.update(torch.randint(4097, (300,)), torch.rand(300, dtype=dtype) * scale)
    tree.update(torch.arange(4097), torch.rand(4097, dtype=dtype))
    fresh = built(tree[:], dtype)
    assert torch.equal(tree.inner, fresh.inner) and torch.equal(tree.leaves, fresh.leaves)
    exact = math.fsum(tree[:].tolist())
    assert abs(tree.total.item() - exact) <= 16 * torch.finfo(dtype).eps * exact


def test_the_last_of_several_writes_stays():
    tree = built([1.0, 2.0, 3.0])
    tree.update([1, 0, 1, 1], [5.0, 6.0, 7.0, 8.0])
    assert tree[:].tolist() == [6, 8, 3] and tree.total == 17


def test_maximum_and_minimum_are_of_the_present_leaves():
    tree = SumTree(20)
    assert tree.max == 0 and tree.min == 0 and tree.total == 0
    tree.update([3], 16.0)
    assert tree.max == 16 and tree.min == 16
    tree.update([3, 4], 1.0)
    assert tree.max == 1 and tree.min == 1
    tree.update(4, 0.0)  # a leaf of zero is as one never written: no weight is taken against it
    assert tree.max == 1 and tree.min == 1 and tree.total == 1


def test_a_new_item_takes_the_present_maximum_as_it_is():
    """The leaf is the priority to the power alpha already: alpha .5 makes 4 of 16, and the new item's is not 2."""
    tree = built([16.0**0.5, 0.0, 0.0])
    tree.update(1, tree.max)
    assert tree[1] == 4
    tree.update([0, 1], 1.0)
    tree.update(2, tree.max)
    assert tree[2] == 1


@pytest.mark.parametrize(("priority", "weights"), [([1.0, 1.0, 4.0], [1, 1, 0.25]), ([2.0, 2.0, 2.0], [1, 1, 1])])
def test_importance_weights_are_those_of_the_paper(priority, weights):
    """w = (N P)^-beta over its maximum, here with beta 1; N and the sum cancel."""
    tree = built(priority)
    found = tree[torch.arange(3)]
    unscaled = (len(tree) * found / tree.total) ** -1.0
    assert (tree.min / found).tolist() == weights
    torch.testing.assert_close(tree.min / found, unscaled / unscaled.max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_never_finds_a_leaf_of_zero(dtype):
    priority = torch.rand(4097, dtype=dtype) * 10.0 ** torch.randint(-6, 7, (4097,))
    priority[torch.rand(4097) < 0.5] = 0
    tree = built(priority, dtype)
    edge = priority.double().cumsum(0).to(dtype)
    up, down = (torch.nextafter(edge, torch.tensor(x, dtype=dtype)) for x in (math.inf, 0.0))
    prefix = torch.cat([edge, up, down, tree.total.expand(1)])
    index, found = tree.search(prefix)
    assert (found > 0).all() and torch.equal(found, priority[index])
    sums, room = priority.double().cumsum(0), 64 * torch.finfo(dtype).eps * tree.total.double()
    inside = prefix.double()
    assert (sums[index] >= inside - room).all() and ((sums - priority.double())[index] <= inside + room).all()


def test_sampling_is_in_proportion_to_priority():
    n, draws, buckets = 1_000_000, 400_000, 200
    g = torch.Generator().manual_seed(5)
    priority = torch.rand(n, dtype=torch.float64, generator=g) ** 4
    priority[torch.rand(n, generator=g) < 0.2] = 0
    tree = built(priority)
    assert abs(tree.total.item() - math.fsum(priority.tolist())) <= 1e-15 * 20 * tree.total.item()
    for bucket in (torch.arange(n) % buckets, torch.arange(n) * buckets // n):
        index, found = tree.sample(draws, generator=g)
        assert torch.equal(found, priority[index]) and (found > 0).all()
        expected = torch.zeros(buckets).double().index_add_(0, bucket, priority) / tree.total * draws
        counts = torch.bincount(bucket[index], minlength=buckets)
        chi_square = ((counts - expected) ** 2 / expected).sum().item()
        assert abs(chi_square - (buckets - 1)) < 4 * math.sqrt(2 * (buckets - 1))  # its mean and deviation


def test_stratified_sampling_draws_one_of_each_part():
    tree = built(torch.ones(64))
    index, _ = tree.sample(64, stratified=True)
    assert index.tolist() == list(range(64))
    index, _ = tree.sample(16, generator=torch.Generator().manual_seed(0), stratified=True)
    assert (index // 4).tolist() == list(range(16))
    again, _ = tree.sample(16, generator=torch.Generator().manual_seed(0), stratified=True)
    assert torch.equal(index, again)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, -1e-300])
def test_a_priority_that_is_none_is_refused_before_anything_is_written(bad):
    tree = built(torch.ones(20))
    before = copy.deepcopy(tree.state_dict())
    with pytest.raises(SpecError, match=rf"priority of index 7, at position 2, is {bad}.*Nothing was written"):
        tree.update([3, 5, 7, 9], [2.0, 2.0, bad, bad])
    assert all(torch.equal(x, before[name]) for name, x in tree.state_dict().items())


@pytest.mark.parametrize("bad", [-1, 20, 2**40])
def test_an_index_outside_is_refused_before_anything_is_written(bad):
    tree = built(torch.ones(20))
    with pytest.raises(SpecError, match=rf"index {bad}, at position 1, is outside the tree, expected 0 to 19"):
        tree.update([3, bad], 2.0)
    assert tree[:].tolist() == [1] * 20


def test_an_empty_tree_says_what_to_do():
    tree = SumTree(5)
    for use in (lambda: tree.sample(3), lambda: tree.search(0.0)):
        with pytest.raises(SpecError, match="every priority is 0.*tree.update"):
            use()
    tree.update(2, 1.0)
    assert tree.sample(3)[0].tolist() == [2, 2, 2]
    tree.update(2, 0.0)
    with pytest.raises(SpecError, match="every priority is 0"):
        tree.sample(1)
    assert tree.sample(0)[0].shape == (0,)  # nothing asked, nothing missing


def test_a_prefix_that_is_nan_is_refused():
    with pytest.raises(SpecError, match="position 1 is NaN"):
        built([1.0, 2.0]).search([0.5, math.nan])


@pytest.mark.parametrize(
    ("index", "priority", "message"),
    [
        ([0.5], [1.0], "index is torch.float32, expected integers"),
        ([True, False], 1.0, r"nonzero\(\)"),
        ([1, 2], [[1.0], [1.0]], r"priority.squeeze\(-1\)"),
        ([1, 2], [1.0], "one for each index"),
        ([1], torch.tensor([1j]), "expected real numbers"),
    ],
)
def test_what_does_not_fit_is_refused(index, priority, message):
    with pytest.raises(SpecError, match=message):
        SumTree(3).update(index, priority)


def test_trees_that_cannot_be_are_refused():
    with pytest.raises(SpecError, match="capacity is 0"):
        SumTree(0)
    with pytest.raises(SpecError, match="expected float64 or float32"):
        SumTree(3, dtype=torch.bfloat16)
    with pytest.raises(SpecError, match="expected float64 or float32"):
        built([1.0]).half().sample(1)
    with pytest.raises(SpecError, match="n <= 3"):
        SumTree(3).build(torch.ones(4))
    tree = built(torch.ones(30))
    tree.inner = tree.inner[:, :-1]
    with pytest.raises(SpecError, match="are not one tree"):
        tree.sample(1)


def test_a_damaged_tree_leads_to_no_memory_but_its_own():
    tree = built(torch.ones(1001))
    tree.inner.fill_(1e9)  # as if every node, padding included, held a lot
    index, _ = tree.sample(500)
    assert ((index >= 0) & (index < 1001)).all()


def test_all_shapes_and_numbers_go_in():
    tree = SumTree(6, dtype=torch.float32)
    tree.update(torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), torch.tensor([[1, 2], [3, 4]]))
    tree.update(4, torch.tensor(5.0, dtype=torch.bfloat16))
    tree.update(torch.arange(10)[::2][:1], torch.rand(4, 4, requires_grad=True)[:1, 0] * 0 - 0.0)  # strided; -0.0
    assert tree[:].tolist() == [0, 2, 3, 4, 5, 0] and not tree[0].signbit() and not tree[:].requires_grad
    index, priority = tree.search(torch.tensor([[0.0, 2.0, 13.5]]).expand(2, 3))
    assert index.tolist() == [[1, 2, 4]] * 2 and priority.tolist() == [[2, 3, 5]] * 2
    assert tree[1].item() == 2 and tree[torch.tensor([1, 3])].tolist() == [2, 4]
    tree.total.fill_(100.0), tree[:].fill_(100.0)  # copies
    assert tree.total == 14


def test_building_a_part_clears_the_rest():
    tree = built(torch.ones(10))
    tree.build(torch.full((3,), 2.0))
    assert tree[:].tolist() == [2] * 3 + [0] * 7 and tree.total == 6


def test_state_goes_through_a_state_dict():
    tree = built(torch.rand(1000))
    other = SumTree(1000)
    other.load_state_dict(tree.state_dict())
    g = [torch.Generator().manual_seed(1) for _ in range(2)]
    assert torch.equal(tree.sample(100, generator=g[0])[0], other.sample(100, generator=g[1])[0])
    other.update(5, 3.0)
    assert tree[5] != 3
    with pytest.raises(RuntimeError, match="size mismatch for leaves"):
        SumTree(1001).load_state_dict(tree.state_dict())
    wide = copy.deepcopy(tree).float()  # other sums than its own would give are close enough to be searched
    assert (wide.sample(1000)[1] > 0).all()
