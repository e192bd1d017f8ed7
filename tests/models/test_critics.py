import torch
from tensordict import TensorDict

from graphrl.models import RunningNorm, ValueCritic


def test_writes_one_value_a_state():
    critic = ValueCritic(3)
    td = critic(TensorDict(observation=torch.randn(2, 5, 3), batch_size=[2, 5]))
    assert critic.in_keys == ["observation"] and critic.out_keys == ["state_value"]
    assert td["state_value"].shape == (2, 5, 1)


def test_keys_can_be_nested():
    critic = ValueCritic(3, in_keys=[("agents", "observation")], value_key=("agents", "state_value"))
    td = TensorDict(agents=TensorDict(observation=torch.randn(5, 2, 3), batch_size=[5, 2]), batch_size=[5])
    assert critic(td)["agents", "state_value"].shape == (5, 2, 1)


def test_normalizer_comes_before_the_network():
    norm = RunningNorm(3)
    critic, plain = ValueCritic(3, normalizer=norm), ValueCritic(3)
    plain.load_state_dict(critic.state_dict(), strict=False)
    norm.update(torch.randn(50, 3) * 4 + 2)
    x = torch.randn(5, 3)
    assert torch.equal(critic(x), plain(norm(x)))


def test_trace_with_gradient_equals_eager(trace):
    critic, x = ValueCritic(3), torch.randn(5, 3)

    def run(observation):
        return torch.autograd.grad(critic(observation).square().mean(), list(critic.parameters()))

    torch.testing.assert_close(trace(run, x)(x), run(x))
