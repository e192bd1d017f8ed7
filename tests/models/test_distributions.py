import math

import pytest
import torch
from torch.distributions import AffineTransform, Independent, Normal, TanhTransform, TransformedDistribution

from graphrl.models import Categorical, IndependentNormal, TanhNormal


def normal_log_prob(x, loc, scale):
    """Sum of the Gaussian log-densities, written out, in float64."""
    x, loc, scale = x.double(), loc.double(), scale.double()
    return (-((x - loc) ** 2) / (2 * scale**2) - scale.log() - 0.5 * math.log(2 * math.pi)).sum(-1)


@pytest.fixture
def parameters():
    return torch.randn(6, 3), torch.rand(6, 3) + 0.1


def test_gaussian_log_prob_and_entropy_are_summed_over_the_action(parameters):
    dist = IndependentNormal(*parameters)
    action = dist.sample()
    torch.testing.assert_close(
        dist.log_prob(action).double(), normal_log_prob(action, *parameters), rtol=1e-5, atol=1e-5
    )
    entropy = (0.5 + 0.5 * math.log(2 * math.pi) + parameters[1].double().log()).sum(-1)
    torch.testing.assert_close(dist.entropy().double(), entropy, rtol=1e-5, atol=1e-5)
    assert torch.equal(dist.deterministic_sample, parameters[0]) and torch.equal(dist.mode, parameters[0])


@pytest.mark.parametrize("kind", [IndependentNormal, TanhNormal])
@pytest.mark.parametrize("scale", [-1.0, 0.0, float("nan")])
def test_a_scale_that_is_not_positive_is_an_error(kind, scale):
    with pytest.raises(ValueError, match="scale"):
        kind(torch.zeros(2, 1), torch.full((2, 1), scale))


@pytest.mark.parametrize("kind", [IndependentNormal, TanhNormal])
def test_draws_are_reparametrised_and_repeat_under_a_seed(kind, parameters):
    loc, scale = (p.requires_grad_() for p in parameters)
    torch.manual_seed(1)
    first = kind(loc, scale).rsample()
    torch.manual_seed(1)
    assert torch.equal(first, kind(loc, scale).sample()) and not kind(loc, scale).sample().requires_grad
    first.sum().backward()
    assert loc.grad.abs().sum() > 0 and scale.grad.abs().sum() > 0
    assert kind(loc, scale).rsample((4,)).shape == (4, 6, 3)
    assert kind(loc[:1], scale[:1]).expand((5,)).sample().shape == (5, 3)


def test_saturated_action_keeps_the_exact_log_prob_of_its_draw():
    dist = TanhNormal(torch.zeros(1), torch.ones(1))
    dist._last = (action := torch.tensor([1.0]), torch.tensor([10.0]))
    assert dist.log_prob(action).item() == pytest.approx(-32.3052, abs=1e-4)
    far = TanhNormal(torch.full((1,), 10.0), torch.ones(1))  # the same through the public road
    expected = -0.5 * math.log(2 * math.pi) - 2 * (math.log(2) - 10 - math.log1p(math.exp(-20)))
    assert far.log_prob(far.mode).item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("border", [-1.0, 1.0])
def test_action_on_the_border_has_finite_log_prob_and_gradients(border):
    loc, scale = torch.zeros(1, requires_grad=True), torch.ones(1, requires_grad=True)
    log_prob = TanhNormal(loc, scale).log_prob(torch.tensor([border]))
    log_prob.backward()
    assert log_prob.isfinite() and loc.grad.isfinite().all() and scale.grad.isfinite().all()


def test_action_outside_the_box_is_an_error_or_impossible():
    with pytest.raises(ValueError, match="support"):
        TanhNormal(torch.zeros(1), torch.ones(1)).log_prob(torch.tensor([1.5]))
    loc = torch.zeros(1, requires_grad=True)
    log_prob = TanhNormal(loc, torch.ones(1), validate_args=False).log_prob(torch.tensor([1.5]))
    log_prob.exp().backward()
    assert log_prob.item() == -math.inf and loc.grad.item() == 0


def test_acting_without_noise_gives_the_squashed_location():
    dist = TanhNormal(torch.tensor([0.2]), torch.tensor([0.7]))
    assert dist.mode.item() == pytest.approx(0.19738, abs=1e-5) == dist.deterministic_sample.item()
    dist = TanhNormal(torch.tensor([0.2]), torch.tensor([0.7]), low=1.0, high=5.0)
    assert dist.mode.item() == pytest.approx(3 + 2 * 0.19738, abs=1e-4)


@pytest.mark.parametrize(
    "box", [(-1.0, 1.0), (-2.0, 0.5), (torch.tensor([-1.0, 0.0, 2.0]), torch.tensor([1.0, 3.0, 4.0]))]
)
def test_squashed_log_prob_agrees_with_a_chain_of_transforms_in_float64(box, parameters):
    dist = TanhNormal(*parameters, *box)
    action = dist.sample()
    low, high = (torch.as_tensor(b, dtype=torch.float64) for b in box)
    chain = [TanhTransform(), AffineTransform((low + high) / 2, (high - low) / 2)]
    base = Normal(parameters[0].double(), parameters[1].double())
    reference = Independent(TransformedDistribution(base, chain), 1)
    inner = action.double().clamp(low + 1e-9, high - 1e-9)
    torch.testing.assert_close(dist.log_prob(action).double(), reference.log_prob(inner), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(dist.log_prob(action.clone()).double(), reference.log_prob(inner), rtol=1e-4, atol=1e-3)
    assert (action >= low).all() and (action <= high).all()


def test_squashed_density_integrates_to_one():
    dist = TanhNormal(torch.tensor([0.4], dtype=torch.float64), torch.tensor([0.8], dtype=torch.float64), -3.0, 2.0)
    grid = torch.linspace(-3, 2, 200_001, dtype=torch.float64)[1:-1]
    density = dist.log_prob(grid.unsqueeze(-1)).exp()
    assert torch.trapezoid(density, grid).item() == pytest.approx(1.0, abs=1e-4)


def test_an_empty_box_is_an_error():
    with pytest.raises(ValueError, match="must lie below"):
        TanhNormal(torch.zeros(1), torch.ones(1), low=1.0, high=1.0)


@pytest.mark.parametrize("kind", [IndependentNormal, TanhNormal])
def test_trace_of_draw_and_log_prob_equals_eager(kind, parameters, trace):
    def draw(loc, scale):
        dist = kind(loc, scale)
        action = dist.rsample()
        log_prob = dist.log_prob(action)
        return action, log_prob, *torch.autograd.grad(log_prob.sum() + action.sum(), (loc, scale))

    inputs = [p.requires_grad_() for p in parameters]
    program = trace(draw, *inputs)
    torch.manual_seed(3)
    eager = draw(*inputs)
    torch.manual_seed(3)
    torch.testing.assert_close(program(*inputs), eager)


def test_categorical_is_torchs_and_takes_an_empty_batch():
    logits = torch.randn(6, 4)
    ours, theirs = Categorical(logits=logits), torch.distributions.Categorical(logits=logits)
    action = ours.sample()
    assert torch.equal(ours.log_prob(action), theirs.log_prob(action)) and torch.equal(ours.entropy(), theirs.entropy())
    assert torch.equal(ours.deterministic_sample, logits.argmax(-1))
    assert Categorical(logits=torch.zeros(0, 4)).sample().shape == (0,)
    with pytest.raises(ValueError, match="logits"):
        Categorical(logits=torch.tensor([[0.0, float("nan")]]))
