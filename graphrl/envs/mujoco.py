"""What a MuJoCo model behind an environment tells of joints, motors, and the entries of an observation."""

from __future__ import annotations

from collections import Counter
from typing import Any

__all__ = ["actuator_fields", "has_quaternion", "observation_fields"]

FREE, BALL, SLIDE, HINGE = range(4)
Entry = tuple[str, str | None, str | None]
"""Ending of a name, unit, frame."""
POSITIONS: dict[int, tuple[Entry, ...]] = {
    FREE: (*((axis, "m", "world") for axis in "xyz"), *((f"q{axis}", None, "world") for axis in "wxyz")),
    BALL: tuple((f"q{axis}", None, "parent") for axis in "wxyz"),
    SLIDE: (("pos", "m", None),),
    HINGE: (("pos", "rad", None),),
}
"""Entries of ``qpos``, a joint type."""
VELOCITIES: dict[int, tuple[Entry, ...]] = {
    FREE: (*((f"v{axis}", "m/s", "world") for axis in "xyz"), *((f"w{axis}", "rad/s", "body") for axis in "xyz")),
    BALL: tuple((f"w{axis}", "rad/s", "body") for axis in "xyz"),
    SLIDE: (("vel", "m/s", None),),
    HINGE: (("vel", "rad/s", None),),
}
"""Entries of ``qvel``: MuJoCo has a free body's angular velocity in the body's own frame."""
BEYOND = 1e9
"""A speed that no joint has."""
JOINT_TRANSMISSION, FIXED_GAIN, NO_DYNAMICS, NO_BIAS, AFFINE_BIAS = 0, 0, 0, 0, 1


def has_quaternion(model: Any) -> bool:
    """Whether a joint's position is a quaternion, which MuJoCo writes w first."""
    return any(int(kind) in (FREE, BALL) for kind in model.jnt_type)


def observation_fields(raw: Any, size: int) -> dict[str, Any]:
    """Names, units and frames of a flat observation of ``size`` entries, and bounds of velocities that are clipped.

    Gymnasium's environments say what their observation is made of (``observation_structure``); an environment that does
    not, or says another size, gets no names. What is neither position nor velocity is numbered, without unit.
    """
    parts = dict(getattr(raw, "observation_structure", None) or {})
    skipped = int(parts.pop("skipped_qpos", 0))
    if not parts or sum(map(int, parts.values())) != size:
        return {}
    entries: list[Entry] = []
    for part, count in parts.items():
        if part == "qpos":
            made = _joints(raw.model, POSITIONS)[skipped:]
        elif part == "qvel":
            made = _joints(raw.model, VELOCITIES)
        else:
            made = [(f"{part}_{i}", None, None) for i in range(count)]
        if len(made) != count:
            return {}
        entries += made
    names, units, frames = zip(*entries, strict=True)
    if len(set(names)) != size:
        return {}
    found = {"names": names, "unit": units, **({"frame": frames} if any(frames) else {})}
    return {**found, **_clipped_speeds(raw, parts)}


def _joints(model: Any, table: dict[int, tuple[Entry, ...]]) -> list[Entry]:
    made: list[Entry] = []
    for i, kind in enumerate(model.jnt_type):
        joint = model.joint(i).name or f"joint_{i}"
        made += [(f"{joint}_{ending}", unit, frame) for ending, unit, frame in table[int(kind)]]
    return made


def _clipped_speeds(raw: Any, parts: dict[str, Any]) -> dict[str, Any]:
    """Bounds of the velocities that an environment clips before the policy sees them (Hopper, Walker2d).

    Read off its own observation of a speed beyond all bounds; the simulator's state is put back.
    """
    if not hasattr(raw, "_get_obs") or list(parts)[:2] != ["qpos", "qvel"]:
        return {}
    start, before = int(parts["qpos"]), raw.data.qvel.copy()
    limits = []
    try:
        for speed in (-BEYOND, BEYOND):
            raw.data.qvel[:] = speed
            seen = raw._get_obs()[start : start + int(parts["qvel"])]
            limits.append([None if value == speed else float(value) for value in seen])
    finally:
        raw.data.qvel[:] = before
    if not any(value is not None for bound in limits for value in bound):
        return {}
    rest = sum(map(int, parts.values())) - start - int(parts["qvel"])
    low, high = ((*[None] * start, *bound, *[None] * rest) for bound in limits)
    return {"low": low, "high": high, "bounds_from": "stated"}


def actuator_fields(raw: Any) -> dict[str, Any]:
    """Names, joints, unit, pose, and the gains of position motors, an actuator an entry; what is not known is left out.

    A motor without a name has that of the joint it drives. The pose is the one episodes start around: ``init_qpos`` of
    Gymnasium's environments, else the model's first keyframe, else its ``qpos0``. kp and kd are those of the motor's
    own position loop, force = kp (command - position) - kd velocity, for actuators with a gear of one.
    """
    model = raw.model
    joints = [_joint_of(model, i) for i in range(model.nu)]
    names = [model.actuator(i).name or (model.joint(j).name if j is not None else "") for i, j in enumerate(joints)]
    found: dict[str, Any] = {}
    if _distinct(names):
        found["names"] = tuple(names)
    if any(j is None for j in joints):
        return found
    driven = [j for j in joints if j is not None]
    if _distinct([model.joint(j).name for j in driven]):
        found["joint_names"] = tuple(model.joint(j).name for j in driven)
    pose = getattr(raw, "init_qpos", None)
    if pose is None:
        pose = model.key_qpos[0] if model.nkey else model.qpos0
    found["default_pose"] = tuple(float(pose[model.jnt_qposadr[j]]) for j in driven)
    return {**found, **_drives(model, driven)}


def _joint_of(model: Any, actuator: int) -> int | None:
    """The joint of one degree of freedom that an actuator drives."""
    joint = int(model.actuator_trnid[actuator][0])
    if int(model.actuator_trntype[actuator]) != JOINT_TRANSMISSION or int(model.jnt_type[joint]) not in (SLIDE, HINGE):
        return None
    return joint


def _distinct(names: list[str]) -> bool:
    return all(names) and max(Counter(names).values(), default=1) == 1


def _drives(model: Any, joints: list[int]) -> dict[str, Any]:
    """What a command of 1 means: the unit of each motor's command, and a position motor's gains."""
    units: list[str | None] = []
    gains: list[tuple[float, float]] = []
    for i, joint in enumerate(joints):
        hinge = int(model.jnt_type[joint]) == HINGE
        gain, bias = model.actuator_gainprm[i], model.actuator_biasprm[i]
        at_once = int(model.actuator_dyntype[i]) == NO_DYNAMICS
        fixed = at_once and int(model.actuator_gaintype[i]) == FIXED_GAIN and float(model.actuator_gear[i][0]) == 1.0
        kind = int(model.actuator_biastype[i])
        if fixed and kind == NO_BIAS and float(gain[0]) == 1.0:
            units.append("N m" if hinge else "N")
        elif fixed and kind == AFFINE_BIAS and float(bias[0]) == 0.0 and float(gain[0]) == -float(bias[1]) > 0:
            units.append("rad" if hinge else "m")
            gains.append((float(gain[0]), -float(bias[2])))
        else:
            units.append(None)
    found: dict[str, Any] = {"unit": tuple(units)} if any(units) else {}
    if gains and len(gains) == len(joints):
        found.update(kp=tuple(kp for kp, _ in gains), kd=tuple(kd for _, kd in gains))
    return found
