import pytest
import torch

from graphrl.errors import GraphError, NonFiniteError, SpecError
from graphrl.models import GaussianActor, RunningNorm, ValueCritic


def known(count=2.0, mean=(2.0, 3.0, 4.0), var=(1.0, 1.0, 1.0)):
    norm = RunningNorm(3)
    norm.load_state_dict({"count": torch.tensor(count), "mean": torch.tensor(mean), "var": torch.tensor(var)})
    return norm


def test_scales_by_mean_and_standard_deviation():
    norm = RunningNorm(1)
    norm.load_state_dict({"count": torch.tensor(9.0), "mean": torch.tensor([100.0]), "var": torch.tensor([100.0])})
    assert norm(torch.tensor([[110.0]])).item() == pytest.approx(1.0, abs=1e-6)
    assert norm(torch.tensor([[1e6]])).item() == 10.0 and norm(torch.tensor([[-1e6]])).item() == -10.0


def test_batches_add_up_to_all_samples_at_once():
    x = torch.randn(1000, 3, dtype=torch.float64) * torch.tensor([1.0, 5.0, 0.1]) + torch.tensor([0.0, 1e4, -3.0])
    norm = RunningNorm(3)
    for part in x.split([1, 1, 498, 0, 500]):
        norm.update(part)
    assert norm.count.item() == 1000
    torch.testing.assert_close(norm.mean, x.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(norm.var, x.var(0, correction=0), rtol=1e-9, atol=1e-12)


def test_leading_dims_are_samples():
    norm, other, x = RunningNorm(3), RunningNorm(3), torch.randn(4, 5, 3)
    norm.update(x)
    other.update(x.flatten(0, 1))
    assert torch.equal(norm.mean, other.mean) and norm.count.item() == 20


def test_a_hundred_million_samples_still_count():
    norm = known(count=1e8)
    norm.load_state_dict({**norm.state_dict(), "count": torch.tensor(1e8, dtype=torch.float64)})
    norm.update(torch.full((1, 3), 1e8))
    assert norm.count.item() == 1e8 + 1
    torch.testing.assert_close(norm.mean, torch.tensor([2.0, 3.0, 4.0], dtype=torch.float64) + 1.0, rtol=1e-6, atol=0)


def test_one_sample_has_no_spread():
    norm = RunningNorm(2)
    norm.update(torch.tensor([[5.0, 7.0]]))
    assert norm.var.tolist() == [1.0, 1.0] and norm(torch.tensor([6.0, 7.0])).tolist() == pytest.approx([1.0, 0.0])
    norm.update(torch.tensor([[7.0, 7.0]]))
    assert norm.var.tolist() == [1.0, 0.0]


def test_statistics_stand_still_after_eval_whatever_is_called(trace):
    norm = known()
    actor, critic = GaussianActor(3, 2, normalizer=norm), ValueCritic(3, normalizer=norm)
    actor.eval(), critic.eval()
    rows = torch.full((8, 3), 100.0)
    norm(rows), actor(rows), actor[0](rows), critic(rows), trace(lambda x: actor(x)[0], rows)(rows)
    with pytest.raises(GraphError, match="eval mode"):
        norm.update(rows)
    assert norm.count.item() == 2 and norm.mean.tolist() == [2.0, 3.0, 4.0]


def test_calling_it_never_updates_in_training_either():
    norm = known().train()
    norm(torch.full((8, 3), 100.0))
    assert norm.count.item() == 2


def test_frozen_refuses_updates_until_unfrozen():
    norm = known().freeze()
    norm.train()
    with pytest.raises(GraphError, match="frozen"):
        norm.update(torch.zeros(1, 3))
    norm.unfreeze().update(torch.zeros(1, 3))
    assert norm.count.item() == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_sample_changes_nothing(bad):
    norm = known()
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    with pytest.raises(NonFiniteError, match="1 of 2 samples"):
        norm.update(torch.tensor([[1.0, 2.0, 3.0], [1.0, bad, bad]]))
    assert all(torch.equal(before[name], value) for name, value in norm.state_dict().items())


def test_other_shapes_are_refused():
    with pytest.raises(SpecError, match=r"\[\.\.\., 3\], but was given \[8, 4\]"):
        RunningNorm(3).update(torch.zeros(8, 4))
    with pytest.raises(ValueError, match=r"\[\.\.\., 3\], but was given \[8, 1\]"):
        RunningNorm(3)(torch.zeros(8, 1))


def test_casting_the_model_keeps_the_statistics_exact():
    norm = known(mean=(2.1, 3.1, 4.1))
    exact = norm.mean.clone()
    norm.to(torch.bfloat16)
    assert norm.mean.dtype == torch.float64 and torch.equal(norm.mean, exact)
    assert norm(torch.zeros(2, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert norm(torch.zeros(2, 3, dtype=torch.int64)).dtype == torch.float32


def test_trace_reads_the_statistics_of_the_moment(trace):
    norm, x = known(), torch.randn(5, 3)
    program = trace(norm, x)
    norm.update(torch.randn(50, 3))
    torch.testing.assert_close(program(x), norm(x))
