"""Loop nests as C text: dims that act as one are merged, sizes are literals, indices are affine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["indent", "index", "loop_nest", "merge_dims"]

Strides = tuple[int, ...]


def merge_dims(shape: Sequence[int], operands: Sequence[Strides]) -> tuple[tuple[int, ...], list[Strides]]:
    """Drop dims of size one and merge neighbours that every operand walks as one run."""
    kept = [d for d, n in enumerate(shape) if n != 1]
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in operands]
    for d in kept:
        if sizes and all(s[-1] == o[d] * shape[d] for s, o in zip(steps, operands, strict=True)):
            sizes[-1] *= shape[d]
            for s, o in zip(steps, operands, strict=True):
                s[-1] = o[d]
            continue
        sizes.append(shape[d])
        for s, o in zip(steps, operands, strict=True):
            s.append(o[d])
    return tuple(sizes), [tuple(s) for s in steps]


def index(offset: int, strides: Sequence[int], variables: Sequence[str]) -> str:
    """``"3 + i0 * 4 + i1"``: the flat index of an element."""
    terms = [str(offset)] if offset else []
    for stride, name in zip(strides, variables, strict=True):
        if stride == 1:
            terms.append(name)
        elif stride:
            terms.append(f"{name} * {stride}" if stride > 0 else f"{name} * ({stride})")
    return " + ".join(terms) or "0"


def indent(lines: Sequence[str], by: int = 1) -> list[str]:
    """``lines`` moved right."""
    return ["    " * by + line if line else line for line in lines]


def loop_nest(
    shape: Sequence[int], body: Callable[[list[str]], list[str]], variable: str = "i", pragma: str = ""
) -> list[str]:
    """``body(variables)`` inside one ``for`` a dim. No loop for an empty shape, no code for an empty tensor."""
    if any(n == 0 for n in shape):
        return []
    names = [f"{variable}{d}" for d in range(len(shape))]
    lines = body(names)
    if not shape:
        return lines if len(lines) == 1 else ["{", *indent(lines), "}"]
    for depth in reversed(range(len(shape))):
        name = names[depth]
        lines = [f"for (int {name} = 0; {name} < {shape[depth]}; ++{name}) {{", *indent(lines), "}"]
        if pragma and depth == len(shape) - 1:
            lines = [pragma, *lines]
    return lines
