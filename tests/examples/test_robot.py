"""examples/robot: a body in its own process, driven in C and in Python from a bundle alone."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from loopback import why_no_loopback
from robot_scripts import ROBOT, robot_scripts
from tensordict import TensorDict
from torch import nn

import graphrl as grl
from graphrl.compiler.bundle import Contract
from graphrl.models import MLP, GRUModule, ObservationHistory, PreviousAction

CC = shutil.which("cc") or shutil.which("gcc")
STRICT = "-std=c99 -O1 -Wall -Wextra -Werror -pedantic -Wconversion -Wdouble-promotion".split()
OTHER = "0123456789abcdef" * 4
DRIVERS = [pytest.param("c", marks=pytest.mark.skipif(CC is None, reason="needs a C compiler")), "python"]


@pytest.fixture(scope="module", autouse=True)
def loopback() -> None:
    if (reason := why_no_loopback()) is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def parts() -> Iterator[SimpleNamespace]:
    """The example's modules, imported as its scripts import each other."""
    with robot_scripts("protocol", "model", "link", "robot", "arm_policy") as scripts:
        yield scripts


@dataclass
class Made:
    """A bundle, the policy it was made of, and its drivers' command lines up to the address."""

    path: Path
    contract_hash: str
    policy: grl.KeyedGraph
    binary: Path

    def start(self, driver: str, port: int) -> subprocess.Popen[str]:
        command = [str(self.binary), "127.0.0.1", str(port)]
        if driver == "python":
            command = [sys.executable, "-B", str(ROBOT / "drive.py"), str(self.path), f"127.0.0.1:{port}"]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # no graphrl there
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=self.path.parent
        )


def make(bundle: Any, policy: grl.KeyedGraph, source: str) -> Made:
    binary = bundle.path.with_name(f"drive_{bundle.path.name}")
    if CC is not None:
        sources = [str(ROBOT / "drive.c"), str(ROBOT / source), str(bundle.path / "c" / "policy.c")]
        subprocess.run([CC, *STRICT, "-I", str(bundle.path / "c"), *sources, "-lm", "-o", str(binary)], check=True)
    return Made(bundle.path, bundle.manifest["contract_hash"], policy, binary)


@pytest.fixture(scope="module")
def pendulum(tmp_path_factory: pytest.TempPathFactory) -> Made:
    torch.manual_seed(3)
    net = nn.Sequential(MLP(3, 1, num_cells=[16, 16]), nn.Tanh())
    policy = grl.KeyedGraph((lambda x: 3 * net(x), ["observation"], ["action"]))  # beyond the bounds of 2 at times
    example = TensorDict(observation=torch.randn(4, 3), batch_size=[4])
    path = tmp_path_factory.mktemp("pendulum") / "bundle"
    bundle = grl.export(policy, path, example, targets=("c99", "numpy"), contract=Contract(rate_hz=20.0))
    return make(bundle, policy, "plain.c")


@pytest.fixture(scope="module")
def remembering(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A policy with a memory, a window that starts at its first observation, and its previous action."""
    torch.manual_seed(4)
    net, previous = MLP(3 * 3 + 8 + 1, 1, num_cells=[16]), PreviousAction(1, initial=0.5, clip=(-2.0, 2.0))
    head = (lambda *x: 3 * net(torch.cat(x, -1)), ["history", "features", "previous_action"], ["action"])
    policy = grl.KeyedGraph(GRUModule(3, 8), ObservationHistory(3, 3), previous, head, previous.feedback())
    path = tmp_path_factory.mktemp("remembering") / "bundle"
    bundle = grl.export(policy, path, {"observation": torch.randn(4, 3)}, targets=("c99", "numpy"),
                        contract=Contract(rate_hz=20.0))  # fmt: skip
    return make(bundle, policy, "plain.c")


@pytest.fixture(scope="module")
def arm(parts: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Made:
    pytest.importorskip("mujoco")
    bundle = parts.arm_policy.write_bundle(tmp_path_factory.mktemp("arm") / "bundle")
    return make(bundle, parts.arm_policy.arm_policy(), "arm.c")


@pytest.fixture(scope="module")
def sums(parts: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """action = position + 10 velocity + 100 target, of each joint for itself: an entry in a wrong place shows."""
    keys = ["joint_position", "joint_velocity", "target"]
    policy = grl.KeyedGraph((lambda p, v, t: p + 10 * v + 100 * t, keys, ["action"]))
    example = TensorDict({key: torch.randn(4, 4) for key in keys}, batch_size=[4])
    contract = parts.arm_policy.arm_contract()
    contract = Contract(rate_hz=50.0, observations=contract.observations,
                        action=type(contract.action)(names=contract.action.names))  # fmt: skip
    path = tmp_path_factory.mktemp("sums") / "bundle"
    return make(grl.export(policy, path, example, targets=("c99", "numpy"), contract=contract), policy, "arm.c")


def link_to(parts: SimpleNamespace, made: Made, model: Any, contract: str | None = None) -> Any:
    return parts.link.Link(0, contract or made.contract_hash, model.rate_hz, model.sensors, model.actuators)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def lock_step(parts: SimpleNamespace, made: Made, driver: str, env_id: str, steps: int) -> tuple[float, str]:
    """The return of the first episode, and what the driver said."""
    model = parts.model.Model(env_id, seed=5)
    link = link_to(parts, made, model)
    process = made.start(driver, link.port)
    report = parts.robot.run(model, link, steps, True, model.rate_hz)
    code, out, err = finish(process)
    assert code == 0, err
    assert report.steps == steps and len(link.answered) == steps and link.late == link.refused == 0
    return model.finished[0], out


@pytest.mark.parametrize("driver", DRIVERS)
def test_the_pendulum_gets_the_return_of_the_eager_policy(parts: Any, pendulum: Made, driver: str) -> None:
    found, told = lock_step(parts, pendulum, driver, "Pendulum-v1", 200)
    env = gymnasium.make("Pendulum-v1", disable_env_checker=True)
    observation, _ = env.reset(seed=5)
    wanted = 0.0
    for _ in range(200):
        with torch.no_grad():
            action = pendulum.policy(TensorDict(observation=torch.from_numpy(observation)[None], batch_size=[1]))
        observation, reward, *_ = env.step(np.clip(action["action"][0].numpy(), -2, 2))
        wanted += float(reward)
    assert found == pytest.approx(wanted, rel=1e-4)
    assert told.startswith("driver: 200 steps, status 0,")


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_policy_with_state_is_driven_by_its_sensors_alone(parts: Any, remembering: Made, driver: str) -> None:
    """The returns of two episodes, whose start the robot tells, are those that a collector gets."""
    model = parts.model.Model("Pendulum-v1", seed=5)
    link = link_to(parts, remembering, model)
    process = remembering.start(driver, link.port)
    parts.robot.run(model, link, 400, True, model.rate_hz)
    code, _, err = finish(process)
    assert code == 0, err
    env = gymnasium.make("Pendulum-v1", disable_env_checker=True)
    nodes = [m for m in remembering.policy.modules() if hasattr(m, "state_key")]
    for episode, found in enumerate(model.finished):
        observation, _ = env.reset(seed=5 + episode)
        state = {m.state_key: m.initial_state(1) for m in nodes}
        wanted = 0.0
        for t in range(200):
            given = {"observation": torch.from_numpy(observation)[None], "is_init": torch.tensor([[t == 0]])}
            with torch.no_grad():
                td = remembering.policy(TensorDict({**given, **state}, batch_size=[1]))
            state = {key: td["next", key] for key in state}
            observation, reward, *_ = env.step(np.clip(td["action"][0].numpy(), -2, 2))
            wanted += float(reward)
        assert found == pytest.approx(wanted, rel=1e-3)
    assert len(model.finished) == 2


@pytest.mark.parametrize("driver", DRIVERS)
def test_the_arm_gets_the_return_of_the_eager_policy_although_its_joints_stand_in_another_order(
    parts: Any, arm: Made, driver: str
) -> None:
    found, _ = lock_step(parts, arm, driver, "arm:Arm-v0", 100)
    env = gymnasium.make("arm:Arm-v0", disable_env_checker=True)
    joints, motors = env.unwrapped.entry_names["target"], env.unwrapped.entry_names["action"]
    policys = list(parts.arm_policy.JOINTS)
    assert joints != motors and joints != policys and motors != policys
    into = {key: [joints.index(name) for name in policys] for key in ("joint_position", "joint_velocity", "target")}

    def run(out: list[int]) -> float:
        observation, _ = env.reset(seed=5)
        total = 0.0
        for _ in range(100):
            td = TensorDict({k: torch.from_numpy(observation[k][i])[None] for k, i in into.items()}, batch_size=[1])
            observation, reward, *_ = env.step(arm.policy(td)["action"][0].numpy()[out])
            total += float(reward)
        return total

    assert found == pytest.approx(run([policys.index(name) for name in motors]), rel=1e-5)
    assert run([0, 1, 2, 3]) < 3 * found  # by place: far worse


@pytest.mark.parametrize("driver", DRIVERS)
def test_entries_go_by_name_and_a_repeated_observation_is_no_second_step(parts: Any, sums: Made, driver: str) -> None:
    joints, motors = ["wrist", "elbow", "waist", "shoulder"], ["shoulder", "waist", "wrist", "elbow"]
    names = [f"{key}/{j}" for j in joints for key in ("target", "battery", "joint_velocity", "joint_position")]
    values = np.arange(1, 17, dtype=np.float32)  # exact in float32, all sums too
    link = link_to(parts, sums, SimpleNamespace(rate_hz=50.0, sensors=names, actuators=motors))
    process = sums.start(driver, link.port)
    link.wait_for_driver(60)
    action = link.wait_for_action(0, values, True, 60)
    place = dict(zip(names, values.tolist(), strict=True))
    of = [place[f"joint_position/{m}"] + 10 * place[f"joint_velocity/{m}"] + 100 * place[f"target/{m}"] for m in motors]
    assert action.tolist() == of
    link.answered.clear()
    assert link.wait_for_action(0, values + 1, False, 60).tolist() == of  # the answer of before
    link.close()
    code, out, err = finish(process)
    assert code == 0 and out.startswith("driver: 1 steps"), err


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"contract": OTHER}, "the robot refuses: contract .* but this robot runs 0123456789abcdef"),
        ({"rate_hz": 100.0}, "100 Hz, the policy at 20 Hz|another rate"),
        ({"sensors": ["observation[0]", "observation[2]"]}, r"reads \['observation\[1\]'\]|lacks a sensor"),
        ({"actuators": ["action_1"]}, "the robot has|does not move the robot's actuator action_1"),
    ],
    ids=["contract", "rate", "sensors", "actuators"],
)
def test_a_driver_that_does_not_fit_the_robot_stops_before_the_first_action(
    parts: Any, pendulum: Made, driver: str, change: dict[str, Any], told: str
) -> None:
    body = {"rate_hz": 20.0, "sensors": [f"observation[{i}]" for i in range(3)], "actuators": ["action_0"], **change}
    link = link_to(parts, pendulum, SimpleNamespace(**body), change.get("contract"))
    process = pendulum.start(driver, link.port)
    while process.poll() is None:
        link.take(-1)
        time.sleep(0.01)
    code, _, err = finish(process)
    assert code == 1 and re.search(told, err), err
    assert bool(link.refused) == ("contract" in change) and not link.answered
    link.close()


def test_the_robot_keeps_its_clock_and_reports(pendulum: Made) -> None:
    command = [sys.executable, str(ROBOT / "robot.py"), "Pendulum-v1", "--bundle", str(pendulum.path), "--port", "0"]
    robot = subprocess.Popen([*command, "--seconds", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert robot.stdout is not None
    port = int(robot.stdout.readline().rsplit(":", 1)[1])
    driver = pendulum.start("c" if CC else "python", port)
    code, out, err = finish(robot)
    assert code == 0, err
    assert finish(driver)[0] == 0
    lines = dict(line.split(" ", 1) for line in out.splitlines())
    assert lines["steps"] == "40" and int(lines["overruns"]) < 40
    bias = re.fullmatch(r"bias (\S+) us of 50000 us", lines["period"])
    assert bias and abs(float(bias[1])) < 2500
    assert all(re.match(r"p50 -?\d+ us, p99 \d+ us, max \d+ us", lines[name]) for name in ("jitter", "response"))
    assert re.match(r"packets \d+, lost 0, refused 0, actions held \d+", lines["late"])
    assert lines["policy"] == "status 0" and re.match(r"-\d+\.\d+ so far in an unfinished episode", lines["return"])


class Still:
    """A body without a simulator, whose step ``slow`` takes so many seconds."""

    rate_hz, sensors, actuators, starts = 20.0, ["observation[0]"], ["action_0"], False

    def __init__(self, slow: int = -1, seconds: float = 0.0) -> None:
        self.slow, self.seconds, self.taken = slow, seconds, []

    def observe(self) -> np.ndarray:
        return np.zeros(1, np.float32)

    def act(self, action: np.ndarray) -> None:
        self.taken.append(float(action[0]))
        if len(self.taken) == self.slow:
            time.sleep(self.seconds)


def answering(parts: Any, port: int, answer: Callable[[int], list[int]]) -> threading.Thread:
    """A driver that answers each observation with the actions it is told: the number of the observation answered."""

    def run() -> None:
        protocol = parts.protocol
        with socket.socket(type=socket.SOCK_DGRAM) as wire:
            wire.connect(("127.0.0.1", port))
            wire.settimeout(30)
            wire.send(protocol.Packet(protocol.HELLO, OTHER[:16]).pack())
            while (packet := protocol.unpack(wire.recv(65507))).kind != protocol.BYE:
                for number in answer(packet.sequence) if packet.kind == protocol.OBSERVATION else []:
                    payload = protocol.pack_floats([number])
                    wire.send(protocol.Packet(protocol.ACTION, OTHER[:16], number, payload).pack())

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_lost_and_a_late_action_are_counted_and_the_one_before_is_held(parts: Any) -> None:
    body = Still()
    link = parts.link.Link(0, OTHER, body.rate_hz, body.sensors, body.actuators)
    thread = answering(parts, link.port, lambda k: {3: [], 5: [], 6: [5, 6]}.get(k, [k]))
    report = parts.robot.run(body, link, 10, False, body.rate_hz)
    thread.join()
    assert (report.steps, len(link.answered), link.late >= 1, report.held >= 2) == (10, 9, True, True)
    assert body.taken[3] in (0, 1, 2) and body.taken[5] in (0, 1, 2, 3, 4)
    assert report.held - link.late == 1  # the lost one; a busy machine adds to both


def test_an_action_of_another_contract_or_length_or_sender_is_not_taken(parts: Any) -> None:
    protocol, body = parts.protocol, Still()
    link = parts.link.Link(0, OTHER, body.rate_hz, body.sensors, body.actuators)
    with socket.socket(type=socket.SOCK_DGRAM) as driver, socket.socket(type=socket.SOCK_DGRAM) as stranger:
        for wire in (driver, stranger):
            wire.connect(("127.0.0.1", link.port))
            wire.settimeout(5)
            wire.send(protocol.Packet(protocol.HELLO, OTHER[:16]).pack())
            link.take(-1)
        assert protocol.unpack(stranger.recv(65507)).payload == b"another driver is at work"
        driver.recv(65507)

        def act(wire: socket.socket, contract: str, *numbers: float) -> tuple[Any, int]:
            payload = protocol.pack_floats(numbers)
            wire.send(protocol.Packet(protocol.ACTION, contract[:16], 0, payload).pack())
            return link.take(0), link.refused

        assert act(stranger, OTHER, 5.0) == (None, 1)  # 1: its HELLO
        assert act(driver, OTHER[::-1], 5.0) == (None, 2)
        assert protocol.unpack(driver.recv(65507)).payload.startswith(b"contract fedcba98")
        assert act(driver, OTHER, 5.0, 6.0) == (None, 3)
        assert act(driver, OTHER, 7.0) == (7.0, 3)
    link.close()


def test_a_slow_step_is_an_overrun_and_does_not_move_the_deadlines_after_it(parts: Any) -> None:
    body = Still(slow=3, seconds=0.13)
    link = parts.link.Link(0, OTHER, body.rate_hz, body.sensors, body.actuators)
    thread = answering(parts, link.port, lambda k: [k])
    report = parts.robot.run(body, link, 12, False, body.rate_hz)
    thread.join()
    late = np.array(report.wakes_ns) - report.period_ns * np.arange(12)
    assert report.overruns >= 2 and late[3] >= 0.08e9 - 1e6
    assert late.min() >= 0 and late[8:].min() < 0.05e9  # back on the grid


def test_a_silent_driver_stops_the_robot(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts.robot, "PATIENCE_S", 0.2)
    for lock_step in (True, False):
        body = Still()
        link = parts.link.Link(0, OTHER, body.rate_hz, body.sensors, body.actuators)
        monkeypatch.setattr(link, "wait_for_driver", lambda seconds: None)
        with pytest.raises(TimeoutError, match="silent|not answered observation 0"):
            parts.robot.run(body, link, 100, lock_step, body.rate_hz)


def test_sensors_can_be_late_and_noisy(parts: Any) -> None:
    exact, late = parts.model.Model("Pendulum-v1", seed=1), parts.model.Model("Pendulum-v1", seed=1, delay=2)
    seen = []
    for body in (exact, late):
        seen.append([])
        for i in range(203):  # over the end of the first episode
            seen[-1].append(body.observe().tolist())
            body.act(np.full(1, np.sin(i), np.float32))
    now, then = seen
    assert then[:3] == [now[0]] * 3 and then[3:200] == now[1:198] and then[200:203] == [now[200]] * 3
    with pytest.raises(ValueError, match="sensor delay -1"):
        parts.model.Model("Pendulum-v1", delay=-1)
    with pytest.raises(ValueError, match=r"has actions Discrete\(2\); a robot here has motors"):
        parts.model.Model("CartPole-v1")
    noisy = parts.model.Model("Pendulum-v1", seed=1, noise=0.1)
    difference = np.abs(noisy.observe() - np.array(now[0]))
    assert 0 < difference.min() and difference.max() < 0.6


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda b: b[:20], "20 bytes that are not a packet"),
        (lambda b: b"JUNK" + b[4:], "not a packet"),
        (lambda b: b[:4] + b"\x02" + b[5:], "protocol version 2; expected 1"),
        (lambda b: b + b"\0", "49 bytes whose header says 48"),
    ],
)
def test_a_packet_that_is_not_whole_is_refused(parts: Any, change: Any, told: str) -> None:
    protocol = parts.protocol
    packet = protocol.Packet(protocol.ACTION, OTHER[:16], 7, protocol.pack_floats([1.5, -2.0]), 4, answers_ns=9)
    back = protocol.unpack(packet.pack())
    assert (back.kind, back.contract, back.sequence, back.floats) == (protocol.ACTION, OTHER[:16], 7, (1.5, -2.0))
    assert (back.flags, back.answers_ns) == (4, 9) and back.stamp_ns > 0
    with pytest.raises(ValueError, match=told):
        protocol.unpack(change(packet.pack()))


def test_robot_and_contract_must_agree_on_the_rate(parts: Any) -> None:
    assert parts.robot.check_rate(SimpleNamespace(rate_hz=None), {"rate_hz": 50.0}) == 50.0
    with pytest.raises(ValueError, match="runs at 20 Hz, the contract's policy at 50 Hz"):
        parts.robot.check_rate(SimpleNamespace(rate_hz=20.0), {"rate_hz": 50.0})
    with pytest.raises(ValueError, match="neither"):
        parts.robot.check_rate(SimpleNamespace(rate_hz=None), {"rate_hz": None})
