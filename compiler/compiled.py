"""A keyed graph behind compiled programs: same keys in, same keys out, live weights, no Dynamo guards."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from graphrl.compiler.against_eager import check_against_eager, resized, served_sizes
from graphrl.compiler.backends import get_backend
from graphrl.compiler.backends.base import written_inputs
from graphrl.compiler.branches import OtherBranches
from graphrl.compiler.differentiate import lower_differentiable
from graphrl.compiler.entry import Entry
from graphrl.compiler.guards import Bound, Modes, StateChanged, operations_watched, raise_index_error
from graphrl.compiler.lower import lower_with_fallback
from graphrl.compiler.passes.guard_nonfinite import guard_writes
from graphrl.compiler.passes.lower_precision import check_precision
from graphrl.compiler.passes.pipeline import run_passes
from graphrl.compiler.program import Port, Program
from graphrl.compiler.reachable import loose_tensors, modules_of
from graphrl.compiler.shapes import quiet_fakes
from graphrl.compiler.specialization import Specialization, result_of
from graphrl.compiler.trace import as_example, common_leading, missing_key, trace
from graphrl.compiler.undo import COMPILING, Undo, kept_random_state
from graphrl.compiler.verify import verify_lowered
from graphrl.errors import CompileError, GraphError, KeyMissingError, ParityError, SpecError, did_you_mean
from graphrl.graph import KeyedGraph
from graphrl.keys import DISCARD, Key, normalize_keys
from graphrl.opaque_nodes import is_opaque
from graphrl.progress import step_line

__all__ = ["CompiledGraph", "compile"]

MAX_PROGRAMS = 16
"""Programs kept per graph. Beyond it calls run eagerly, and ``explain`` says so: every shape compiles anew."""


def compile(
    graph: Any,
    example: TensorDictBase | dict[Key, Tensor] | None = None,
    *,
    backend: str = "inductor",
    dynamic: bool | None = None,
    strict: bool = False,
    verify: bool = True,
    precision: str | None = None,
) -> CompiledGraph:
    """Compile a keyed graph; the result is called like the graph itself.

    graph: a :class:`KeyedGraph`, any ``tensordict.nn`` module, or anything :class:`KeyedGraph` takes as a node.
    example: a batch to compile for now; without it the first call compiles. Another feature shape, dtype, device,
    train/eval flag or interaction type compiles its own program at its first call; unrelated keys never do.
    dynamic: ``None`` compiles the first batch size for itself, and at a second one a program for any; ``True`` that
    program at once; ``False`` a program for each size. Only the first batch dim is open. Sizes 0 and 1 always have
    programs of their own, and so has every size where the code or the backend (``native``, ``onnx``) asks for a fixed
    one: ``grl.explain`` tells.
    backend: ``inductor``, ``aot``, ``native`` (generated C), ``triton`` (MLPs on a GPU), ``onnx`` or ``eager``. What it
    refuses the next best runs, and ``grl.explain`` tells why; ``strict=True`` makes a refusal a :class:`CompileError`.
    verify: check each new program against float64 eager before its first use; a difference is a ``ParityError``.
    precision: ``"bf16"`` multiplies matrices in bfloat16; weights, sums, losses and gradients stay float32.

    Weights are read at every call: in-place loads, ``load_state_dict``, optimiser steps take effect at once. Python
    values that a module reads (``dropout.p``, an attribute of yours) are read once, when it is compiled. With gradients
    enabled the result is differentiable (first order) with respect to inputs and weights.
    """
    if not isinstance(graph, TensorDictModuleBase):
        graph = KeyedGraph(graph)
    get_backend(backend)
    if dynamic not in (None, True, False):
        raise SpecError(f"dynamic={dynamic!r}: expected None, True or False")
    from graphrl.compiler.chain import CompiledChain  # it is built on CompiledGraph

    kind = CompiledChain if any(is_opaque(m) for m in graph.modules()) else CompiledGraph
    compiled = kind(graph, backend=backend, dynamic=dynamic, strict=strict, verify=verify, precision=precision)
    if example is not None:
        compiled.warm_up(as_example(example))
    return compiled


class CompiledGraph(TensorDictModuleBase):
    """The compiled form of a graph. It shares the graph's modules, so state-dict names are the graph's own.

    ``fast(td)`` writes what eager would write; ``fast.call(*tensors)`` takes plain tensors in ``in_keys`` order and
    returns a tuple in ``out_keys`` order, the hot path. Raises :class:`KeyMissingError` and :class:`SpecError` with the
    key for a batch that does not fit.
    """

    def __init__(
        self,
        graph: TensorDictModuleBase,
        *,
        backend: str,
        dynamic: bool | None,
        strict: bool,
        verify: bool,
        precision: str | None,
    ) -> None:
        super().__init__()
        self.__dict__["graph"] = graph  # not a sub-module: a prefix in every state-dict name would follow
        self._modules, self._parameters, self._buffers = graph._modules, graph._parameters, graph._buffers
        self._non_persistent_buffers_set = graph._non_persistent_buffers_set
        self.in_keys = normalize_keys(list(graph.in_keys))
        self.out_keys = [k for k in normalize_keys(list(graph.out_keys)) if k != DISCARD]
        self.backend, self.dynamic, self.strict, self.verify = backend, dynamic, strict, verify
        self.precision = check_precision(precision)
        self.training = graph.training
        self._result = result_of(graph)
        self.returns_new = self._result == "new" and getattr(graph, "returns_new", False)
        self._reset()

    def _reset(self) -> None:
        self._entries: dict[Specialization, Entry] = {}
        self._fixed_only: dict[Specialization, str] = {}  # why there is no program for any batch size
        self._look_at_modules()
        self._last: tuple[Specialization, Entry] | None = (
            None  # one attribute: another thread may replace it at any moment
        )
        self.retraces: list[str] = []

    def _look_at_modules(self) -> None:
        modules = [m for _, root in modules_of(self.graph) for m in root.modules()]
        self._loose = [t for _, t in loose_tensors(self.graph)]
        self._modes = Modes(modules)
        self._stores = [m._parameters for m in modules if m._parameters]

    # ---- calling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], TensorDictBase):
            return self.forward(args[0])
        if kwargs or not args:
            names = {"_".join((k,) if isinstance(k, str) else k): k for k in self.in_keys}
            unknown = [n for n in kwargs if n not in names]
            if unknown:
                raise GraphError(f"no input {unknown[0]!r}; inputs are {list(names)}.{did_you_mean(unknown[0], names)}")
            given = dict(zip(self.in_keys, args, strict=False)) | {names[n]: v for n, v in kwargs.items()}
            missing = [k for k in self.in_keys if k not in given]
            if missing:
                raise KeyMissingError(f"input {missing[0]!r} is missing; inputs are {list(names)}")
            args = tuple(given[k] for k in self.in_keys)
        result = self.call(*args)
        return result[0] if len(result) == 1 else result

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute and write ``out_keys``; every other entry is left alone."""
        if operations_watched():
            return self.graph(tensordict)
        inputs = []
        for key in self.in_keys:
            value = tensordict.get(key, None)
            if not isinstance(value, Tensor) and (value is None or isinstance(value, TensorDictBase)):
                return self._forward_eagerly(tensordict, key)
            inputs.append(value)
        if self._result == "another":
            return self._forward_eagerly(tensordict, None)
        outputs = self._run(inputs, tensordict.batch_size)
        if self._result in ("new", "empty"):
            result = TensorDict({}, batch_size=[]) if self._result == "new" else tensordict.empty()
            for key, value in zip(self.out_keys, outputs, strict=True):
                result.set(key, value)
            return result
        # set does more: it moves to the batch's device, and raises for a locked batch as eager does
        plain = type(tensordict) is TensorDict and tensordict.device is None and not tensordict.is_locked
        for key, value in zip(self.out_keys, outputs, strict=True):
            if plain and type(key) is str:
                tensordict._set_str(key, value, inplace=False, validated=True, non_blocking=False)
            else:
                tensordict.set(key, value)
        return tensordict

    def _forward_eagerly(self, tensordict: TensorDictBase, key: Key | None) -> TensorDictBase:
        """Where the result is no batch of out_keys, or ``key`` is no tensor, as in a module that tolerates that."""
        told = "returns a batch of another kind" if key is None else f"{key!r} is missing or holds other keys"
        if f"runs eagerly: {told}" not in self.retraces:
            self.retraces.append(f"runs eagerly: {told}")
        try:
            return self.graph(tensordict)
        except Exception as error:
            if key is None or key in tensordict.keys(True):
                raise
            raise missing_key(self.graph, key, tensordict, f"batch {list(tensordict.batch_size)}") from error

    def call(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Plain tensors in ``in_keys`` order to a tuple in ``out_keys`` order. No dictionary, no Dynamo guard."""
        if len(inputs) != len(self.in_keys):
            raise SpecError(f"got {len(inputs)} tensors, expected {len(self.in_keys)}: {self.in_keys}")
        if operations_watched():
            return tuple(self._run_eagerly(inputs, torch.Size([])))
        return tuple(self._run(inputs, None))

    def call_into(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Like :meth:`call`, but leaves the results in ``outputs``, tensors of the right shapes; for collectors.

        With the ``native`` backend they are written in place, without gradients and without a copy.
        """
        entry = self._entry_for(inputs, None)
        if not isinstance(entry.run, Bound) or not all(t.is_contiguous() and not t.is_neg() for t in inputs):
            for target, value in zip(outputs, self._run(inputs, None), strict=True):
                target.copy_(value)
            return
        try:
            entry.run.into(inputs, outputs)
        except StateChanged as change:
            self._forget(str(change))
            self.call_into(inputs, outputs)

    def bind_rows(
        self, inputs: Sequence[Sequence[Tensor]], outputs: Sequence[Sequence[Tensor]]
    ) -> Callable[[int], None]:
        """``step(t)`` that computes ``outputs[t]`` from ``inputs[t]``: a collector's whole batch, checked once.

        Both hold a tuple of tensors for each row. Bind again for every batch: modes and weights are looked at then, and
        random draws are made for all rows at once. With ``native`` a step is one foreign call; otherwise
        :meth:`call_into`.
        """
        entry = self._entry_for(inputs[0], None)
        if isinstance(entry.run, Bound):
            try:
                step = entry.run.rows(inputs, outputs)
            except StateChanged as change:
                self._forget(str(change))
                return self.bind_rows(inputs, outputs)
            if step is not None:
                return step
        return lambda t: self.call_into(inputs[t], outputs[t])

    def _run(self, inputs: Sequence[Tensor], batch_size: torch.Size | None) -> Sequence[Tensor]:
        entry = self._entry_for(inputs, batch_size)
        given = inputs
        for t in inputs:
            if not t.is_contiguous() or t.is_neg():
                inputs = [t.resolve_neg().contiguous() for t in inputs]
                break
        try:
            outputs = entry.run(inputs)
            if inputs is not given and not entry.differentiable:
                for i in written_inputs(entry.program):  # code that writes its input writes the caller's
                    given[i].copy_(inputs[i])
            return outputs
        except StateChanged as change:
            self._forget(str(change))
            return self._run(inputs, batch_size)
        except RuntimeError as error:
            raise_index_error(error, type(self.graph).__name__)
            raise

    def _entry_for(self, inputs: Sequence[Tensor], batch_size: torch.Size | None) -> Entry:
        if not self._modes.same_modules():
            self._forget("a module was replaced by another")
        last = self._last
        if last is not None:
            key, entry = last
            if key.fits(inputs, batch_size) and key.modes == self._modes.now():
                if key.needs_grad == (self._needs_grad(inputs) if torch.is_grad_enabled() else None):
                    return entry
        return self._select(inputs, batch_size)

    def _needs_grad(self, inputs: Sequence[Tensor]) -> tuple[bool, ...] | None:
        """Which inputs and parameters carry gradient, or ``None`` when nothing does."""
        if not torch.is_grad_enabled():
            return None
        flags = (*(t.requires_grad for t in inputs), *(p.requires_grad for p in self._trainable()))
        return flags if any(flags) else None

    def _trainable(self) -> list[Tensor]:
        return [*(p for store in self._stores for p in store.values() if p is not None), *self._loose]

    # ---- compiling

    def warm_up(self, example: TensorDictBase) -> CompiledGraph:
        """Compile for batches like ``example``, under the present modes and without gradients, without calling."""
        inputs = [example.get(k, None) for k in self.in_keys]
        if not all(isinstance(t, Tensor) for t in inputs):
            trace(self.graph, example)  # raises the error that names the key
        with torch.no_grad():
            self._select(inputs, example.batch_size)
        return self

    def entries(self) -> list[Entry]:
        """The programs compiled so far, in order."""
        return list(self._entries.values())

    def _select(self, inputs: Sequence[Tensor], batch_size: torch.Size | None) -> Entry:
        for name, value in zip(self.in_keys, inputs, strict=True):
            if not isinstance(value, Tensor):
                raise SpecError(f"{name!r} is a {type(value).__name__}: expected a tensor")
        modes, needs_grad = self._modes.now(), self._needs_grad(inputs)

        def fitting() -> Entry | None:
            for key, entry in list(self._entries.items()):
                if key.modes == modes and key.needs_grad == needs_grad and key.fits(inputs, batch_size):
                    self._last = key, entry
                    return entry
            return None

        if (entry := fitting()) is not None:
            return entry
        with COMPILING:
            if (entry := fitting()) is not None:  # another thread has just compiled it
                return entry
            with kept_random_state():
                size = self._guess_batch_size(inputs) if batch_size is None else batch_size
                signature = tuple((t.shape, t.dtype, t.device) for t in inputs)
                key, entry = self._compile(Specialization(signature, modes, needs_grad, size), inputs)
            if self._entries:
                self.retraces.append(entry.reason)
            self._entries[key] = entry
            self._last = key, entry
        return entry

    def _compile(self, key: Specialization, inputs: Sequence[Tensor]) -> tuple[Specialization, Entry]:
        """A new program: for any batch size where that is wanted and can be, else for this one."""
        ports = ", ".join(str(Port.of(k, t)) for k, t in zip(self.in_keys, inputs, strict=True))
        changes = min((key.changes_from(old, self.in_keys) for old in self._entries), key=len, default=None)
        reason = f"first call with {ports}" if changes is None else f"{', '.join(changes)}: call with {ports}"
        if len(self._entries) >= MAX_PROGRAMS:
            told = f"{reason}: {MAX_PROGRAMS} programs are compiled already, runs eagerly"
            return key, self._eager_entry(self._example(inputs, key.batch_size), told)
        grad = key.needs_grad is not None
        if not self._wants_any_batch(key):
            return key, self._build(inputs, key.batch_size, grad, reason)
        why = self._fixed_only.get(key.opened())
        if why is None:
            try:
                with quiet_fakes():
                    entry = self._build(inputs, key.batch_size, grad, reason, dynamic=True)
                smallest, largest = served_sizes(entry.program)
                told = f"from {smallest}" + f" to {largest}" * (largest < sys.maxsize)
                entry = replace(entry, reason=f"{reason}; one program for any batch size {told}")
                return key.opened(smallest, largest), entry
            except Exception as error:  # whatever stands in the way, programs of one size each remain
                why = self._fixed_only[key.opened()] = (str(error).strip() or type(error).__name__).splitlines()[0]
        if self.strict and self.dynamic:
            raise CompileError(f"no program for any batch size, as dynamic=True asks with strict=True: {why}")
        entry = self._build(inputs, key.batch_size, grad, reason)
        refusal = f"{self.backend} for a program of any batch size: {why}"
        return key, replace(entry, refusals=(refusal, *entry.refusals))

    def _wants_any_batch(self, key: Specialization) -> bool:
        """Whether ``dynamic`` asks for a program for many sizes: at once, or as another size was met before."""
        if self.dynamic is False or not key.may_open:
            return False
        others = (old for old in self._entries if old.may_open or old.sizes is not None)
        return bool(self.dynamic) or any(old.opened() == key.opened() for old in others)

    def _guess_batch_size(self, inputs: Sequence[Tensor]) -> torch.Size:
        """The leading dims plain tensors share, as in the TensorDict they probably come from; none where an output
        lacks them, as the last state of a sequence does."""
        guess = torch.Size(common_leading(inputs))
        undo = Undo()
        try:
            with torch.no_grad(), undo:
                self._run_eagerly(inputs, guess)
        except Exception:  # whatever is wrong is said when the graph is traced
            return torch.Size([])
        finally:
            undo.restore()
        return guess

    def _build(
        self, inputs: Sequence[Tensor], batch_size: torch.Size, grad: bool, reason: str, dynamic: bool = False
    ) -> Entry:
        start = time.perf_counter()
        if dynamic and not get_backend(self.backend).dynamic:
            raise CompileError("it compiles for fixed shapes")
        with step_line(f"compile {type(self.graph).__name__} with {self.backend}"):
            entry = self._lower(self._example(inputs, batch_size), inputs, grad, reason, dynamic)
            if dynamic or self.verify:
                self._check(entry, [t.contiguous() for t in inputs], batch_size)
        return replace(entry, seconds=time.perf_counter() - start)

    def _check(self, entry: Entry, inputs: Sequence[Tensor], batch_size: torch.Size) -> None:
        """Compare with the eager graph: on these inputs, or on several sizes of them."""

        def eager(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            size = tensors[0].shape[:1] + batch_size[1:] if entry.program.dynamic else batch_size
            return self._run_eagerly(tensors, size)

        batches = resized(inputs, *served_sizes(entry.program)) if entry.program.dynamic else [inputs]
        try:
            check_against_eager(entry.program, self.graph, batches, entry.run, eager)
        except ParityError:
            raise
        except Exception:  # an example of zeros, say, that eager refuses as a distribution's parameters
            if entry.program.dynamic:
                raise

    def _lower(self, example: TensorDict, inputs: Sequence[Tensor], grad: bool, reason: str, dynamic: bool) -> Entry:
        options = self.backend, self.strict, self.verify

        def eager(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            rows = tensors[0].shape[:1] if dynamic else example.batch_size[:1]
            return self._run_eagerly(tensors, rows + example.batch_size[1:])

        if grad:
            needs = [t.requires_grad for t in inputs]
            pair = lower_differentiable(self.graph, example, needs, *options, self.precision, eager, dynamic)
            if pair is not None:
                return Entry(pair.forward, pair.backend, pair.refusals, 0.0, reason, pair.parity, pair.run, True)
        with torch.no_grad():
            program, name, refusals, parity, bound = self._bind(example, dynamic, eager)
        run = torch.no_grad()(bound) if grad else bound  # nothing in it carries gradient
        return Entry(program, name, refusals, 0.0, reason, parity, run, False)

    def _bind(
        self, example: TensorDict, dynamic: bool, eager: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    ) -> tuple[Program, str, tuple[str, ...], float | None, Bound]:
        """Trace and lower without gradients: the program, who runs it, the refusals, its parity, and how to run it."""
        traced = trace(self.graph, example, dynamic=dynamic, recheck=True)
        program = guard_writes(run_passes(traced, precision=self.precision))
        lowered, name, refusals = lower_with_fallback(program, self.backend, self.strict)
        tensors = [example.get(k).contiguous() for k in self.in_keys]
        parity = verify_lowered(program, lowered, name, program.arguments(tensors)) if self.verify else None

        def other(inputs: Sequence[Tensor]) -> Bound:
            self.retraces.append("a library's code took another branch")
            told = f"compile {type(self.graph).__name__} with {self.backend}, another branch"
            with COMPILING, kept_random_state(), step_line(told), torch.no_grad():
                return self._bind(self._example(inputs, example.batch_size), False, eager)[-1]

        otherwise = OtherBranches(other, eager) if program.branched else eager
        return program, name, refusals, parity, Bound(program, lowered, otherwise)

    def _eager_entry(self, example: TensorDictBase, reason: str) -> Entry:
        def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            return self._run_eagerly(inputs, example.batch_size)

        program = run_passes(trace(self.graph, example))
        return Entry(program, "eager graph", (), 0.0, reason, None, run, True)

    def _run_eagerly(self, inputs: Sequence[Tensor], batch_size: torch.Size) -> list[Tensor]:
        td = TensorDict({}, batch_size=batch_size)
        for key, tensor in zip(self.in_keys, inputs, strict=True):
            td.set(key, tensor)
        result = self.graph(td)
        return [result.get(k) for k in self.out_keys]

    def _example(self, inputs: Sequence[Tensor], batch_size: torch.Size) -> TensorDict:
        td = TensorDict({}, batch_size=batch_size)
        for key, tensor in zip(self.in_keys, inputs, strict=True):
            td.set(key, tensor.detach().contiguous())
        return td

    def _forget(self, reason: str) -> None:
        with COMPILING:
            self._entries.clear()
            self._fixed_only.clear()
            self._last = None
            self._look_at_modules()
            self.retraces.append(reason)

    # ---- being a module

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """The graph's own, under the same names."""
        return self.graph.state_dict(*args, **options)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.graph._load_from_state_dict(*args)

    def train(self, mode: bool = True) -> CompiledGraph:
        self.graph.train(mode)
        self.training = mode
        return self

    def get_dist(self, tensordict: TensorDictBase) -> torch.distributions.Distribution:
        """The eager graph's distribution: see :meth:`KeyedGraph.get_dist`."""
        return self.graph.get_dist(tensordict)

    def __getstate__(self) -> dict[str, Any]:
        return {"graph": self.graph, **self._options()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("backend", "dynamic", "strict", "verify", "precision")}

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledGraph:
        import copy

        graph = copy.deepcopy(self.graph, memo)
        return type(self)(graph, **self._options())

    def __repr__(self) -> str:
        return f"CompiledGraph({type(self.graph).__name__}, backend={self.backend!r}, programs={len(self._entries)})"
