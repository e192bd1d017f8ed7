"""Checks on tensors' values in traced code: answered from the example, then kept in the program."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

__all__ = ["CHECKED", "Checks", "may_go_on"]

CHECKED = ("graphrl", "checked")
"""Key of a program's last output where traced code made checks: a 0-d flag, true when all would pass again."""


class Checks:
    """The conditions that traced code tested only in order to raise: ``assert c``, or ``if not c: raise``.

    Such a test is answered from the value it has while tracing, and the condition stays in the program: argument
    checks of ``torch.distributions``, asserts of the user. A test that chooses between two ways to go on is not
    answered, since the program would hold one of them only, unless it stands in a library (``branches``): whoever runs
    the program must then have another one for the other way, or know that the condition never changes.
    """

    def __init__(self, branches: bool) -> None:
        self._branches = branches
        self.branched = False
        self._conditions: list[tuple[Tensor, bool, bool]] = []  # the tensor, its truth, whether code branches on it
        self._known: list[bool] | None = None
        self.lines: list[str] = []

    def answer(self, tensor: Tensor, frame: FrameType) -> bool | None:
        """The truth of ``tensor``, which ``frame`` asks for, or ``None`` where that is no check."""
        file, number = frame.f_code.co_filename, frame.f_lineno
        line = _check_at(file, number)
        branch = line is None
        if line is None:
            if not self._branches or "site-packages" not in Path(file).parts:
                return None
            line, self.branched = f"{Path(file).name}:{number}: a branch of the library's", True
        if self._known is not None:
            truth = self._known.pop(0)
        else:
            with disable_proxy_modes_tracing():
                truth = bool(tensor.detach())
        self._conditions.append((tensor.detach(), truth, branch))
        if line not in self.lines:
            self.lines.append(line)
        return truth

    def require(self, tensor: Tensor, line: str) -> None:
        """Note a condition that an operation itself asks for: it holds while tracing, or eager would have failed."""
        if self._known is not None:
            self._known.pop(0)
        self._conditions.append((tensor.detach(), True, False))
        if line not in self.lines:
            self.lines.append(line)

    def replay(self) -> None:
        """From here on give the answers given so far, in their order: the tensors to come may have no values."""
        self._known, self._conditions = [truth for _, truth, _ in self._conditions], []

    def combined(self, only_branches: bool = False) -> tuple[Tensor, ...]:
        """One flag that tells whether every check passes; nothing where there were none. Call it while tracing."""
        flag: Tensor | None = None
        for tensor, truth, branch in self._conditions:
            if only_branches and not branch:
                continue
            condition = tensor.reshape(())
            condition = condition if condition.dtype == torch.bool else condition != 0
            condition = condition if truth else condition.logical_not()
            flag = condition if flag is None else flag.logical_and(condition)
        return () if flag is None else (flag,)


def may_go_on(assumptions: Iterable[str]) -> bool:
    """Whether code may go on where one of its checks comes out another way, as in ``assert a or b``.

    Argument checks of ``torch.distributions`` can but raise.
    """
    return any(not line.startswith("distribution.py:") for line in assumptions)


@functools.lru_cache(maxsize=4096)
def _check_at(filename: str, line: int) -> str | None:
    """The check at a source line in words, or ``None`` where the statement there does more than raise."""
    for node in _statements(filename):
        test = node.test
        if test.lineno <= line <= (test.end_lineno or test.lineno):
            text = " ".join(ast.unparse(test).split())
            return f"{Path(filename).name}:{line}: {text if len(text) <= 80 else text[:77] + '...'}"
    return None


@functools.lru_cache(maxsize=64)
def _statements(filename: str) -> tuple[ast.Assert | ast.If, ...]:
    """The statements of a file that test something only to raise."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return ()
    return tuple(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
        or (isinstance(node, ast.If) and not node.orelse and all(isinstance(s, ast.Raise) for s in node.body))
    )
