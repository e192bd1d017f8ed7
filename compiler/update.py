"""A whole training update as one program: losses, gradients, clipping, optimiser and target updates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from graphrl.compiler.compiled import Entry
from graphrl.compiler.guards import LiveState, Modes, StateChanged
from graphrl.compiler.lower import lower_with_fallback
from graphrl.compiler.lowering import lift_state, mark_mutated, module_slots, normalize
from graphrl.compiler.optimizers import TracedOptimizers, record_optimizers
from graphrl.compiler.passes.guard_nonfinite import FINITE, guard_nonfinite
from graphrl.compiler.passes.lift_random import lift_random
from graphrl.compiler.passes.lower_precision import check_precision
from graphrl.compiler.passes.pipeline import run_passes
from graphrl.compiler.program import Port, Program
from graphrl.compiler.reachable import find_reachable
from graphrl.compiler.trace import tracing
from graphrl.compiler.undo import Undo, kept_random_state
from graphrl.compiler.verify import product_rounding, verify_lowered
from graphrl.errors import KeyMissingError, NonFiniteError, ParityError, SpecError, TraceError
from graphrl.keys import Key, encode_key, normalize_key
from graphrl.progress import step_line

__all__ = ["CompiledUpdate", "compile_update"]

Metrics = Any


def compile_update(
    step: Callable[[TensorDictBase], Metrics],
    example: TensorDictBase | None = None,
    *,
    backend: str = "inductor",
    strict: bool = False,
    verify: bool = True,
    precision: str | None = None,
) -> CompiledUpdate:
    """Turn an eager training step into one compiled program.

    step: ``step(batch) -> metrics``. Any eager code: losses, ``backward()``, ``clip_grad_norm_``, ``torch.optim``
    steps, soft target updates. ``metrics`` is a dictionary or TensorDict of tensors, or ``None``.
    example: a batch to compile for now; without it the first call compiles.
    precision: ``"bf16"`` multiplies matrices in bfloat16; weights, losses and the optimiser stay float32.

        update = grl.compile_update(step)
        metrics = update(batch)            # the whole batch
        metrics = update(batch, index)     # rows batch[index], gathered inside the program; index: int64 [n]

    Parameters, buffers and optimiser state stay the real tensors and are written in place, so ``state_dict``,
    checkpoints and ``lr`` schedules go on working. Compiling runs the step a few times and puts everything back;
    Python values the step reads (a coefficient, ``dropout.p``) are read once, when it is compiled, and its Python side
    effects (counters, schedulers) are no part of the program: keep them outside, or use tensors. A step must clear
    gradients; ``.grad`` is left as it was. After putting another optimiser or module in place of one, compile again.
    A non-finite metric raises :class:`NonFiniteError` and leaves parameters and optimiser state as before the call.
    Raises :class:`TraceError` for code that branches on tensor values.
    """
    update = CompiledUpdate(step, backend=backend, strict=strict, verify=verify, precision=precision)
    if example is not None:
        update.warm_up(example)
    return update


class CompiledUpdate:
    """The compiled form of an update function; see :func:`compile_update`."""

    def __init__(
        self, step: Callable[..., Metrics], *, backend: str, strict: bool, verify: bool, precision: str | None
    ) -> None:
        self.step, self.backend, self.strict, self.verify = step, backend, strict, verify
        self.precision = check_precision(precision)
        self.calls = 0
        self.retraces: list[str] = []
        self._entries: list[_UpdateEntry] = []
        self._last: _UpdateEntry | None = None

    def __call__(self, batch: TensorDictBase, index: Tensor | None = None) -> Metrics:
        entry = self._last
        inputs = None if entry is None else entry.inputs_for(batch, index)
        if entry is None or inputs is None:
            entry, inputs = self._select(batch, index)
            self._last = entry
        self.calls += 1
        return entry.run(inputs, self.calls)

    def warm_up(self, batch: TensorDictBase, index: Tensor | None = None) -> CompiledUpdate:
        """Compile for batches like ``batch`` (and indices like ``index``) without updating anything."""
        self._last, _ = self._select(batch, index)
        return self

    def entries(self) -> list[Entry]:
        """The programs compiled so far, in order."""
        return [entry.summary for entry in self._entries]

    def _select(self, batch: TensorDictBase, index: Tensor | None) -> tuple[_UpdateEntry, list[Tensor]]:
        if not isinstance(batch, TensorDictBase):
            raise SpecError(f"the batch is a {type(batch).__name__}: expected a TensorDict")
        for entry in list(self._entries):
            if entry.stale():
                self._entries.remove(entry)
                self.retraces.append("a hyperparameter, a mode or a weight was replaced")
            elif (inputs := entry.inputs_for(batch, index)) is not None:
                return entry, inputs
        with step_line(f"compile update with {self.backend}"), kept_random_state():
            entry = _UpdateEntry(self, batch, index)
        if self._entries:
            self.retraces.append(entry.summary.reason)
        self._entries.append(entry)
        inputs = entry.inputs_for(batch, index)
        assert inputs is not None  # it was just compiled for them
        return entry, inputs


class _UpdateEntry:
    """One traced and lowered update, for one batch shape and one set of modes."""

    def __init__(self, owner: CompiledUpdate, batch: TensorDictBase, index: Tensor | None) -> None:
        start = time.perf_counter()
        self.step = owner.step
        self.batch_size = batch.batch_size
        modules = find_reachable(owner.step, nn.Module)
        self._modes = Modes([m for _, root in modules for m in root.modules()])
        self._traced_modes = self._modes.now()
        keys = [normalize_key(k) for k in batch.keys(True, True) if isinstance(batch.get(k), Tensor)]
        ports, tensors = _ports(batch, keys, index)
        self.optimizers, program, self._metrics = self._trace(keys, tensors, index is not None, modules, ports)
        program = guard_nonfinite(run_passes(program, precision=owner.precision))
        program = _drop_unread_inputs(program)
        lowered, name, refusals = lower_with_fallback(program, owner.backend, owner.strict)
        self.program, self._lowered = program, lowered
        self._keys = [p.key for p in program.inputs if p.key != _INDEX]
        self._takes_index = index is not None
        self._guarded = program.outputs[-1:] != () and program.outputs[-1].key == FINITE
        self._signature = [(p.shape, p.dtype, p.device) for p in program.inputs]
        self._live = LiveState(program)
        parity = self._verify(batch, index, name) if owner.verify else None
        given = ", ".join(str(p) for p in program.inputs)
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
    ) -> tuple[TracedOptimizers, Program, _MetricShape]:
        shape = _MetricShape()

        def run(*leaves: Tensor) -> tuple[Tensor, ...]:
            td = TensorDict({}, batch_size=self.batch_size)
            for key, leaf in zip(keys, leaves, strict=False):
                td.set(key, leaf)
            if indexed:
                td = td[leaves[-1]]
            return shape.flatten(self.step(td))

        grads_of: dict[int, Tensor] = {id(p): p for _, root in modules for p in root.parameters()}
        grads_of |= {id(t): t for _, t in find_reachable(self.step, Tensor) if t.is_leaf and t.requires_grad}
        undo = Undo(grads_of.values())
        with record_optimizers() as found:
            try:
                with torch.enable_grad(), undo:
                    run(*tensors)  # creates lazy optimiser state and tells which optimisers there are
                if undo.replaced():
                    raise TraceError(
                        "the step replaces a tensor's .data by another: write into it, with copy_, lerp_ or mul_"
                    )
            except ValueError as error:  # eager distributions refuse a NaN in their own words, with the whole tensor
                bad = [encode_key(k) for k, t in zip(keys, tensors, strict=False) if not t.isfinite().all()]
                if not bad:
                    raise
                raise NonFiniteError(f"the step fails on this batch: {', '.join(bad)} holds NaN or infinity") from error
            finally:
                undo.restore()
        optimizers = TracedOptimizers(found)
        grads_of |= {id(p): p for o in found for g in o.param_groups for p in g["params"]}
        self._parameters = list(grads_of.values())
        self._trained = [t.requires_grad for t in self._parameters]
        undo = Undo(grads_of.values())
        try:
            with torch.enable_grad(), optimizers.traceable(), tracing("the update"), undo:
                traced = make_fx(run)(*tensors)
            self._left_with_grad = [t for t in grads_of.values() if t.grad is not None]
        finally:
            undo.restore()
        known = {**optimizers.slots(), **module_slots(modules)}
        traced, slots = lift_state(traced, known)
        _refuse_shared_storage(slots)
        normal = normalize(traced, [*tensors, *(slot.read() for slot in slots)])
        state = mark_mutated(normal.graph, len(tensors), slots)
        outputs = shape.ports(normal)
        return optimizers, lift_random(Program(normal, ports, outputs, state, name="update")), shape

    # ---- checking

    def _verify(self, batch: TensorDictBase, index: Tensor | None, backend: str) -> float:
        """The lowered update against the eager step itself, then against float64 on fresh inputs."""
        inputs = self.inputs_for(batch, index)
        assert inputs is not None
        rng = torch.get_rng_state()
        arguments = self.program.arguments(inputs)
        first = len(inputs)
        clones = [t.detach().clone() for t in arguments]
        found = list(self._lowered(list(clones)))[: len(self._metrics.keys)]
        torch.set_rng_state(rng)
        expected = self._eager(batch, index)
        self._refuse_nonfinite(expected, call=1)
        mutated = [i for i, slot in enumerate(self.program.state) if slot.mutated]
        names = [repr(key) for key in self._metrics.keys] + [self.program.state[i].name for i in mutated]
        found += [clones[first + i] for i in mutated]
        rounding = product_rounding(self.program)

        def distance(a: Tensor, b: Tensor) -> float:
            return _distance(a, b, rounding)

        wrong = [n for n, a, b in zip(names, found, expected, strict=True) if not distance(a, b) <= 1]
        if wrong:
            torch.set_rng_state(rng)
            again = self._eager(batch, index)  # a step that differs from itself depends on more than its batch
            torch.set_rng_state(rng)
            shaken = self._eager(_shaken(batch, rounding), index)  # how far rounding alone moves the step's own results
            runs = zip(names, found, expected, again, shaken, strict=True)
            wrong = [
                name
                for name, got, want, same, moved in runs
                if not distance(same, want) <= 1 or not distance(got, want) <= max(1.0, 10 * distance(moved, want))
            ]
        if wrong:
            raise ParityError(
                f"the compiled update ({backend}) and the eager step disagree on {', '.join(wrong[:3])}. Does the step "
                "depend on Python state that changes from call to call, or on gradients left by the call before (is "
                "zero_grad missing)?"
            )
        return verify_lowered(self.program, self._lowered, backend, arguments)

    def _eager(self, batch: TensorDictBase, index: Tensor | None) -> list[Tensor]:
        """Metrics and written state of one eager step, which is undone again."""
        undo = Undo(slot.read() for slot in self.program.state if slot.kind == "parameter")
        try:
            with torch.enable_grad(), undo:
                for parameter in self._left_with_grad:  # a step that clears gradients first does not see these
                    parameter.grad = torch.ones_like(parameter)
                td = batch.copy() if index is None else batch[index]
                metrics = [t.clone() for t in _MetricShape().flatten(self.step(td))]
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

    def _refuse_nonfinite(self, outputs: Sequence[Tensor], call: int) -> None:
        named = zip(self.program.outputs, outputs, strict=False)
        bad = [encode_key(p.key) for p, t in named if t.is_floating_point() and not t.isfinite().all()]
        if bad:
            raise NonFiniteError(
                f"update {call}: {', '.join(bad)} is NaN or infinite. Parameters and optimiser state are as before "
                "this call. Check the batch for NaN, and the learning rate"
            )

    def inputs_for(self, batch: TensorDictBase, index: Tensor | None) -> list[Tensor] | None:
        """The program's inputs taken from the batch, or ``None`` when it was compiled for something else."""
        if (index is not None) != self._takes_index or batch.batch_size != self.batch_size or self.stale():
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

    def run(self, inputs: list[Tensor], call: int) -> Metrics:
        """Update once; ``call`` numbers the update in an error."""
        self.optimizers.follow_rates()
        if self.optimizers.states_replaced():
            self.optimizers.watch_states()
        with torch.no_grad():
            try:
                state = self._live()
            except StateChanged as change:
                raise TraceError(f"{change} since this update was compiled: compile it again") from None
            outputs = self._lowered([*inputs, *state, *[n.draw() for n in self.program.noise]])
        if self._guarded:
            *outputs, finite = outputs
            if not finite:
                self._refuse_nonfinite(outputs, call)
        return self._metrics.rebuild(outputs)


_INDEX = ("graphrl", "index")


class _MetricShape:
    """Remembers what a step returns, to rebuild it from a program's plain outputs."""

    def flatten(self, metrics: Metrics) -> tuple[Tensor, ...]:
        self.keys: list[Key]
        self.kind: type
        if metrics is None:
            self.keys, self.kind = [], type(None)
            return ()
        if isinstance(metrics, TensorDictBase):
            self.keys, self.kind = [normalize_key(k) for k in metrics.keys(True, True)], TensorDict
            values = [metrics.get(k) for k in self.keys]
        elif isinstance(metrics, dict):
            self.keys, self.kind = list(metrics), dict
            values = list(metrics.values())
        else:
            raise TraceError(f"the step returns a {type(metrics).__name__}: expected a dict or TensorDict of tensors")
        for key, value in zip(self.keys, values, strict=True):
            if not isinstance(value, Tensor):
                raise TraceError(f"metric {key!r} is a {type(value).__name__}: return the tensor itself, not .item()")
        return tuple(v.detach() for v in values)

    def ports(self, traced: Any) -> tuple[Port, ...]:
        (output,) = (n for n in traced.graph.nodes if n.op == "output")
        return tuple(Port.of(k, n.meta["val"]) for k, n in zip(self.keys, output.args[0], strict=True))

    def rebuild(self, outputs: Iterable[Tensor]) -> Metrics:
        if self.kind is type(None):
            return None
        values = dict(zip(self.keys, outputs, strict=True))
        return values if self.kind is dict else TensorDict(values, batch_size=[])


def _shaken(batch: TensorDictBase, rounding: float) -> TensorDictBase:
    """The batch with its floating-point entries moved by a rounding error, or by ``rounding`` if that is larger."""
    generator = torch.Generator().manual_seed(0)

    def shake(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor)
        return tensor * (1 + max(torch.finfo(tensor.dtype).eps, rounding) * noise)

    return batch.apply(shake)


def _distance(found: Tensor, expected: Tensor, rounding: float = 0.0) -> float:
    """Distance in the Euclidean norm, as a multiple of what rounding allows; ``rounding``: of the products alone.

    A first optimiser step amplifies rounding in single entries, and a KL of 1e-9 is all rounding: hence a norm over the
    whole tensor, and an absolute floor.
    """
    if not found.numel():
        return 0.0
    a, b = found.double(), expected.double()
    relative, absolute = (1e-6, 1e-12) if expected.dtype == torch.float64 else (2e-2, 1e-5)
    relative += rounding
    return float((a - b).norm() / (relative * b.norm() + absolute * a.numel() ** 0.5))


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
