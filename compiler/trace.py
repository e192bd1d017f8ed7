"""The tracer: runs a keyed graph once under ``make_fx`` and returns the program it computed."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensordict
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import graphrl
from graphrl.compiler.lowering import lift_state, mark_mutated, module_slots, normalize
from graphrl.compiler.passes.lift_random import lift_random
from graphrl.compiler.program import Port, Program
from graphrl.compiler.shapes import on_fakes, open_batch
from graphrl.compiler.undo import Undo
from graphrl.errors import KeyMissingError, SpecError, TraceError, did_you_mean
from graphrl.graph import KeyedGraph
from graphrl.keys import DISCARD, Key, normalize_keys

__all__ = ["JointProgram", "as_example", "common_leading", "missing_key", "trace", "trace_joint"]


def trace(
    graph: TensorDictModuleBase, example: TensorDictBase | dict[Key, Tensor], *, dynamic: bool = False
) -> Program:
    """Lower ``graph`` to one program for inputs shaped like ``example``.

    The graph runs once on the example and everything it changed is put back: weights, buffers, random generators.
    Weights stay live: the program reads them from the graph's modules at each call. The present modes are traced
    (train/eval flags, TensorDict interaction type, autocast). Random draws become inputs, see :class:`Noise`.

    graph: a :class:`KeyedGraph` or any ``tensordict.nn`` module. example: holds ``graph.in_keys``.
    dynamic: leave the first batch dim open; the program then takes any size from 2.
    Raises :class:`KeyMissingError` for a missing key and :class:`TraceError` where the code cannot be lowered, such as
    Python control flow on a tensor's value.
    """
    example = as_example(example)
    signature = _Signature(graph, example, dynamic)
    with torch.no_grad(), tracing(type(graph).__name__):
        traced = signature.record(signature.run, signature.tensors)
    slots = module_slots([("", graph)])
    traced, used = lift_state(traced, slots)
    tensors = [*signature.tensors, *(slot.read() for slot in used)]
    normal = normalize(traced, tensors, mode=signature.mode)
    state = mark_mutated(normal.graph, len(signature.tensors), used)
    outputs = signature.outputs(normal)
    program = Program(normal, signature.inputs, outputs, state, name=_name(graph), dynamic=dynamic)
    return lift_random(program)


@dataclass(frozen=True)
class JointProgram:
    """A program whose inputs are (inputs, cotangents of outputs) and whose outputs are (outputs, gradients).

    ``differentiable``: positions of the outputs that carry gradient. ``targets``: where each gradient goes, as
    positions among the inputs (``("input", i)``) or the state (``("state", name)``).
    """

    program: Program
    outputs: tuple[Port, ...]
    differentiable: tuple[int, ...]
    targets: tuple[tuple[str, int | str], ...]


def trace_joint(
    graph: TensorDictModuleBase,
    example: TensorDictBase | dict[Key, Tensor],
    inputs_need_grad: Sequence[bool],
    *,
    dynamic: bool = False,
) -> JointProgram | None:
    """Trace ``graph`` with its gradients: autograd itself runs inside the trace, so detach, no_grad and custom
    functions count as they do in eager. ``None`` when no output carries gradient."""
    example = as_example(example)
    signature = _Signature(graph, example, dynamic)
    leaves = [
        t.detach().requires_grad_() if need else t.detach()
        for t, need in zip(signature.tensors, inputs_need_grad, strict=True)
    ]
    parameters = {name: p for name, p in graph.named_parameters() if p.requires_grad}
    with torch.enable_grad(), tracing(type(graph).__name__), signature.unseen():
        trial = signature.run(*leaves)
    differentiable = tuple(i for i, t in enumerate(trial) if t.requires_grad)
    if not differentiable:
        return None
    cotangents = [torch.ones_like(trial[i], memory_format=torch.contiguous_format) for i in differentiable]
    targets: list[tuple[str, int | str]] = []

    def joint(*tensors: Tensor) -> tuple[Tensor, ...]:
        inner, ct = tensors[: len(leaves)], tensors[len(leaves) :]
        outputs = signature.run(*inner)
        wanted: list[tuple[tuple[str, int | str], Tensor]] = [
            (("input", i), t) for i, t in enumerate(inner) if t.requires_grad
        ]
        wanted += [(("state", name), p) for name, p in parameters.items()]
        grads = torch.autograd.grad([outputs[i] for i in differentiable], [t for _, t in wanted], ct, allow_unused=True)
        targets.extend(t for (t, _), g in zip(wanted, grads, strict=True) if g is not None)
        return (*(t.detach() for t in outputs), *(g for g in grads if g is not None))

    with torch.enable_grad(), tracing(type(graph).__name__):
        traced = signature.record(joint, [*leaves, *cotangents], parameters.values())
    traced, used = lift_state(traced, module_slots([("", graph)]))
    normal = normalize(traced, [*leaves, *cotangents, *(slot.read() for slot in used)], mode=signature.mode)
    state = mark_mutated(normal.graph, len(leaves) + len(cotangents), used)
    ports = signature.outputs(normal)
    gradients = tuple(Port.of(("gradient", str(where)), _values(normal)[len(ports) + i])
                      for i, (_, where) in enumerate(targets))  # fmt: skip
    cotangent_ports = tuple(Port.of(("cotangent", str(i)), c) for i, c in zip(differentiable, cotangents, strict=True))
    inputs = (*signature.inputs, *cotangent_ports)
    program = Program(normal, inputs, (*ports, *gradients), state, name=_name(graph), dynamic=dynamic)
    return JointProgram(lift_random(program), ports, differentiable, tuple(targets))


class _Signature:
    """The keys of a graph bound to an example: how to call it with plain tensors."""

    def __init__(self, graph: TensorDictModuleBase, example: TensorDictBase, dynamic: bool = False) -> None:
        self.graph = graph
        self.batch_size = example.batch_size
        self.in_keys = normalize_keys(list(graph.in_keys))
        self.out_keys = [k for k in normalize_keys(list(graph.out_keys)) if k != DISCARD]
        self.tensors = [_leaf(example, key, graph) for key in self.in_keys]
        self.inputs = tuple(Port.of(k, t) for k, t in zip(self.in_keys, self.tensors, strict=True))
        self.mode: FakeTensorMode | None = None
        if dynamic:
            self.mode, self.tensors = open_batch(self.tensors)
            self.batch_size = self.tensors[0].shape[: len(self.batch_size)]

    @contextlib.contextmanager
    def unseen(self, grads_of: Iterable[Tensor] = ()) -> Iterator[None]:
        """Where code may run and leave no trace: what it changes is put back."""
        with Undo(grads_of) as undo, on_fakes(self.mode):
            yield
        undo.restore()

    def record(self, run: Any, tensors: Sequence[Tensor], grads_of: Iterable[Tensor] = ()) -> fx.GraphModule:
        """The operations of ``run``."""
        with self.unseen(grads_of):
            return make_fx(run)(*tensors)

    def run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        td = TensorDict({}, batch_size=self.batch_size)
        for key, tensor in zip(self.in_keys, tensors, strict=True):
            td.set(key, tensor)
        result = self.graph(td)
        values = [result.get(key) for key in self.out_keys]
        for key, value in zip(self.out_keys, values, strict=True):
            if not isinstance(value, Tensor):
                raise TraceError(f"out_key {key!r} is a {type(value).__name__}: only tensors can leave a program")
        return tuple(values)

    def outputs(self, traced: fx.GraphModule) -> tuple[Port, ...]:
        return tuple(Port.of(k, v) for k, v in zip(self.out_keys, _values(traced), strict=False))


def _values(traced: fx.GraphModule) -> list[Tensor]:
    """The (fake) values of a traced module's outputs."""
    (output,) = (n for n in traced.graph.nodes if n.op == "output")
    return [n.meta["val"] for n in output.args[0]]


def as_example(example: Any) -> TensorDictBase:
    """A TensorDict from a TensorDict or a dictionary of tensors (batch size: their common leading dims)."""
    if isinstance(example, TensorDictBase):
        return example
    if isinstance(example, dict):
        tensors = [t for t in tree_leaves(example) if isinstance(t, Tensor)]
        return TensorDict(example, batch_size=common_leading(tensors))
    raise SpecError(f"the example is a {type(example).__name__}: expected a TensorDict or a dict of tensors")


def common_leading(tensors: Sequence[Tensor]) -> list[int]:
    """The leading dims all tensors share; a feature dim is kept from each."""
    sizes: list[int] = []
    for dims in zip(*(t.shape[:-1] if t.dim() > 1 else t.shape[:0] for t in tensors), strict=False):
        if len(set(dims)) != 1:
            break
        sizes.append(dims[0])
    return sizes


def missing_key(graph: TensorDictModuleBase, key: Key, found: TensorDictBase, called: str) -> KeyMissingError:
    """The error for a TensorDict, ``called`` an example or a batch, that lacks a key the graph reads."""
    present = list(found.keys(True, True))
    return KeyMissingError(
        f"{type(graph).__name__} reads {key!r}, but the {called} has {present}.{did_you_mean(key, present)}"
    )


def _leaf(example: TensorDictBase, key: Key, graph: TensorDictModuleBase) -> Tensor:
    value = example.get(key, None)
    if value is None:
        raise missing_key(graph, key, example, "example")
    if not isinstance(value, Tensor):
        raise SpecError(f"{key!r} is a {type(value).__name__} in the example: a program takes tensors; name its leaves")
    return value.detach()


def _name(graph: Any) -> str:
    name = type(graph).__name__
    return (
        "program"
        if type(graph) is KeyedGraph
        else "".join("_" + c.lower() if c.isupper() else c for c in name).strip("_")
    )


class _ShapeFromValues(Exception):
    """An operation whose result has as many entries as its input's values say."""


_SHAPE_FROM_VALUES = ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount")


class _TraceableCalls(TorchFunctionMode):
    """Refuses operations whose result's shape depends on values, while the user's line is still known.

    Lets optimiser arithmetic take 0-d tensors where ATen wants numbers: ``p.add_(g, alpha=lr)``, ``lr`` a tensor. Eager
    would call ``.item()`` there, which would freeze the learning rate into the program.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
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


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


@contextlib.contextmanager
def tracing(what: str) -> Iterator[None]:
    """The state in which code is traced: distribution checks off, tracer errors turned into :class:`TraceError`."""
    validate = torch.distributions.Distribution._validate_args
    mkldnn = torch._C._get_mkldnn_enabled()
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        torch._C._set_mkldnn_enabled(False)  # an LSTM must show its products, not one call of a CPU library
        with _TraceableCalls(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*treespec.*")
            yield
    except _ShapeFromValues as error:
        raise TraceError(
            f"{what} makes a tensor whose shape depends on values ({error}), at {_user_line(error)}: a program has "
            "fixed shapes. Keep every entry and use torch.where, or multiply by the mask"
        ) from error
    except Exception as error:
        if any(sign in str(cause) for cause in _causes(error) for sign in _VALUE_SIGNS):
            raise TraceError(
                f"{what} needs a tensor's value while it is traced, at {_user_line(error)}: a program cannot branch on "
                "values. Use torch.where or torch.cond there instead of Python's if, bool(), float() or .item()"
            ) from error
        raise
    finally:
        torch.distributions.Distribution.set_default_validate_args(validate)
        torch._C._set_mkldnn_enabled(mkldnn)


_VALUE_SIGNS = (
    "get value out of a tracing tensor",
    "data-dependent",
    "Cannot access data pointer of Tensor",
)


def _causes(error: BaseException) -> list[BaseException]:
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    return chain


def _user_line(error: BaseException) -> str:
    """The innermost source line that is in neither torch nor graphrl."""
    found = "an unknown line"
    for cause in reversed(_causes(error)):
        for frame in traceback.extract_tb(cause.__traceback__):
            if not any(part in frame.filename for part in _NOT_USER) and frame.filename[0] != "<":
                found = f"{frame.filename}:{frame.lineno}"
        if found != "an unknown line":
            return f"{found}"
    return found


_NOT_USER = tuple(str(Path(str(m.__file__)).parent) for m in (torch, tensordict, graphrl)) + (
    str(Path(__file__).parent),
)
