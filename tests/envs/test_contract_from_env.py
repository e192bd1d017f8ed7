"""What environments tell a contract, held against the simulator itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

from graphrl.compiler.bundle import Contract
from graphrl.envs import GymEnv, contract_from_env
from graphrl.graph import KeyedGraph
from graphrl.models import CategoricalActor, GaussianActor, ObservationHistory, RunningNorm, TanhGaussianActor

pytest.importorskip("mujoco", reason="needs mujoco")
ROBOT = Path(__file__).parents[2] / "examples" / "robot"
XML = """
<mujoco><option timestep="0.002"/><worldbody><body pos="0 0 1"><freejoint name="root"/><geom size="0.1"/>
<body><joint name="hip" axis="0 1 0"/><geom size="0.1"/><body><joint name="lift" type="slide"/><geom size="0.1"/>
</body></body></body></worldbody>
<actuator><position name="lift" joint="lift" kp="50" kv="3"/><position name="hip" joint="hip" kp="20" kv="0.5"/>
</actuator><keyframe><key qpos="0 0 1 1 0 0 0 0.4 0.1"/></keyframe></mujoco>
"""


class Servos(gymnasium.Env[np.ndarray, np.ndarray]):
    """A floating body with a hinge and a slide, moved by position motors in the other order."""

    def __init__(self) -> None:
        import mujoco

        self.model = mujoco.MjModel.from_xml_string(XML)
        self.dt = 0.02
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = gymnasium.spaces.Box(np.array([-1, -np.inf], "f"), np.array([1, np.inf], "f"))


class TwiceAsSlow(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper of one's own: nobody knows what it does."""


def told(env: Any, policy: Any = None, **options: Any) -> Contract:
    with GymEnv(env, **options) as made:
        size = made.observation_spec["observation"].shape[-1]
        return contract_from_env(made, policy or GaussianActor(size, made.action_spec.shape[-1]))


def free(raw: Any) -> Iterator[tuple[str, int, int]]:
    """Each coordinate of position and speed: array, its place, the place of its joint."""
    for joint in range(raw.model.njnt):
        sizes = {0: (7, 6), 2: (1, 1), 3: (1, 1)}[int(raw.model.jnt_type[joint])]
        for array, first, size in zip(
            ("qpos", "qvel"), (raw.model.jnt_qposadr, raw.model.jnt_dofadr), sizes, strict=True
        ):
            for k in range(size):
                yield array, int(first[joint]) + k, joint


@pytest.mark.parametrize("name", ["HalfCheetah-v5", "Hopper-v5", "Ant-v5"])
def test_names_are_those_of_what_moves_an_entry(name: str) -> None:
    """Each coordinate of the simulator is moved alone: the one entry that moves has the joint's name and its unit."""
    contract = told(name)
    (term,), raw = contract.observations or (), gymnasium.make(name, disable_env_checker=True).unwrapped
    assert term.names is not None and isinstance(term.unit, tuple)
    raw.reset(seed=0)
    before, moved = raw._get_obs().copy(), set()  # type: ignore[attr-defined]
    for array, place, joint in free(raw):
        values = getattr(raw.data, array)  # type: ignore[attr-defined]
        kept = values[place]
        values[place] += 0.01
        changed = np.flatnonzero(raw._get_obs() != before)  # type: ignore[attr-defined]
        values[place] = kept
        assert len(changed) <= 1
        for column in changed:
            moved.add(int(column))
            kind, unit = int(raw.model.jnt_type[joint]), term.unit[column]  # type: ignore[attr-defined]
            assert term.names[column].startswith(raw.model.joint(joint).name + "_")  # type: ignore[attr-defined]
            if kind:
                wanted = ("m", "rad")[kind == 3] if array == "qpos" else ("m/s", "rad/s")[kind == 3]
                assert unit == wanted and term.names[column].endswith("pos" if array == "qpos" else "vel")
    assert moved == {i for i, n in enumerate(term.names) if not n.startswith("cfrc")}
    for i, motor in enumerate(contract.action.names or ()):  # type: ignore[union-attr]
        assert raw.model.joint(int(raw.model.actuator_trnid[i][0])).name == motor  # type: ignore[attr-defined]
    assert contract.rate_hz == pytest.approx(1 / raw.dt) and contract.decimation == raw.frame_skip  # type: ignore[attr-defined]


def test_a_floating_body_has_quaternions_and_frames() -> None:
    (term,), contract = told("Ant-v5").observations or (), told("Ant-v5")
    assert contract.quaternion_order == "wxyz" and told("Hopper-v5").quaternion_order is None
    frames = dict(zip(term.names or (), term.frame or (), strict=True))
    assert (frames["root_vx"], frames["root_wx"], frames["hip_1_pos"]) == ("world", "body", None)


def test_speeds_that_are_clipped_have_bounds() -> None:
    (term,) = told("Hopper-v5").observations or ()
    assert term.low == (None,) * 5 + (-10.0,) * 6 and term.high == (None,) * 5 + (10.0,) * 6
    assert (told("HalfCheetah-v5").observations or ())[0].low is None


def test_what_is_not_known_is_null() -> None:
    contract = told("InvertedDoublePendulum-v5")  # sines and cosines of joints, which nobody names
    (term,), action = contract.observations or (), contract.action
    assert (term.names, term.unit, term.low, term.high) == (None,) * 4
    assert action is not None and (action.names, action.joint_names) == (("slide",), ("slider",))
    assert (action.kp, action.kd, action.unit) == (None,) * 3
    pendulum = told("Pendulum-v1")
    (term,), action = pendulum.observations or (), pendulum.action
    assert term.names is None and term.high == (1.0, 1.0, 8.0) and term.bounds_from == "stated"
    assert pendulum.rate_hz == pytest.approx(20) and pendulum.decimation is None
    assert action is not None and action.joint_names is None and action.clip == (-2.0, 2.0) and action.inside == ()


def test_a_choice_and_bounds_of_some_entries() -> None:
    contract = told("CartPole-v1", CategoricalActor(4, 2))
    (term,), action = contract.observations or (), contract.action
    assert term.low is not None and term.low[1] is None and term.low[0] == pytest.approx(-4.8)
    assert contract.rate_hz == pytest.approx(50)  # its step is called tau
    assert action is not None and (action.low, action.high) == ((0.0,), (1.0,)) and "2 choices" in str(contract.notes)


def test_an_environment_s_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROBOT))
    keys = ["joint_position", "joint_velocity", "target"]
    with GymEnv("arm:Arm-v0") as env:
        norm = RunningNorm(12)
        norm.mean.copy_(torch.arange(12))
        contract = contract_from_env(env, GaussianActor(12, 4, in_keys=list(keys), normalizer=norm))
    terms, action = contract.observations or (), contract.action
    assert [t.key for t in terms] == keys and {t.names for t in terms} == {("waist", "shoulder", "elbow", "wrist")}
    assert [t.normalizer and t.normalizer.mean for t in terms] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    assert all(t.normalizer and (t.normalizer.where, t.normalizer.clip) == ("inside", 10.0) for t in terms)
    assert action is not None and action.names == action.joint_names == ("wrist", "waist", "elbow", "shoulder")
    assert (contract.rate_hz, contract.decimation) == (pytest.approx(50), 10)


def test_position_motors_have_gains_and_a_pose() -> None:
    contract = told(Servos)
    action = contract.action
    assert action is not None and action.names == action.joint_names == ("lift", "hip")
    assert (action.kp, action.kd, action.unit) == ((50.0, 20.0), (3.0, 0.5), ("m", "rad"))
    assert action.default_pose == (0.1, 0.4)  # of the keyframe, in the motors' order
    assert (action.low, action.high, action.clip) == ((-1.0, None), (1.0, None), None)
    assert contract.quaternion_order == "wxyz" and contract.decimation == 10


def test_steps_that_the_policy_performs() -> None:
    actor = TanhGaussianActor(3, 1, low=torch.tensor([-2.0]), high=torch.tensor([2.0]))
    action = told("Pendulum-v1", actor).action
    assert action is not None and (action.squash, action.scale, action.offset) == ("tanh", (2.0,), None)
    assert action.inside == ("squash", "scale", "clip") and action.clip == pytest.approx((-2.0, 2.0))
    clipped = KeyedGraph((nn.Sequential(nn.Linear(3, 1), nn.Hardtanh(-2, 2)), ["observation"], ["action"]))
    action = told("Pendulum-v1", clipped).action
    assert action is not None and (action.squash, action.inside, action.clip) == ("none", ("clip",), (-2.0, 2.0))


def test_a_policy_with_a_state_is_looked_at_too() -> None:
    net = nn.Sequential(nn.Linear(12, 1), nn.Hardtanh(-2, 2))
    graph = KeyedGraph(ObservationHistory(3, 4), (net, ["history"], ["action"]))
    contract = told("Pendulum-v1", graph)
    assert [t.key for t in contract.observations or ()] == ["observation"]
    assert contract.action is not None and contract.action.inside == ("clip",)
    cell = KeyedGraph((nn.GRUCell(3, 8), ["observation", "h"], [("next", "h")]), (net[1], [("next", "h")], ["action"]))
    contract = told("Pendulum-v1", cell)  # nobody knows how large h is, nor where it starts
    assert contract.action is not None and contract.action.inside is None and "action.inside" in str(contract.notes)


def test_normalisers_inside_and_around() -> None:
    norm = RunningNorm(3)
    norm.update(torch.randn(100, 3) * 3 + 1)
    graph = KeyedGraph((norm, ["observation"], ["z"]), (nn.Linear(3, 1), ["z"], ["action"]), out_keys=["action"])
    (term,) = told("Pendulum-v1", graph).observations or ()
    assert term.normalizer is not None and term.normalizer.mean == pytest.approx(norm.mean.tolist())
    assert term.normalizer.std == pytest.approx((norm.var + norm.eps).sqrt().tolist())

    def wrapped() -> Any:
        env = gymnasium.wrappers.NormalizeObservation(gymnasium.make("HalfCheetah-v5"))
        env.reset(seed=0)
        return env

    (term,) = told(wrapped).observations or ()
    assert term.normalizer is not None and term.normalizer.where == "outside" and term.names is not None
    assert term.normalizer.mean is not None and len(term.normalizer.mean) == 17
    (term,) = told(wrapped, GaussianActor(17, 6, normalizer=RunningNorm(17))).observations or ()
    assert term.normalizer is None  # two of them: nobody knows which numbers count


def test_wrappers_leave_out_what_they_may_change() -> None:
    stacked = lambda: gymnasium.wrappers.FlattenObservation(  # noqa: E731
        gymnasium.wrappers.FrameStackObservation(gymnasium.make("Hopper-v5"), 4, padding_type="zero")
    )
    contract = told(stacked)
    (term,) = contract.observations or ()
    assert (term.history_length, term.history_order, term.history_reset_fill) == (4, "oldest_first", "constant 0")
    assert term.names is None and contract.rate_hz == pytest.approx(125)
    unknown = told(lambda: TwiceAsSlow(gymnasium.make("Hopper-v5")))
    assert unknown.rate_hz is None and (unknown.observations or ())[0].names is None
    assert "wrapped in TwiceAsSlow" in str(unknown.notes)
