"""The state in which user code is traced: checks answered, tracer errors told in the user's terms."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import tensordict
import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.overrides import TorchFunctionMode

import graphrl
from graphrl.compiler.checks import Checks
from graphrl.errors import TraceError

__all__ = ["OF_AN_UPDATE", "tracing"]

_OF_A_GRAPH = (
    "Use torch.where there, or mark the graph's node as grl.opaque(...): it then stays a plain call between two "
    "programs"
)
OF_AN_UPDATE = (
    "Use torch.where there, return the tensor itself as a metric, or decide outside: plain options choose between "
    "programs, update(batch, update_actor=True)"
)
"""Ways out of code that cannot be traced, for the two things that are."""


@contextlib.contextmanager
def tracing(what: str, *, recheck: bool, branches: bool = False, ways_out: str = _OF_A_GRAPH) -> Iterator[Checks]:
    """The state in which code is traced; yields the checks it makes. Tracer errors become :class:`TraceError`.

    Distributions check their arguments only where the program will check them again (``recheck``). ``branches``: a
    library may branch on values, see :class:`Checks`.
    """
    validate = torch.distributions.Distribution._validate_args
    mkldnn = torch._C._get_mkldnn_enabled()
    torch.distributions.Distribution.set_default_validate_args(validate and recheck)
    try:
        torch._C._set_mkldnn_enabled(False)  # an LSTM must show its products, not one call of a CPU library
        with _TraceableCalls(branches) as calls, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*treespec.*")
            yield calls.checks
    except Exception as error:
        shape = next((c for c in _causes(error) if isinstance(c, _ShapeFromValues)), None)
        if shape is not None:
            raise TraceError(
                f"{_where(what, error)} makes a tensor whose shape depends on values ({shape}): a program has fixed "
                f"shapes. Keep every entry and use torch.where or a product with the mask. {ways_out}"
            ) from error
        if any(sign in str(cause) for cause in _causes(error) for sign in _VALUE_SIGNS):
            raise TraceError(
                f"{_where(what, error)} needs a tensor's value while it is traced: a program cannot branch on values "
                f"with Python's if, bool(), float() or .item(). {ways_out}"
            ) from error
        if any("HigherOrderOperator" in str(cause) for cause in _causes(error)):
            raise TraceError(
                f"{_where(what, error)} calls torch.cond, or another operator that takes functions: a program is one "
                f"flat list of operations. {ways_out}"
            ) from error
        raise
    finally:
        torch.distributions.Distribution.set_default_validate_args(validate)
        torch._C._set_mkldnn_enabled(mkldnn)


class _ShapeFromValues(Exception):
    """An operation whose result has as many entries as its input's values say."""


_SHAPE_FROM_VALUES = ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount")

_VALUE_SIGNS = (
    "get value out of a tracing tensor",
    "data-dependent",
    "Cannot access data pointer of Tensor",
)


class _TraceableCalls(TorchFunctionMode):
    """Answers checks; refuses operations whose result's shape depends on values, while the user's line is known.

    Lets optimiser arithmetic take 0-d tensors where ATen wants numbers: ``p.add_(g, alpha=lr)``, ``lr`` a tensor. Eager
    would call ``.item()`` there, which would freeze the learning rate into the program.
    """

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.checks = Checks(branches)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__bool__" and (answer := self.checks.answer(args[0], _asking())) is not None:
            return answer
        if name == "_is_all_true":  # what distributions ask; an operation of no backend
            return args[0].all()
        if name == "one_hot":  # it looks at its values
            return self._one_hot(*args, **kwargs)
        if name in _SHAPE_FROM_VALUES or (name == "where" and len(args) + len(kwargs) == 1):
            raise _ShapeFromValues(name)
        if name == "__getitem__" and any(_is_mask(i) for i in (args[1] if isinstance(args[1], tuple) else args[1:])):
            raise _ShapeFromValues("indexing with a mask")
        if isinstance(kwargs.get("alpha"), Tensor) and name in ("add", "add_", "sub", "sub_"):
            args = (args[0], args[1] * kwargs.pop("alpha"))
        elif isinstance(kwargs.get("value"), Tensor) and name in ("addcdiv", "addcdiv_", "addcmul", "addcmul_"):
            update = (args[1] / args[2] if "div" in name else args[1] * args[2]) * kwargs.pop("value")
            func = Tensor.add_ if name.endswith("_") else Tensor.add
            args = (args[0], update)
        return func(*args, **kwargs)

    def _one_hot(self, tensor: Tensor, num_classes: int = -1) -> Tensor:
        if num_classes <= 0:
            raise _ShapeFromValues("one_hot without num_classes")
        self.checks.require(
            ((tensor >= 0) & (tensor < num_classes)).all(), f"one_hot: classes are 0 to {num_classes - 1}"
        )
        return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).to(torch.int64)


def _asking() -> FrameType:
    """The frame that asks for a tensor's truth: behind this mode's own frame and those of torch's modes."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _causes(error: BaseException) -> list[BaseException]:
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    return chain


def _where(what: str, error: BaseException) -> str:
    """The innermost keyed node that was running, its keys, and the user's source line."""
    frames = [frame for cause in _causes(error) for frame, _ in traceback.walk_tb(cause.__traceback__)]
    nodes = [frame.f_locals.get("self") for frame in frames]
    node = next((n for n in reversed(nodes) if isinstance(n, TensorDictModuleBase)), None)
    text = what
    if node is not None:
        inner = getattr(node, "module", node)
        name = getattr(inner, "__name__", type(inner).__name__)
        text = f"node {name} ({list(node.in_keys)} -> {list(node.out_keys)}) of {what}"
    return f"{text}, at {_user_line(error)},"


def _user_line(error: BaseException) -> str:
    """The innermost source line that is in neither torch nor graphrl."""
    for cause in reversed(_causes(error)):
        lines = [
            f"{frame.filename}:{frame.lineno}"
            for frame in traceback.extract_tb(cause.__traceback__)
            if not any(part in frame.filename for part in _NOT_USER) and frame.filename[0] != "<"
        ]
        if lines:
            return lines[-1]
    return "an unknown line"


_NOT_USER = (
    *(f"{Path(str(module.__file__)).parent}{os.sep}" for module in (torch, tensordict, graphrl)),
    f"{Path(__file__).parent}{os.sep}",
)
