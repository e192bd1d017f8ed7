"""The C files of a bundle: header, implementation, golden vectors, self-test, benchmark, build file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graphrl.compiler.backends.c99.emit import SCRATCH, Generated, generate
from graphrl.compiler.backends.c99.nodes import C_TYPES, Unsupported
from graphrl.compiler.bundle.contract import Contract
from graphrl.compiler.bundle.names import c_names, check_prefix
from graphrl.compiler.program import Program
from graphrl.errors import BundleError
from graphrl.keys import Key, encode_key

__all__ = ["CFiles", "Member", "write_c"]

TEMPLATES = ("selftest.c", "bench.c", "CMakeLists.txt")
_IEEE = """\
/* Rounding by a large constant, NaN and the order of sums are relied upon. */
#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__) || defined(_M_FP_FAST) || \\
    (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__ > 0)
#error "compile without -ffast-math, -Ofast, /fp:fast: actions and status would be wrong; loops vectorise without it"
#endif
"""
GOLDEN_NUMBERS = 20_000
"""The golden header holds at most this many numbers; golden.npz holds all."""


@dataclass(frozen=True)
class Member:
    """One array of the C interface: a key, its C name and type, its size, and the struct it is a member of."""

    key: Key
    name: str
    c_type: str
    shape: tuple[int, ...]
    place: str  # "obs", "command" or "state"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class CFiles:
    """Text of every C file by name, the interface, and the memory it takes.

    scratch: the members of the state struct that hold nothing from one step to the next: name, C type, elements.
    """

    files: dict[str, str]
    inputs: tuple[Member, ...]
    outputs: tuple[Member, ...]
    scratch: tuple[tuple[str, str, int], ...]
    weight_bytes: int


def write_c(
    program: Program,
    contract: Contract,
    golden: Sequence[Sequence[np.ndarray]],
    tolerance: float,
    scales: Sequence[float],
    prefix: str = "policy",
    weights: str = "float32",
) -> CFiles:
    """C99 files for a deployed ``program`` (weights frozen, no draws).

    golden: for each row, the program's inputs (float32) and then its outputs (float64). scales: a size for each output;
    the self-test allows ``tolerance`` times the larger of it and the row's own largest value. weights: how those of
    products are stored, where that loses nothing.
    Raises :class:`BundleError` for a program that cannot become C, naming the operation.
    """
    check_prefix(prefix)
    if program.noise:
        raise BundleError("sampling left in: the program draws random numbers; trace the policy deterministic")
    if any(slot.mutated for slot in program.state):
        names = [slot.name for slot in program.state if slot.mutated]
        raise BundleError(f"the policy changes its own buffers {names} when called: is a normaliser still learning?")
    try:
        generated = generate(program, embed=True, name=f"{prefix}_run", weights=weights)
    except Unsupported as problem:
        raise BundleError(f"c99: {problem.explain(program)}") from None
    inputs, outputs = _members(program, contract)
    head = _header(inputs, outputs, contract, prefix, generated)
    marks = {"@prefix@": prefix, "@PREFIX@": prefix.upper(), "@load@": _load(inputs, prefix), "@fill@": _fill(inputs),
             "@compare@": _compare(outputs, prefix, tolerance, scales)}  # fmt: skip
    files = {f"{prefix}.h": head, f"{prefix}.c": _source(inputs, outputs, contract, prefix, generated)}
    files[f"{prefix}_golden.h"] = _golden_header(inputs, outputs, golden, prefix)
    for name in TEMPLATES:
        text = (Path(__file__).parent / name).read_text()
        for mark, value in marks.items():
            text = text.replace(mark, value)
        files[name] = text
    return CFiles(files, inputs, outputs, generated.scratch, generated.weight_bytes)


def _members(program: Program, contract: Contract) -> tuple[tuple[Member, ...], tuple[Member, ...]]:
    """The C interface: recurrent values live in the state struct, everything else in the caller's structs."""
    reads = {s.key for s in contract.recurrent or ()}
    taken = {"steps", *SCRATCH.values()}
    writes = {s.next_key for s in contract.recurrent or ()}
    made = []
    for ports, kept, place in ((program.inputs, reads, "obs"), (program.outputs, writes, "command")):
        names = c_names([p.key for p in ports])
        names = [f"{n}_" if n in taken and p.key in kept else n for p, n in zip(ports, names, strict=True)]
        made.append(tuple(
            Member(p.key, n, C_TYPES[p.dtype], p.shape, "state" if p.key in kept else place)
            for p, n in zip(ports, names, strict=True)
        ))  # fmt: skip
    c_names([m.key for group in made for m in group if m.place == "state"])  # they share one struct
    return made[0], made[1]


def _struct(
    name: str, members: Sequence[Member], first: Sequence[str] = (), last: Sequence[tuple[str, str, int]] = ()
) -> list[str]:
    said = [encode_key(m.key).replace("*/", "* /").replace("/*", "/ *") for m in members]  # it stands in a comment
    lines = [f"    {m.c_type} {m.name}[{max(m.size, 1)}]; /* {key} {list(m.shape)} */"
             for m, key in zip(members, said, strict=True)]  # fmt: skip
    lines += [f"    {kind} {arena}[{size}];" for arena, kind, size in last]
    return ["typedef struct {", *[f"    {f}" for f in first], *lines, f"}} {name};"]


def _header(
    inputs: Sequence[Member], outputs: Sequence[Member], contract: Contract, prefix: str, generated: Generated
) -> str:
    up = prefix.upper()
    state = [m for m in (*inputs, *outputs) if m.place == "state"]
    obs = [m for m in inputs if m.place == "obs"]
    command = [m for m in outputs if m.place == "command"]
    rate = contract.rate_hz
    return "\n".join(
        [
            f"/* A policy in C99: no heap, recursion or global state; {generated.weight_bytes} bytes of constants.",
            "   -ffast-math is not needed to be fast, and is refused: the numbers would be wrong. */",
            f"#ifndef {up}_H",
            f"#define {up}_H",
            "",
            "#include <stddef.h>",
            "#include <stdint.h>",
            "",
            f'#define {up}_CONTRACT_HASH "{contract.sha256()}"',
            f"#define {up}_SCRATCH_BYTES {generated.scratch_bytes} /* working memory in {prefix}_state */",
            *([f"#define {up}_RATE_HZ {rate:.9g}"] if rate is not None else []),
            "",
            f"/* Status bits of {prefix}_step; 0 is well. The command is computed either way. */",
            f"#define {up}_STATUS_NON_FINITE_INPUT 1u",
            f"#define {up}_STATUS_NON_FINITE_OUTPUT 2u",
            f"#define {up}_STATUS_OUT_OF_RANGE 4u /* an observation beyond the contract's low or high */",
            f"#define {up}_STATUS_NON_FINITE_STATE 8u /* reset before the next step */",
            "",
            *_struct(f"{prefix}_obs", obs, [] if obs else ["unsigned char unused;"]),
            "",
            *_struct(f"{prefix}_command", command, [] if command else ["unsigned char unused;"]),
            "",
            *_places((*obs, *command), contract, up),
            *_initializers((*obs, *command), contract, up),
            "/* Owned by the caller; any number of instances may run interleaved. Scratch is working memory of a step:",
            "   nothing in it is kept, and nobody need clear it. */",
            *_struct(f"{prefix}_state", state, ["uint32_t steps; /* since the last reset */"], generated.scratch),
            "",
            "#ifdef __cplusplus",
            'extern "C" {',
            "#endif",
            f"size_t {prefix}_state_size(void);",
            f"void {prefix}_init({prefix}_state *st);",
            f"void {prefix}_reset({prefix}_state *st); /* start of an episode */",
            f"uint32_t {prefix}_step({prefix}_state *st, const {prefix}_obs *obs, {prefix}_command *command);",
            f"const char *{prefix}_contract_hash(void);",
            f"int32_t {prefix}_selftest({prefix}_state *st); /* golden rows that fail; in selftest.c */",
            "#ifdef __cplusplus",
            "}",
            "#endif",
            "",
            "#endif",
            "",
        ]
    )


def _places(members: Sequence[Member], contract: Contract, up: str) -> list[str]:
    """The place of each entry that has a name in the contract: ``obs.joint_position[POLICY_joint_position__hip]``."""
    named = {t.key: t.names for t in contract.observations or ()}
    if contract.action is not None:
        named[contract.action.key] = contract.action.names or contract.action.joint_names
    entries = [(m.key, name, i) for m in members for i, name in enumerate(named.get(m.key) or ())]
    names = c_names([(*((key,) if isinstance(key, str) else key), name) for key, name, _ in entries])
    lines = [f"    {up}_{name} = {i}," for name, (_, _, i) in zip(names, entries, strict=True)]
    return ["/* Places of the entries that have names. */", "enum {", *lines, "};", ""] if lines else []


def _initializers(members: Sequence[Member], contract: Contract, up: str) -> list[str]:
    """The contract's numbers and names an entry, for arrays of the caller's: ``float low[] = POLICY_LOW_action;``."""
    lines = []
    for m in members:
        term = next((t for t in contract.observations or () if t.key == m.key), None)
        if contract.action is not None and contract.action.key == m.key and m.place == "command":
            action = contract.action
            fields = ("low", "high", "scale", "offset", "default_pose", "kp", "kd")
            found = {name: getattr(action, name) for name in fields}
            names = action.names or action.joint_names
        elif term is not None:
            found = {name: getattr(term, name) for name in ("low", "high", "scale")}
            norm = term.normalizer
            if norm is not None and norm.where == "outside":
                found |= {"mean": norm.mean, "std": norm.std}
            names = term.names
        else:
            continue
        most = float(np.finfo(np.float32).max)  # for an entry without a bound
        for name, values in found.items():
            if values is not None:
                each = values if isinstance(values, (tuple, list)) else [values] * m.size
                numbers = [(-most if name == "low" else most) if v is None else v for v in each]
                lines.append(f"#define {up}_{name.upper()}_{m.name} {{{', '.join(map(_f32, numbers))}}}")
        if names:
            lines.append(f"#define {up}_NAMES_{m.name} {{{', '.join(map(_text, names))}}}")
    said = "/* What the contract says of each entry, to fill arrays with. The policy itself does not use it. */"
    return [said, *lines, ""] if lines else []


def _text(name: str) -> str:
    """A string literal, in UTF-8."""
    plain = set(range(32, 127)) - set(b'"\\?')
    return '"' + "".join(chr(b) if b in plain else f"\\{b:03o}" for b in name.encode()) + '"'


def _source(
    inputs: Sequence[Member], outputs: Sequence[Member], contract: Contract, prefix: str, generated: Generated
) -> str:
    up = prefix.upper()
    place = {"obs": "obs->", "command": "command->", "state": "st->"}
    argument = {("input", i): f"{place[m.place]}{m.name}" for i, m in enumerate(inputs)}
    argument |= {("output", i): f"{place[m.place]}{m.name}" for i, m in enumerate(outputs)}
    call = ", ".join([*(argument[a.kind, a.index] for a in generated.arguments),
                      *(f"st->{arena}" for arena, _, _ in generated.scratch)])  # fmt: skip
    initial = {s.key: s.initial for s in contract.recurrent or ()}
    carry = {s.key: s.next_key for s in contract.recurrent or ()}
    named = {m.key: m for m in outputs}
    resets, carries, tables = [], [], []
    for m in inputs:
        if m.place == "state":
            start = initial[m.key]
            value = f"initial_{m.name}[i]" if isinstance(start, (tuple, list)) else _literal(start, m)
            if isinstance(start, (tuple, list)):
                numbers = ", ".join(_literal(v, m) for v in start)
                tables.append(f"static const {m.c_type} initial_{m.name}[{max(m.size, 1)}] = {{{numbers}}};\n")
            resets.append(f"for (int i = 0; i < {m.size}; ++i) {{ st->{m.name}[i] = {value}; }}")
            after = named[carry[m.key]]
            resets.append(f"for (int i = 0; i < {m.size}; ++i) {{ st->{after.name}[i] = st->{m.name}[i]; }}")
            carries.append(f"for (int i = 0; i < {m.size}; ++i) {{ st->{m.name}[i] = st->{after.name}[i]; }}")
    ranges, range_tables = _ranges(inputs, contract, up)
    body = [
        "uint32_t status = 0u;",
        *_finite(inputs, place, up, "INPUT"),
        *ranges,
        f"{prefix}_run({call});",
        *_finite(outputs, place, up, "OUTPUT"),
        *carries,
        "st->steps += 1u;",
        *(["(void)obs;"] if not any(m.place == "obs" for m in inputs) else []),
        "return status;",
    ]
    return "\n".join(
        [
            f'#include "{prefix}.h"',
            "",
            "#include <math.h>",
            "",
            _IEEE,
            generated.code,
            *range_tables,
            *tables,
            f"size_t {prefix}_state_size(void)\n{{\n    return sizeof({prefix}_state);\n}}\n",
            f"void {prefix}_init({prefix}_state *const st)\n{{\n    {prefix}_reset(st);\n}}\n",
            f"void {prefix}_reset({prefix}_state *const st)\n{{",
            "    st->steps = 0u;",
            *[f"    {line}" for line in resets],
            "}\n",
            f"uint32_t {prefix}_step({prefix}_state *const st, const {prefix}_obs *const obs, "
            f"{prefix}_command *const command)\n{{",
            *[f"    {line}" for line in body],
            "}\n",
            f"const char *{prefix}_contract_hash(void)\n{{\n    return {up}_CONTRACT_HASH;\n}}",
            "",
        ]
    )


def _finite(members: Sequence[Member], place: dict[str, str], up: str, side: str) -> list[str]:
    return [
        f"for (int i = 0; i < {m.size}; ++i) {{ if (!(fabsf({place[m.place]}{m.name}[i]) <= 3.402823466e+38f)) "
        f"{{ status |= {up}_STATUS_NON_FINITE_{'STATE' if m.place == 'state' else side}; }} }}"
        for m in members
        if m.c_type == "float" and m.size
    ]


def _ranges(inputs: Sequence[Member], contract: Contract, up: str) -> tuple[list[str], list[str]]:
    terms = {t.key: t for t in contract.observations or ()}
    lines, tables = [], []
    for m in inputs:
        term = terms.get(m.key)
        if term is None or m.place != "obs" or m.c_type != "float":
            continue
        for bound, sign in (("low", "<"), ("high", ">")):
            values = getattr(term, bound)
            if values is not None:
                most = float(np.finfo(np.float32).max) * (-1.0 if bound == "low" else 1.0)  # for an entry without
                numbers = ", ".join(_f32(most if v is None else v) for v in values)
                tables.append(f"static const float {bound}_{m.name}[{m.size}] = {{{numbers}}};\n")
                lines.append(f"for (int i = 0; i < {m.size}; ++i) {{ if (obs->{m.name}[i] {sign} {bound}_{m.name}[i]) "
                             f"{{ status |= {up}_STATUS_OUT_OF_RANGE; }} }}")  # fmt: skip
    return lines, tables


def _load(inputs: Sequence[Member], prefix: str) -> str:
    lines = []
    for m in inputs:
        target = f"{'st->' if m.place == 'state' else 'obs.'}{m.name}"
        lines.append(f"memcpy({target}, {prefix}_golden_{m.name}[row], sizeof {target});")
    return "\n".join(f"        {line}" for line in lines)


def _fill(inputs: Sequence[Member]) -> str:
    """Subnormal numbers everywhere."""
    floats = [m for m in inputs if m.place == "obs" and m.c_type == "float"]
    lines = [f"for (int i = 0; i < {m.size}; ++i) {{ obs.{m.name}[i] = 1e-40f; }}" for m in floats]
    return "\n".join(f"    {line}" for line in lines)


def _compare(outputs: Sequence[Member], prefix: str, tolerance: float, scales: Sequence[float]) -> str:
    lines = []
    for m, scale in zip(outputs, scales, strict=True):
        got = f"{'st->' if m.place == 'state' else 'command.'}{m.name}[i]"
        wanted = f"{prefix}_golden_out_{m.name}[row][i]"
        lines += [
            "{",
            f"    double largest = {scale!r};",
            f"    for (int i = 0; i < {m.size}; ++i) {{ if (distance({wanted}, 0.0) > largest) "
            f"{{ largest = distance({wanted}, 0.0); }} }}",
            f"    for (int i = 0; i < {m.size}; ++i) {{",
            f"        if (!(distance((double){got}, {wanted}) <= {tolerance!r} * largest)) {{ bad = 1; }}",
            "    }",
            "}",
        ]
    return "\n".join(f"        {line}" for line in lines)


def _golden_header(
    inputs: Sequence[Member], outputs: Sequence[Member], golden: Sequence[Sequence[np.ndarray]], prefix: str
) -> str:
    row = sum(m.size for m in (*inputs, *outputs)) or 1
    rows = golden[: max(1, min(len(golden), GOLDEN_NUMBERS // row))]
    lines = [f"/* Inputs, and outputs computed in float64. */\n#define {prefix.upper()}_GOLDEN_ROWS {len(rows)}\n"]
    for i, m in enumerate((*inputs, *outputs)):
        out = i >= len(inputs)
        kind = "double" if out else m.c_type
        name = f"{prefix}_golden_{'out_' if out else ''}{m.name}"
        lines.append(f"static const {kind} {name}[{len(rows)}][{max(m.size, 1)}] = {{")
        for r in rows:
            values = np.asarray(r[i]).reshape(-1).tolist()
            text = [repr(float(v)) if out else _f32(v) if m.c_type == "float" else str(int(v)) for v in values]
            lines.append(f"    {{{', '.join(text) or '0'}}},")
        lines.append("};\n")
    return "\n".join(lines)


def _literal(value: float, member: Member) -> str:
    return _f32(value) if member.c_type == "float" else str(int(value))


def _f32(value: float) -> str:
    with np.errstate(over="ignore"):
        text = f"{float(np.float32(value)):.9g}"
    if text.endswith("inf"):  # a bound that is none
        return "-INFINITY" if text.startswith("-") else "INFINITY"
    return f"{text}f" if any(c in text for c in ".en") else f"{text}.0f"
