"""The tracer: runs a keyed graph once under ``make_fx`` and returns the program it computed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from graphrl.compiler.checks import CHECKED, Checks
from graphrl.compiler.lowering import graph_slots, lift_state, mark_mutated, normalize
from graphrl.compiler.passes.lift_random import lift_random
from graphrl.compiler.program import Port, Program
from graphrl.compiler.reachable import modules_of
from graphrl.compiler.shapes import on_fakes, open_batch
from graphrl.compiler.tracing import tracing
from graphrl.compiler.undo import Undo
from graphrl.errors import KeyMissingError, SpecError, TraceError, did_you_mean
from graphrl.graph import KeyedGraph
from graphrl.keys import DISCARD, Key, normalize_keys
from graphrl.opaque_nodes import is_opaque

__all__ = ["JointProgram", "as_example", "common_leading", "missing_key", "refuse_untraceable", "trace", "trace_joint"]


def trace(
    graph: TensorDictModuleBase,
    example: TensorDictBase | dict[Key, Tensor],
    *,
    dynamic: bool = False,
    recheck: bool = False,
) -> Program:
    """Lower ``graph`` to one program for inputs shaped like ``example``.

    The graph runs once on the example and everything it changed is put back: weights, buffers, random generators.
    Weights stay live: the program reads them from the graph's modules at each call. The present modes are traced
    (train/eval flags, TensorDict interaction type, autocast). Random draws become inputs, see :class:`Noise`.
    Asserts on values are answered from the example and listed in ``program.assumptions``; with ``recheck`` the program
    tests them, and the argument checks of distributions, at each call: its last output then tells whether they hold.
    So is a branch in a library's code; without ``recheck`` it must be the same for all inputs, as one on bounds is.

    graph: a :class:`KeyedGraph` or any ``tensordict.nn`` module. example: holds ``graph.in_keys``.
    dynamic: leave the first batch dim open; the program then takes any size from 2.
    Raises :class:`KeyMissingError` for a missing key and :class:`TraceError` where the code cannot be lowered, such as
    Python control flow on a tensor's value.
    """
    example = as_example(example)
    signature = _Signature(graph, example, dynamic)
    with torch.no_grad(), tracing(type(graph).__name__, recheck=recheck, branches=True) as checks:
        signature.rehearse(checks)
        traced = signature.record(
            lambda *tensors: signature.run(*tensors, checks=checks, only_branches=not recheck), signature.tensors
        )
    if checks.branched and not recheck:
        signature.settle(traced, checks)
    slots = graph_slots(graph)
    traced, used = lift_state(traced, slots)
    tensors = [*signature.tensors, *(slot.read() for slot in used)]
    normal = normalize(traced, tensors, mode=signature.mode)
    state = mark_mutated(normal.graph, len(signature.tensors), used)
    outputs = signature.outputs(normal)
    program = Program(normal, signature.inputs, outputs, state, name=_name(graph), dynamic=dynamic)
    program = replace(program, assumptions=tuple(checks.lines), branched=checks.branched and recheck)
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
    slots = graph_slots(graph)
    parameters = {s.name: p for s in slots.values() if s.kind == "parameter" and (p := s.read()).requires_grad}
    with torch.enable_grad(), tracing(type(graph).__name__, recheck=True, branches=True) as checks:
        signature.rehearse(checks)
        with signature.unseen():
            trial = signature.run(*leaves)
    differentiable = tuple(i for i, t in enumerate(trial) if t.requires_grad)
    if not differentiable:
        return None
    cotangents = [torch.ones_like(trial[i], memory_format=torch.contiguous_format) for i in differentiable]
    targets: list[tuple[str, int | str]] = []

    def joint(*tensors: Tensor) -> tuple[Tensor, ...]:
        inner, ct = tensors[: len(leaves)], tensors[len(leaves) :]
        outputs = signature.run(*inner, checks=checks)
        wanted: list[tuple[tuple[str, int | str], Tensor]] = [
            (("input", i), t) for i, t in enumerate(inner) if t.requires_grad
        ]
        wanted += [(("state", name), p) for name, p in parameters.items()]
        grads = torch.autograd.grad([outputs[i] for i in differentiable], [t for _, t in wanted], ct, allow_unused=True)
        targets.extend(t for (t, _), g in zip(wanted, grads, strict=True) if g is not None)
        return (*(t.detach() for t in outputs), *(g for g in grads if g is not None))

    with torch.enable_grad(), tracing(type(graph).__name__, recheck=True, branches=True) as checks:
        signature.rehearse(checks)
        traced = signature.record(joint, [*leaves, *cotangents], parameters.values())
    traced, used = lift_state(traced, slots)
    normal = normalize(traced, [*leaves, *cotangents, *(slot.read() for slot in used)], mode=signature.mode)
    state = mark_mutated(normal.graph, len(leaves) + len(cotangents), used)
    ports = signature.outputs(normal)
    gradients = tuple(Port.of(("gradient", str(where)), _values(normal)[len(ports) + i])
                      for i, (_, where) in enumerate(targets))  # fmt: skip
    cotangent_ports = tuple(Port.of(("cotangent", str(i)), c) for i, c in zip(differentiable, cotangents, strict=True))
    inputs, outputs = (*signature.inputs, *cotangent_ports), (*ports, *gradients)
    program = Program(normal, inputs, outputs, state, name=_name(graph), dynamic=dynamic)
    program = replace(program, assumptions=tuple(checks.lines), branched=checks.branched)
    return JointProgram(lift_random(program), ports, differentiable, tuple(targets))


class _Signature:
    """The keys of a graph bound to an example: how to call it with plain tensors."""

    def __init__(self, graph: TensorDictModuleBase, example: TensorDictBase, dynamic: bool = False) -> None:
        refuse_untraceable(modules_of(graph))
        self.graph = graph
        self.batch_size = example.batch_size
        self.in_keys = normalize_keys(list(graph.in_keys))
        self.out_keys = [k for k in normalize_keys(list(graph.out_keys)) if k != DISCARD]
        self.tensors = [_leaf(example, key, graph) for key in self.in_keys]
        self.inputs = tuple(Port.of(k, t) for k, t in zip(self.in_keys, self.tensors, strict=True))
        self.mode: FakeTensorMode | None = None
        self._real = self.tensors, self.batch_size
        if dynamic:
            self.mode, self.tensors = open_batch(self.tensors)
            self.batch_size = self.tensors[0].shape[: len(self.batch_size)]

    def rehearse(self, checks: Checks) -> None:
        """Learn how checks turn out from the example's real values: where a dim is open, tracing sees none."""
        if self.mode is None:
            return
        (tensors, batch_size), opened = self._real, self.batch_size
        with Undo() as undo:
            self.batch_size = batch_size
            self.run(*tensors)
        self.batch_size = opened
        undo.restore()
        if checks.branched:
            raise TraceError(f"it branches on values: {checks.lines[-1]}")
        checks.replay()

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

    def run(self, *tensors: Tensor, checks: Checks | None = None, only_branches: bool = False) -> tuple[Tensor, ...]:
        """The outputs and, given ``checks``, the flag that tells whether those made on the way hold."""
        td = TensorDict({}, batch_size=self.batch_size)
        for key, tensor in zip(self.in_keys, tensors, strict=True):
            td.set(key, tensor)
        result = self.graph(td)
        values = [result.get(key) for key in self.out_keys]
        for key, value in zip(self.out_keys, values, strict=True):
            if not isinstance(value, Tensor):
                raise TraceError(f"out_key {key!r} is a {type(value).__name__}: only tensors can leave a program")
        flag = checks.combined(only_branches) if checks is not None else ()
        self.keys = [*self.out_keys, *([CHECKED] * len(flag))]
        return (*values, *flag)

    def settle(self, traced: fx.GraphModule, checks: Checks) -> None:
        """Take the flag of the branches out of ``traced``: they go the same way for all inputs, or it is an error."""
        *_, output = traced.graph.nodes
        *values, flag = output.args[0]
        behind = {flag}  # what the flag is computed from
        for node in reversed(traced.graph.nodes):
            behind.update(node.all_input_nodes if node in behind else ())
        random = torch.Tag.nondeterministic_seeded
        if any(node.op == "placeholder" or random in getattr(node.target, "tags", ()) for node in behind):
            lines = ", ".join(line for line in checks.lines if line.endswith("a branch of the library's"))
            raise TraceError(
                f"{type(self.graph).__name__} branches on values of its inputs ({lines}): one program goes one way "
                "only. grl.compile(graph) has a program for each, and calls a node marked grl.opaque(...) between two"
            )
        output.args = (values,)
        for node in reversed(list(traced.graph.nodes)):
            if node in behind and not node.users:
                traced.graph.erase_node(node)
        traced.recompile()
        self.keys = self.out_keys

    def outputs(self, traced: fx.GraphModule) -> tuple[Port, ...]:
        return tuple(Port.of(k, v) for k, v in zip(self.keys, _values(traced), strict=False))


def refuse_untraceable(modules: Sequence[tuple[str, nn.Module]]) -> None:
    """Raise :class:`TraceError` for an opaque node, or one whose gradients are reduced, below the named modules."""
    for prefix, root in modules:
        for name, module in root.named_modules():
            if isinstance(module, DistributedDataParallel):  # its forward prepares the reduction of each backward
                raise TraceError(
                    f"{'.'.join(filter(None, (prefix, name))) or 'the graph'} is DistributedDataParallel, which works "
                    "around programs, not in them: wrap what is compiled, DistributedDataParallel(grl.compile(graph)), "
                    "and run backward and the optimiser eagerly"
                )
            if is_opaque(module):
                raise TraceError(
                    f"{'.'.join(filter(None, (prefix, name))) or type(root).__name__} is opaque and cannot be part of "
                    "one program: grl.compile(graph) runs it between two programs, graph.select(...) cuts it off"
                )


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
    why = getattr(graph, "why_needed", lambda key: "")(key)
    return KeyMissingError(
        f"{type(graph).__name__} reads {key!r}, but the {called} has {present}.{did_you_mean(key, present)}{why}"
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
