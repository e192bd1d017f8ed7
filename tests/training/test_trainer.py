import importlib.util

import gymnasium
import numpy as np
import pytest
import torch

from graphrl.errors import CheckpointError, EnvError, GraphRLError, NonFiniteError, SpecError
from graphrl.training import EnvConfig, Trainer, load_config, load_policy
from graphrl.training.loggers import CSVLogger, read_csv


class Faulty(gymnasium.Env):
    """Gives a NaN reward at its 100th step."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    steps = 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(3, np.float32), float("nan") if self.steps == 100 else 1.0, False, self.steps % 20 == 0, {}


gymnasium.register("GraphrlFaulty-v0", entry_point=Faulty)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def snapshot(trainer):
    return {key: value.clone() for key, value in trainer.algorithm.state_dict().items()}


def test_two_batches_train_log_and_save(tiny):
    trainer = Trainer(tiny(eval_episodes=2), quiet=True)
    before = snapshot(trainer)
    result = trainer.train()
    assert result.frames == 128 and trainer.batches == 2
    assert len(result.evaluation.returns) == 2 and trainer.env.is_closed
    after = snapshot(trainer)
    assert not any(torch.equal(value, after[key]) for key, value in before.items() if key.endswith("weight"))
    assert float(trainer.algorithm.normalizer.count) == 128
    rows = read_csv(result.folder / "progress.csv")
    assert [row["frames"] for row in rows] == [64, 128]
    assert all(np.isfinite(row["loss_critic"]) for row in rows)
    assert load_config(result.folder) == trainer.config


def test_a_discrete_environment(tiny):
    result = Trainer(tiny(env=EnvConfig("CartPole-v1", num_envs=2), entropy_coeff=0.01), quiet=True).train()
    assert result.mean_return > 0
    policy, _ = load_policy(result.folder)
    assert not policy.training


def test_statistics_stand_still_within_a_batch(tiny):
    trainer = Trainer(tiny(), quiet=True)
    seen = []
    trainer.register("after_collection", lambda t, batch: seen.append(batch))
    with torch.no_grad():
        trainer.register(
            "after_collection",
            lambda t, batch: seen.append(t.algorithm.actor.get_dist(batch).log_prob(batch["action"])),
        )
        trainer.train()
    for batch, log_prob in zip(seen[::2], seen[1::2], strict=True):
        torch.testing.assert_close(batch["action_log_prob"], log_prob, rtol=1e-5, atol=1e-5)


def test_hooks_run_in_order_and_can_stop(tiny):
    trainer, calls = Trainer(tiny(), quiet=True), []
    for point in ("after_logging", "after_optimization", "after_collection", "before_collection"):
        trainer.register(point, lambda t, *args, point=point: calls.append(point))
    trainer.register("after_logging", lambda t, row: t.stop())
    assert trainer.train().frames == 64
    assert calls == ["before_collection", "after_collection", "after_optimization", "after_logging"]


def test_an_unknown_hook_point(tiny):
    trainer = Trainer(tiny(), quiet=True)
    with pytest.raises(GraphRLError, match="Did you mean 'after_collection'"):
        trainer.register("after_collect", print)
    trainer.close()


def test_the_learning_rate_falls_to_zero(tiny):
    trainer, rates = Trainer(tiny(total_frames=256), quiet=True), []
    trainer.register("after_logging", lambda t, row: rates.append(row["lr"]))
    trainer.train()
    assert rates == pytest.approx([3e-4, 2.25e-4, 1.5e-4, 0.75e-4])


def test_resume_is_bit_equal_and_goes_on(tiny):
    kept = []
    first = Trainer(tiny(update_backend="inductor", anneal_lr=False), quiet=True)
    first.register("after_collection", lambda t, batch: kept.append(batch))
    first.train()
    second = Trainer(tiny(update_backend="inductor", anneal_lr=False, total_frames=192), resume=True, quiet=True)
    assert same(snapshot(first), snapshot(second))
    assert (second.frames, second.batches) == (128, 2)
    assert list(second.collector.episode_returns) == list(first.collector.episode_returns)
    assert second.algorithm.optimizer.param_groups[0]["lr"] == first.algorithm.optimizer.param_groups[0]["lr"]
    rng = torch.get_rng_state()
    first.algorithm.learn(kept[0])
    torch.set_rng_state(rng)
    second.algorithm.warm_up(kept[0])
    torch.set_rng_state(rng)
    second.algorithm.learn(kept[0])
    assert same(snapshot(first), snapshot(second))
    result = second.train()
    assert result.frames == 192
    assert [row["frames"] for row in read_csv(result.folder / "progress.csv")] == [64, 128, 192]


def test_a_finished_run_is_not_overwritten_by_accident(tiny):
    Trainer(tiny(), quiet=True).train()
    with pytest.raises(CheckpointError, match="--overwrite"):
        Trainer(tiny(), quiet=True)
    Trainer(tiny(overwrite=True), quiet=True).train()


def test_resume_with_other_networks(tiny):
    Trainer(tiny(), quiet=True).train()
    with pytest.raises(CheckpointError, match=r"num_cells=\(8,\), but num_cells=\(16,\)"):
        Trainer(tiny(num_cells=(16,)), resume=True, quiet=True)


def test_nan_from_the_environment_names_it_and_keeps_the_last_weights(tiny):
    config = tiny(env=EnvConfig("GraphrlFaulty-v0"), total_frames=640, checkpoint_every=1)
    trainer = Trainer(config, quiet=True)
    with pytest.raises(NonFiniteError, match="1 NaN or infinite values in .*reward"):
        trainer.train()
    assert trainer.env.is_closed and trainer.batches == 1
    resumed = Trainer(config, resume=True, quiet=True)
    assert same(snapshot(trainer), snapshot(resumed))
    resumed.close()


def test_an_unknown_environment(tiny):
    with pytest.raises(EnvError, match="Did you mean 'Pendulum-v1'"):
        Trainer(tiny(env=EnvConfig("Pendulun-v1")))


def test_images_are_refused(tiny):
    class Pixels(Faulty):
        observation_space = gymnasium.spaces.Box(0, 255, (8, 8, 3), np.uint8)

    gymnasium.register("GraphrlPixels-v0", entry_point=Pixels)
    with pytest.raises(SpecError, match="flat float vectors"):
        Trainer(tiny(env=EnvConfig("GraphrlPixels-v0")))
    del gymnasium.registry["GraphrlPixels-v0"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"minibatch": 48}, "48 or 96|not a multiple of minibatch=48"),
        ({"env": EnvConfig("Pendulum-v1", num_envs=3)}, "env.num_envs=3"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"epochs": 0}, "epochs=0"),
    ],
)
def test_values_that_cannot_make_a_run(tiny, changes, message):
    with pytest.raises(SpecError, match=message):
        Trainer(tiny(**changes))


def test_a_resumed_log_drops_what_came_after_the_checkpoint(tmp_path):
    log = CSVLogger(tmp_path / "progress.csv")
    for frames in (64, 128, 192):
        log.log({"frames": frames, "mean_return": float("nan")})
    log.close()
    log = CSVLogger(tmp_path / "progress.csv", resume_at=128)
    log.log({"frames": 256, "mean_return": 1.0})
    log.close()
    assert [row["frames"] for row in read_csv(tmp_path / "progress.csv")] == [64, 128, 256]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_pictures_and_events_are_on_where_their_packages_are(tiny):
    result = Trainer(tiny(tensorboard=None, curve=None), quiet=True).train()
    for package, path in (("tensorboard", "tensorboard"), ("matplotlib", "curve.png")):
        assert (result.folder / path).exists() == (importlib.util.find_spec(package) is not None)
    off = Trainer(tiny(overwrite=True, out=str(result.folder.parent / "off")), quiet=True).train()
    assert off.curve is None and not (off.folder / "tensorboard").exists()
