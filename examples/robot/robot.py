"""The robot: a simulated body in its own process, which runs at its own rate whether or not anybody answers.

python examples/robot/robot.py Pendulum-v1 --bundle policy_bundle --seconds 60
python examples/robot/robot.py arm:Arm-v0 --bundle arm_bundle --lock-step

Of the policy it knows the contract's hash and rate. `drive.c` and `drive.py` drive it; `protocol.py` has the packets.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from link import Link
from model import Model

PATIENCE_S = 5.0


@dataclass
class Report:
    """What a run was like. ``wakes_ns``: when each step began, after the first deadline; empty in lock-step."""

    period_ns: int
    steps: int = 0
    overruns: int = 0
    held: int = 0
    wakes_ns: list[int] = field(default_factory=list)

    def text(self, model: Model, link: Link) -> str:
        """One line a fact."""
        lost = self.steps - len(link.answered)
        lines = [f"steps {self.steps}", f"overruns {self.overruns}"]
        if len(self.wakes_ns) > 1:
            wakes = np.array(self.wakes_ns)
            bias = (wakes[-1] - wakes[0]) / (len(wakes) - 1) - self.period_ns
            late = wakes - self.period_ns * np.arange(len(wakes))
            lines += [f"period bias {bias / 1e3:.2f} us of {self.period_ns / 1e3:.0f} us", f"jitter {_spread(late)}"]
        else:
            lines.append("lock-step: no clock, no jitter")
        lines += [f"response {_spread(np.array(link.response_ns))}" if link.response_ns else "response none"]
        lines += [
            f"late packets {link.late}, lost {lost}, refused {link.refused}, actions held {self.held}, "
            f"not finite {link.not_finite}"
        ]
        lines += [f"policy status {link.status}"]
        if model.finished:
            lines.append(f"return {np.mean(model.finished):.6f} over {len(model.finished)} episodes")
        if not model.starts:
            lines.append(f"return {model.returns[-1]:.6f} so far in an unfinished episode")
        return "\n".join(lines)


def _spread(ns: np.ndarray) -> str:
    p50, p99 = np.percentile(ns, [50, 99]) / 1e3
    return f"p50 {p50:.0f} us, p99 {p99:.0f} us, max {ns.max() / 1e3:.0f} us"


def run_lock_step(model: Model, link: Link, steps: int, report: Report) -> None:
    """The robot waits for every action: the same run on any machine, as fast as it goes."""
    for sequence in range(steps):
        model.act(link.wait_for_action(sequence, model.observe(), model.starts, PATIENCE_S))
        report.steps += 1


def run_real_time(model: Model, link: Link, steps: int, report: Report) -> None:
    """One step a period, on a grid of absolute deadlines: a late step does not move the next one's deadline.

    An action that is not there at its deadline is replaced by the one before (zero at the start of an episode). A step
    whose work is not done at the following deadline is an overrun. Raises ``TimeoutError`` for a silent driver.
    """
    action, heard = np.zeros(len(model.actuators), np.float32), 0
    start = time.monotonic_ns()
    for sequence in range(steps):
        values = model.observe()
        if model.starts:
            action = np.zeros_like(action)
        link.send(sequence, values, model.starts)
        deadline = start + (sequence + 1) * report.period_ns
        report.overruns += time.monotonic_ns() > deadline
        sleep_until(deadline)
        report.wakes_ns.append(time.monotonic_ns() - start - report.period_ns)
        answer = link.take(sequence)
        if answer is None:
            report.held += 1
            if (sequence - heard) * report.period_ns > PATIENCE_S * 1e9:
                raise TimeoutError(f"the driver has been silent for {PATIENCE_S:g} s")
        else:
            action, heard = answer, sequence
        model.act(action)
        report.steps += 1
    time.sleep(report.period_ns / 1e9)
    link.take(steps)  # what was on its way counts as late, not as lost


def sleep_until(deadline_ns: int) -> None:
    """Sleep to a time of CLOCK_MONOTONIC; ``time.sleep`` is told the rest anew where it wakes early."""
    while (rest := deadline_ns - time.monotonic_ns()) > 0:
        time.sleep(rest / 1e9)


def run(model: Model, link: Link, steps: int, lock_step: bool, rate_hz: float) -> Report:
    """Serve one driver for so many steps, and say BYE."""
    report = Report(round(1e9 / rate_hz))
    try:
        link.wait_for_driver(6 * PATIENCE_S)
        (run_lock_step if lock_step else run_real_time)(model, link, steps, report)
    finally:
        link.close()
    return report


def check_rate(model: Model, contract: dict) -> float:
    """The control rate in Hz. Raises ``ValueError`` where robot and contract disagree, or nobody knows."""
    rates = [rate for rate in (model.rate_hz, contract["rate_hz"]) if rate is not None]
    if not rates:
        raise ValueError("neither the environment nor the contract states a rate: set Contract(rate_hz=...)")
    if abs(rates[0] - rates[-1]) > 1e-6 * rates[0]:
        raise ValueError(f"this robot runs at {rates[0]:g} Hz, the contract's policy at {rates[-1]:g} Hz")
    return float(rates[0])


def main(arguments: list[str] | None = None) -> int:
    """Run the robot, print the report; the exit status, 1 where the driver never came or fell silent."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("env", help="a Gymnasium id; arm:Arm-v0 is the arm that lies here")
    parser.add_argument("--bundle", required=True, help="the policy's bundle: its contract's hash and rate are read")
    parser.add_argument("--port", type=int, default=5555, help="UDP port on 127.0.0.1; 0 takes a free one")
    parser.add_argument("--seconds", type=float, default=10.0, help="of robot time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--delay", type=int, default=0, help="sensor delay in control steps")
    parser.add_argument("--noise", type=float, default=0.0, help="standard deviation of the sensors' noise")
    parser.add_argument("--lock-step", action="store_true", help="wait for every action instead of the clock")
    options = parser.parse_args(arguments)
    try:
        manifest = json.loads(Path(options.bundle, "manifest.json").read_text())
        model = Model(options.env, options.seed, options.delay, options.noise)
        rate_hz = check_rate(model, manifest["contract"])
        link = Link(options.port, manifest["contract_hash"], rate_hz, model.sensors, model.actuators)
        print(f"listening on 127.0.0.1:{link.port}", flush=True)
        report = run(model, link, round(options.seconds * rate_hz), options.lock_step, rate_hz)
    except (OSError, ValueError) as error:  # TimeoutError is an OSError
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(report.text(model, link))
    return 0


if __name__ == "__main__":
    sys.exit(main())
