"""One update, traced and lowered: for one batch shape, one set of modes and one choice of plain arguments."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from graphrl.compiler.backends.eager import BACKEND
from graphrl.compiler.checks import CHECKED
from graphrl.compiler.entry import Entry
from graphrl.compiler.guards import LiveState, Modes, StateChanged, raise_index_error
from graphrl.compiler.lower import lower_with_fallback
from graphrl.compiler.lowering import lift_state, mark_mutated, module_slots, normalize
from graphrl.compiler.metrics import Metrics, MetricShape
from graphrl.compiler.optimizers import TracedOptimizers, record_optimizers
from graphrl.compiler.passes.guard_nonfinite import FINITE, guard_nonfinite
from graphrl.compiler.passes.lift_random import lift_random
from graphrl.compiler.passes.pipeline import run_passes
from graphrl.compiler.program import Port, Program
from graphrl.compiler.reachable import find_reachable
from graphrl.compiler.trace import refuse_untraceable
from graphrl.compiler.tracing import OF_AN_UPDATE, tracing
from graphrl.compiler.undo import Undo, kept_random_state
from graphrl.compiler.update_verify import verify_update
from graphrl.compiler.verify import verify_lowered
from graphrl.errors import KeyMissingError, NonFiniteError, SpecError, TraceError, did_you_mean
from graphrl.keys import Key, encode_key, normalize_key

__all__ = ["UpdateEntry"]

_INDEX = ("graphrl", "index")
_GRADIENT = ("graphrl", "gradient")
"""Key of the output that sums all gradients: finite where, short of an overflow, every one of them is."""


class UpdateEntry:
    """A step for batches like ``batch``; ``options`` are the plain arguments it was traced with."""

    def __init__(
        self,
        step: Callable[..., Metrics],
        batch: TensorDictBase,
        index: Tensor | None,
        options: Mapping[str, Any],
        *,
        backend: str,
        strict: bool,
        verify: bool,
        precision: str | None,
    ) -> None:
        start = time.perf_counter()
        self.step, self.options = step, dict(options)
        self.batch_size = batch.batch_size
        modules = find_reachable(step, nn.Module)
        refuse_untraceable(modules)
        self._modes = Modes([m for _, root in modules for m in root.modules()])
        self._traced_modes = self._modes.now()
        keys = [normalize_key(k) for k in batch.keys(True, True) if isinstance(batch.get(k), Tensor)]
        ports, tensors = _ports(batch, keys, index)
        self.optimizers, program = self._trace(keys, tensors, index is not None, modules, ports)
        exact = _drop_unread_inputs(guard_nonfinite(run_passes(program)))
        if precision is not None:
            program = _drop_unread_inputs(guard_nonfinite(run_passes(program, precision=precision)))
        else:
            program = exact
        lowered, name, refusals = lower_with_fallback(program, backend, strict)
        self.program, self._lowered = program, lowered
        self._keys = [p.key for p in program.inputs if p.key != _INDEX]
        self._takes_index = index is not None
        self._flags = [i for i, p in enumerate(program.outputs) if p.key in (CHECKED, FINITE)]
        self._signature = [(p.shape, p.dtype, p.device) for p in program.inputs]
        self._live = LiveState(program)
        parity = self._verify(exact, batch, index, name) if verify else None
        given = ", ".join([*(str(p) for p in program.inputs), *(f"{k}={v!r}" for k, v in options.items())])
        seconds = time.perf_counter() - start
        self.summary = Entry(program, name, refusals, seconds, f"first call with {given}", parity, self.run, False)

    # ---- tracing

    def _trace(
        self,
        keys: Sequence[Key],
        tensors: Sequence[Tensor],
        indexed: bool,
        modules: Sequence[tuple[str, nn.Module]],
        ports: tuple[Port, ...],
    ) -> tuple[TracedOptimizers, Program]:
        self._metrics = MetricShape()

        def run(*leaves: Tensor) -> tuple[Tensor, ...]:
            td = TensorDict({}, batch_size=self.batch_size)
            for key, leaf in zip(keys, leaves, strict=False):
                td.set(key, leaf)
            if indexed:
                td = td[leaves[-1]]
            return self._metrics.flatten(self.step(td, **self.options))

        grads_of: dict[int, Tensor] = {id(p): p for _, root in modules for p in root.parameters()}
        grads_of |= {id(t): t for _, t in find_reachable(self.step, Tensor) if t.is_leaf and t.requires_grad}
        optimizers = TracedOptimizers(found := _first_run(run, keys, tensors, grads_of.values()))
        grads_of |= {id(p): p for o in found for g in o.param_groups for p in g["params"]}
        self._parameters = list(grads_of.values())
        self._trained = [t.requires_grad for t in self._parameters]
        undo = Undo(grads_of.values())
        try:
            with torch.enable_grad(), tracing("the update", recheck=True, ways_out=OF_AN_UPDATE) as checks, undo:
                with optimizers.traceable() as gradients:

                    def run_checked(*leaves: Tensor) -> tuple[Tensor, ...]:
                        metrics, total, flag = run(*leaves), gradients.combined(), checks.combined()
                        self._more = [_GRADIENT] * len(total) + [CHECKED] * len(flag)
                        return (*metrics, *total, *flag)

                    traced = make_fx(run_checked)(*tensors)
            self._left_with_grad = [t for t in grads_of.values() if t.grad is not None]
        finally:
            undo.restore()
        known = {**optimizers.slots(), **module_slots(modules)}
        traced, slots = lift_state(traced, known)
        _refuse_shared_storage(slots)
        normal = normalize(traced, [*tensors, *(slot.read() for slot in slots)])
        state = mark_mutated(normal.graph, len(tensors), slots)
        outputs = self._metrics.ports(normal, self._more)
        program = Program(normal, ports, outputs, state, name="update", assumptions=tuple(checks.lines))
        return optimizers, lift_random(program)

    # ---- checking

    def _verify(self, exact: Program, batch: TensorDictBase, index: Tensor | None, backend: str) -> float:
        """The lowered update against the eager step itself, then against float64 on fresh inputs.

        ``exact``: the program before its products were rounded, of which every result is compared with the step's.
        """
        inputs = self.inputs_for(batch, index, self.options)
        assert inputs is not None
        if bad := self._nonfinite(self._eager(batch, index)):
            raise NonFiniteError(
                f"the step's own {', '.join(bad)} is NaN or infinite on the batch it is compiled for, and nothing was "
                "updated: compile on an example that is finite and not empty"
            )
        keys = self._metrics.keys
        eager = partial(self._eager, index=index)
        if exact is not self.program:
            verify_update(exact, BACKEND.lower(exact), f"{backend}, unrounded", inputs, keys, eager, batch)
        verify_update(self.program, self._lowered, backend, inputs, keys, eager, batch)
        with kept_random_state():
            return verify_lowered(self.program, self._lowered, backend, self.program.arguments(inputs))

    def _eager(self, batch: TensorDictBase, index: Tensor | None) -> list[Tensor]:
        """Metrics and written state of one eager step, which is undone again."""
        undo = Undo(slot.read() for slot in self.program.state if slot.kind == "parameter")
        try:
            with torch.enable_grad(), undo:
                for parameter in self._left_with_grad:  # a step that clears gradients first does not see these
                    parameter.grad = torch.ones_like(parameter)
                td = batch.copy() if index is None else batch[index]
                metrics = [t.clone() for t in MetricShape().flatten(self.step(td, **self.options))]
                return metrics + [slot.read().detach().clone() for slot in self.program.state if slot.mutated]
        finally:
            undo.restore()

    def stale(self) -> bool:
        """Whether the trace no longer describes the step: another hyperparameter, or replaced weights."""
        return (
            self.optimizers.hyperparameters_changed()
            or [t.requires_grad for t in self._parameters] != self._trained
            or self._modes.now() != self._traced_modes
            or not self._modes.same_modules()
        )

    # ---- running

    def inputs_for(
        self, batch: TensorDictBase, index: Tensor | None, options: Mapping[str, Any]
    ) -> list[Tensor] | None:
        """The program's inputs taken from the batch, or ``None`` when it was compiled for something else."""
        if (index is not None) != self._takes_index or batch.batch_size != self.batch_size:
            return None
        if options != self.options or self.stale():
            return None
        if any(type(value) is not type(self.options[name]) for name, value in options.items()):  # True == 1 == 1.0
            return None
        inputs = [batch.get(key, None) for key in self._keys]
        if index is not None:
            inputs.append(index)
        for i, (shape, dtype, device) in enumerate(self._signature):
            t = inputs[i]
            if t is None or t.shape != shape or t.dtype is not dtype or t.device != device:
                return None
            if not t.is_contiguous():
                inputs[i] = t.contiguous()
        return inputs

    def run(self, inputs: Sequence[Tensor], state: Sequence[Tensor]) -> tuple[Metrics, bool]:
        """Update once. Returns the metrics, and whether the update was made: no flag of the program was down."""
        with torch.no_grad():
            try:
                outputs = self._lowered([*inputs, *state, *[n.draw() for n in self.program.noise]])
            except RuntimeError as error:
                raise_index_error(error, "the update")
                raise
        down = [self.program.outputs[i].key for i in self._flags if not outputs[i]]
        if down:
            self._check_failed = CHECKED in down
        return self._metrics.rebuild(outputs[: len(self._metrics.keys)]), not down

    def live_state(self) -> list[Tensor]:
        """The weights, moments and learning rates to run with."""
        self.optimizers.follow_rates()
        if self.optimizers.states_replaced():
            self.optimizers.watch_states()
        try:
            with torch.no_grad():
                return self._live()
        except StateChanged as change:
            raise TraceError(f"{change} since this update was compiled: compile it again") from None

    def check_stop_key(self, key: Any) -> None:
        """Raise :class:`SpecError` unless the metric of that key is one number."""
        sizes = {k: p.shape for k, p in zip(self._metrics.keys, self.program.outputs, strict=False)}
        found = sizes.get(key)
        if found is None:
            raise SpecError(f"stop_key {key!r}: no such metric; there are {list(sizes)}.{did_you_mean(key, sizes)}")
        if math.prod(found) != 1:
            raise SpecError(f"stop_key {key!r} has shape {list(found)}: expected a metric that is one number")

    def is_nonfinite(self, batch: TensorDictBase, index: Tensor | None, metrics: Metrics) -> bool:
        """Whether a metric, or what the step reads of the batch, is not finite."""
        rows = batch if index is None else batch[index]
        seen = [rows.get(key) for key in self._keys] + ([] if metrics is None else list(MetricShape().flatten(metrics)))
        return any(t.is_floating_point() and not t.isfinite().all() for t in seen)

    def why_not_made(self, batch: TensorDictBase, index: Tensor | None, metrics: Metrics) -> str:
        """What kept an update from being made. A check that fails raises here, in the step's own words."""
        wrong = [] if metrics is None else self._nonfinite(MetricShape().flatten(metrics))
        names = {id(slot.read()): slot.name for slot in self.program.state}

        def look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if parameter.grad is not None and not parameter.grad.isfinite().all():
                    wrong.append(f"the gradient of {names.get(id(parameter), 'a parameter')}")

        handle = register_optimizer_step_pre_hook(look)
        try:
            self._eager(batch, index)
        finally:
            handle.remove()
        if not wrong and self._check_failed:
            raise TraceError(
                f"a check of the step, {' or '.join(self.program.assumptions)}, passes by another way than on the "
                "batch it was compiled for: test one tensor in it, (a | b).all() rather than a.all() or b.all()"
            )
        if not wrong:  # rounding decides, or the draws do, which this second run made anew
            return "a gradient is NaN or infinite; run again eagerly, none is"
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        return f"{', '.join(wrong[:4])}{more} is NaN or infinite"

    def _nonfinite(self, outputs: Sequence[Tensor]) -> list[str]:
        named = zip(self._metrics.keys, outputs, strict=False)
        return [encode_key(k) for k, t in named if t.is_floating_point() and not t.isfinite().all()]


def _first_run(
    run: Callable[..., Any], keys: Sequence[Key], tensors: Sequence[Tensor], grads_of: Iterable[Tensor]
) -> list[Optimizer]:
    """Run a step and undo it: creates lazy optimiser state and tells which optimisers there are."""
    undo = Undo(grads_of)
    with record_optimizers() as found:
        try:
            with torch.enable_grad(), undo:
                run(*tensors)
            if undo.replaced():
                raise TraceError("the step replaces a tensor's .data: write into it, with copy_, lerp_ or mul_")
        except ValueError as error:  # eager distributions refuse a NaN in their own words, with the whole tensor
            bad = [encode_key(k) for k, t in zip(keys, tensors, strict=False) if not t.isfinite().all()]
            if not bad:
                raise
            raise NonFiniteError(
                f"the step fails on this batch: {', '.join(bad)} holds NaN or infinity. Nothing was updated: compile "
                "on a finite example"
            ) from error
        except KeyError as error:
            wanted = re.search(r'key "(.+?)" not found in', str(error))
            if wanted is None or isinstance(error, KeyMissingError):
                raise
            hint = did_you_mean(wanted[1], map(encode_key, keys))
            raise KeyMissingError(f"the step reads {wanted[1]!r}, but the batch has {list(keys)}.{hint}") from error
        except TypeError as error:
            if "'closure'" not in str(error):
                raise
            name = str(error).split(".")[0]
            raise TraceError(
                f"{name} cannot be traced: its step calls the loss itself. Take its step eagerly"
            ) from error
        finally:
            undo.restore()
    return found


def _ports(batch: TensorDictBase, keys: Sequence[Key], index: Tensor | None) -> tuple[tuple[Port, ...], list[Tensor]]:
    tensors = [batch.get(k).detach().contiguous() for k in keys]
    ports = [Port.of(k, t) for k, t in zip(keys, tensors, strict=True)]
    if index is not None:
        if not isinstance(index, Tensor) or index.dtype != torch.int64 or index.dim() == 0 or not index.numel():
            what = f"{index.dtype} {list(index.shape)}" if isinstance(index, Tensor) else f"a {type(index).__name__}"
            raise SpecError(f"index is {what}: expected int64 row numbers in a tensor, at least one")
        tensors.append(index)
        ports.append(Port.of(_INDEX, index))
    if not keys:
        raise KeyMissingError("the batch has no tensors")
    return tuple(ports), tensors


def _drop_unread_inputs(program: Program) -> Program:
    """A program whose signature has only the batch entries that the update reads (the index always stays)."""
    graph = program.copy_graph()
    places = [n for n in graph.nodes if n.op == "placeholder"]
    kept = []
    for port, node in zip(program.inputs, places, strict=False):
        if node.users or port.key == _INDEX:
            kept.append(port)
        else:
            graph.erase_node(node)
    return program.with_graph(graph, inputs=tuple(kept))


def _refuse_shared_storage(slots: Sequence[Any]) -> None:
    seen: dict[int, str] = {}
    for slot in slots:
        pointer = slot.read().untyped_storage()._cdata
        if pointer in seen and slot.read().numel():
            raise TraceError(
                f"{slot.name} and {seen[pointer]} share memory; a program that writes one of them cannot keep them "
                "apart: clone one, or pass one tensor under one name"
            )
        seen[pointer] = slot.name
