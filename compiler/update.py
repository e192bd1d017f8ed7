"""A whole training update as one program: losses, gradients, clipping, optimiser and target updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from graphrl.compiler.backends import get_backend
from graphrl.compiler.compiled import MAX_PROGRAMS
from graphrl.compiler.entry import Entry
from graphrl.compiler.metrics import Metrics
from graphrl.compiler.passes.lower_precision import check_precision
from graphrl.compiler.undo import COMPILING, kept_random_state
from graphrl.compiler.update_entry import UpdateEntry
from graphrl.errors import NonFiniteError, SpecError
from graphrl.progress import step_line

__all__ = ["CompiledUpdate", "compile_update"]


def compile_update(
    step: Callable[..., Metrics],
    example: TensorDictBase | None = None,
    *,
    backend: str = "inductor",
    strict: bool = False,
    verify: bool = True,
    on_nonfinite: str = "raise",
    precision: str | None = None,
) -> CompiledUpdate:
    """Turn an eager training step into one compiled program.

    step: ``step(batch, **options) -> metrics``. Any eager code: losses (TorchRL's too), ``backward()``,
    ``clip_grad_norm_``, ``torch.optim`` steps, soft target updates. ``metrics``: a dictionary or TensorDict of tensors,
    or ``None``. example: a batch to compile for now; without it the first call compiles.
    precision: ``"bf16"`` multiplies matrices in bfloat16; weights, losses and the optimiser stay float32.

        update = grl.compile_update(step)
        metrics = update(batch)                       # the whole batch
        metrics = update(batch, index)                # rows batch[index], gathered inside; index: int64 [n]
        metrics = update(batch, update_actor=False)   # plain options choose between programs: delayed updates
        metrics = update.epoch(batch, indices)        # one update for each row of indices: int64 [k, n]

    Parameters, buffers and optimiser state stay the real tensors and are written in place, so ``state_dict``,
    checkpoints and ``lr`` schedules go on working. Compiling runs the step a few times and puts everything back; Python
    values the step reads (a coefficient, ``dropout.p``) are read once, when it is compiled, and its Python side effects
    (counters, schedulers) are no part of the program: keep them outside. A step must clear gradients; ``.grad`` is left
    as it was. After putting another optimiser or module in place of one, compile again.
    A non-finite metric or gradient raises :class:`NonFiniteError` that names it (``on_nonfinite="skip"``: the call
    returns the metrics, and ``update.skipped`` counts it), a failed assert or argument check its own error: in each
    case parameters and optimiser state are as before. Raises :class:`TraceError` for code that branches on values.
    """
    if on_nonfinite not in ("raise", "skip"):
        raise SpecError(f"on_nonfinite={on_nonfinite!r}: expected 'raise' or 'skip'")
    if not callable(step):
        raise SpecError(f"the step is a {type(step).__name__}: expected a function, step(batch) -> metrics")
    get_backend(backend)
    options: dict[str, Any] = {"backend": backend, "strict": strict, "verify": verify, "precision": precision}
    update = CompiledUpdate(step, on_nonfinite=on_nonfinite, **options)
    if example is not None:
        update.warm_up(example)
    return update


class CompiledUpdate:
    """The compiled form of an update function; see :func:`compile_update`.

    ``calls``: updates asked for so far; ``skipped``: those not made for a NaN; ``retraces``: why programs were added.
    """

    def __init__(
        self,
        step: Callable[..., Metrics],
        *,
        backend: str,
        strict: bool,
        verify: bool,
        precision: str | None,
        on_nonfinite: str,
    ) -> None:
        self.step, self.backend, self.on_nonfinite = step, backend, on_nonfinite
        self._lowering: dict[str, Any] = {
            "backend": backend,
            "strict": strict,
            "verify": verify,
            "precision": check_precision(precision),
        }
        self.calls = self.skipped = 0
        self.retraces: list[str] = []
        self._entries: list[UpdateEntry] = []
        self._last: UpdateEntry | None = None

    def __call__(self, batch: TensorDictBase, index: Tensor | None = None, **options: Any) -> Metrics:
        entry, inputs = self._entry_for(batch, index, options)
        self.calls += 1
        metrics, made = entry.run(inputs, entry.live_state())
        if not made:
            self._not_made(entry, batch, index, metrics)
        return metrics

    def epoch(
        self,
        batch: TensorDictBase,
        indices: Tensor,
        *,
        stop_key: Any = None,
        stop_above: float = float("inf"),
        **options: Any,
    ) -> Metrics:
        """One update for each row of ``indices``, int64 [k, n]: a pass over minibatches with the checks of one call.

        Returns the metrics stacked, [k, ...]. ``stop_key``, ``stop_above``: stop after the first minibatch whose metric
        of that key exceeds the number, as PPO does for the KL divergence; the result then has as many rows as updates.
        """
        if not isinstance(indices, Tensor) or indices.dim() != 2 or not len(indices):
            found = f"{indices.dtype} {list(indices.shape)}" if isinstance(indices, Tensor) else type(indices).__name__
            raise SpecError(f"indices is {found}: expected a table of row numbers, int64 [minibatches, rows]")
        entry, inputs = self._entry_for(batch, indices[0], options)
        if stop_key is not None:
            entry.check_stop_key(stop_key)
        state, done = entry.live_state(), []
        for row in indices.contiguous().unbind(0):
            self.calls += 1
            metrics, made = entry.run([*inputs[:-1], row], state)
            if not made:
                self._not_made(entry, batch, row, metrics)
            done.append(metrics)
            if stop_key is not None and float(metrics[stop_key]) > stop_above:
                break
        if metrics is None:
            return None
        return torch.stack(done) if isinstance(metrics, TensorDictBase) else {
            key: torch.stack([m[key] for m in done]) for key in metrics
        }  # fmt: skip

    def warm_up(self, batch: TensorDictBase, index: Tensor | None = None, **options: Any) -> CompiledUpdate:
        """Compile for batches like ``batch`` (indices like ``index``, these options) without updating anything."""
        self._entry_for(batch, index, options)
        return self

    def entries(self) -> list[Entry]:
        """The programs compiled so far, in order."""
        return [entry.summary for entry in self._entries]

    def _entry_for(
        self, batch: TensorDictBase, index: Tensor | None, options: Mapping[str, Any]
    ) -> tuple[UpdateEntry, list[Tensor]]:
        if self._last is not None and (inputs := self._last.inputs_for(batch, index, options)) is not None:
            return self._last, inputs
        if not isinstance(batch, TensorDictBase):
            raise SpecError(f"the batch is a {type(batch).__name__}: expected a TensorDict")
        for name, value in options.items():
            if isinstance(value, Tensor) or not isinstance(value, _PLAIN):
                raise SpecError(
                    f"option {name} is a {type(value).__name__}: an option is a plain bool, number or string that "
                    "chooses a program; what changes from call to call belongs in the batch, as a tensor"
                )
            if value != value:
                raise SpecError(f"option {name} is NaN, which equals nothing: every call would compile anew")
        for entry in list(self._entries):
            if entry.stale():
                self._entries.remove(entry)
                self.retraces.append("a hyperparameter, a mode or a weight was replaced")
            elif (inputs := entry.inputs_for(batch, index, options)) is not None:
                self._last = entry
                return entry, inputs
        with COMPILING, step_line(f"compile update with {self.backend}"), kept_random_state():
            entry = UpdateEntry(self.step, batch, index, options, **self._lowering)
        if self._entries:
            self.retraces.append(entry.summary.reason)
        self._entries = [*self._entries[1 - MAX_PROGRAMS :], entry]
        self._last = entry
        inputs = entry.inputs_for(batch, index, options)
        assert inputs is not None  # it was just compiled for them
        return entry, inputs

    def _not_made(self, entry: UpdateEntry, batch: TensorDictBase, index: Tensor | None, metrics: Metrics) -> None:
        if self.on_nonfinite == "skip":
            if not entry.is_nonfinite(batch, index, metrics):
                entry.why_not_made(batch, index, metrics)  # a check that fails for another reason raises
            self.skipped += 1
            return
        reason = entry.why_not_made(batch, index, metrics)
        raise NonFiniteError(
            f"update {self.calls}: {reason}. Parameters and optimiser state are as before this call. Check the batch "
            "for NaN, and the learning rate"
        )


_PLAIN = (bool, int, float, str, type(None))
