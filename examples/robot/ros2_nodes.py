"""Writes starting points for ROS 2 from a bundle's contract: a node in Python, one in C++, a ros2_control controller.

python examples/robot/ros2_nodes.py arm_bundle ros2_arm

Templates to edit, not a package: their syntax is checked (against stub headers), they have not run on ROS 2 yet. Named
observations are read from a JointState by name: what key or unit calls a velocity or a torque from those fields, the
rest from its position; observations without names are a Float32MultiArray in the contract's order.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from pprint import pformat
from typing import Any

from caller_steps import action_steps, cpp_lines, observation_steps

TEMPLATES = Path(__file__).with_name("ros2")


@dataclass(frozen=True)
class Port:
    """An observation or the action: its key, its member in the C struct, the names of its entries if any."""

    key: str
    member: str
    size: int
    names: list[str] | None
    unit: str

    @property
    def field(self) -> str:
        """The field of JointState, and the interface of ros2_control, that its values most likely are."""
        kinds = {"vel": "velocity", "rad/s": "velocity", "effort": "effort", "torque": "effort", "N m": "effort"}
        return next((field for word, field in kinds.items() if word in f"{self.key} {self.unit}"), "position")

    @property
    def topic(self) -> str:
        """Where a node listens."""
        return "joint_states" if self.names and "joint" in self.key else self.key

    def interfaces(self) -> list[str]:
        """Names in ros2_control: ``joint/position`` for a joint's value, else ``key/name``."""
        if self.names and (self.topic == "joint_states" or self.key == "action"):
            return [f"{name}/{self.field}" for name in self.names]
        return [f"{self.key}/{name}" for name in self.names or map(str, range(self.size))]


def ports_of(manifest: dict[str, Any]) -> tuple[list[Port], Port]:
    """The observations and the action. Raises ``ValueError`` for what these templates cannot serve."""
    contract, interface = manifest["contract"], manifest.get("c")
    if interface is None or contract["rate_hz"] is None:
        raise ValueError("the templates need the target 'c99' in the bundle and Contract(rate_hz=...)")
    action = contract["action"] or {"key": "action", "names": None, "joint_names": None, "unit": None}
    named = {term["key"]: (term["names"], term["unit"]) for term in contract["observations"] or ()}
    named[action["key"]] = action["names"] or action["joint_names"], action["unit"]
    found = []
    for side in ("inputs", "outputs"):
        for m in interface[side]:
            if m["place"] == "state":
                continue
            if m["c_type"] != "float":
                raise ValueError(f"{m['key']!r} is {m['c_type']} in C: the templates serve float only")
            names, unit = named.get(m["key"], (None, None))
            found.append(Port(m["key"], m["name"], m["size"], names, unit or ""))
    (out,) = [port for port in found if port.key == action["key"]]
    return [port for port in found if port is not out], out


def ros2_files(manifest: dict[str, Any]) -> dict[str, str]:
    """The text of each file by its name."""
    observations, action = ports_of(manifest)
    contract = manifest["contract"]
    terms = {term["key"]: term for term in contract["observations"] or ()}
    before = {port.key: observation_steps(terms.get(port.key), port.size) for port in observations}
    after = action_steps(contract["action"], action.size)
    prepare = [cpp_lines(before[p.key], f"obs_.{p.member}", p.size) for p in observations if before[p.key]]
    commands = cpp_lines(after, f"command_.{action.member}", action.size)
    marks = {
        "hash": manifest["contract_hash"],
        "prefix": manifest["c"]["prefix"],
        "PREFIX": manifest["c"]["prefix"].upper(),
        "rate": repr(float(contract["rate_hz"])),
        "period_ns": str(round(1e9 / contract["rate_hz"])),
        "ports": str(len(observations)),
        "before": pformat(before, width=100),
        "after": pformat(after, width=100).replace("inf", "np.inf"),
        "sources": pformat({p.key: (p.topic, p.field if p.names else None) for p in observations}),
        "names": pformat({p.key: p.names for p in observations if p.names}),
        "action": repr((action.key, action.names, action.field)),
        "message": "JointState" if action.names else "Float32MultiArray",
        "subscriptions": "\n".join(_subscription(i, port) for i, port in enumerate(observations)),
        "prepare": "\n".join(prepare),
        "publish": _publish(action),
        "command": commands,
        "states": _quoted([name for port in observations for name in port.interfaces()]),
        "commands": _quoted(action.interfaces()),
        "places": ", ".join(f"&obs_.{p.member}[{i}]" for p in observations for i in range(p.size)),
        "outlets": ", ".join(f"&command_.{action.member}[{i}]" for i in range(action.size)),
    }
    files = {}
    for path in sorted(TEMPLATES.glob("*.in")):
        text = path.read_text()
        for mark, value in marks.items():
            text = text.replace(f"@{mark}@", value)
        files[path.stem] = text
    return files


def _quoted(names: list[str]) -> str:
    return ", ".join(json.dumps(name) for name in names)


def _subscription(port_index: int, port: Port) -> str:
    if port.names is None:
        take = f"take({port_index}, m->data, sensed_.{port.member}, {port.size})"
        kind = "Float32MultiArray"
    else:
        entries = ", ".join(f"{{{json.dumps(name)}, &sensed_.{port.member}[{i}]}}" for i, name in enumerate(port.names))
        take = f"take_named({port_index}, m->name, m->{port.field}, {{{entries}}})"
        kind = "JointState"
    return (
        f"    in_.push_back(create_subscription<{kind}>({json.dumps(port.topic)}, rclcpp::SensorDataQoS(),\n"
        f"        [this](const {kind}::ConstSharedPtr m) {{\n          {take};\n        }}));"
    )


def _publish(action: Port) -> str:
    values = f"command_.{action.member}, command_.{action.member} + {action.size}"
    field = action.field if action.names else "data"
    lines = [f"    message.{field}.assign({values});"]
    if action.names:
        lines += ["    message.header.stamp = now();", f"    message.name = {{{_quoted(action.names)}}};"]
    return "\n".join(lines)


def main(bundle: str, out: str) -> int:
    """Write the files; the exit status."""
    try:
        files = ros2_files(json.loads(Path(bundle, "manifest.json").read_text()))
        Path(out).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            Path(out, name).write_text(text)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{out}: {', '.join(files)}; syntax-checked templates, not run on ROS 2")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: ros2_nodes.py BUNDLE OUT")
    sys.exit(main(sys.argv[1], sys.argv[2]))
