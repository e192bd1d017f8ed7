"""torch.optim inside a program: moments and step counters as state tensors, the learning rate as a live tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from numbers import Number
from typing import Any

import torch
import torch.compiler
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from graphrl.compiler.program import Fixed, StateSlot
from graphrl.errors import TraceError

__all__ = ["GradientSum", "TracedOptimizers", "record_optimizers"]


@contextlib.contextmanager
def record_optimizers() -> Iterator[list[Optimizer]]:
    """Collect every optimiser whose ``step`` runs in the block, in order of first use.

    State that such a step creates is set to what it means before any step: SGD's momentum starts as the first
    gradient, which is what a zero momentum becomes, provided dampening is zero.
    """
    found: list[Optimizer] = []
    known: list[set[int]] = []

    def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not any(o is optimizer for o in found):
            found.append(optimizer)
            known.append({id(param) for param in optimizer.state})

    handle = register_optimizer_step_pre_hook(note)
    try:
        yield found
    finally:
        handle.remove()
    for optimizer, before in zip(found, known, strict=True):
        fresh = {param: state for param, state in optimizer.state.items() if id(param) not in before}
        if fresh and any(group.get("momentum") and group.get("dampening") for group in optimizer.param_groups):
            raise TraceError(
                f"{type(optimizer).__name__} with momentum and dampening starts its momentum by another rule "
                "than it continues with: take one eager step before the first compiled one"
            )
        for state in fresh.values():
            if isinstance(state.get("momentum_buffer"), Tensor):
                state["momentum_buffer"].zero_()


_BRANCH_ON_THE_STEP = ("RAdam", "ASGD")
"""Their plain form branches on the step count in Python; their ``capturable`` form uses tensors instead."""


_REFUSED = {
    "Adafactor": "it chooses its step by tensor values in Python",
    "Muon": "it orthogonalises in bfloat16, where a fused program rounds otherwise by more than 1e-3",
}


class TracedOptimizers:
    """The optimisers of one update, prepared for tracing and watched afterwards.

    Step counters are kept in float64, so that ``1 - beta ** step`` has float64's accuracy as in eager Python. Each
    group's ``lr`` is fed to the program as a tensor that follows the group: schedulers go on writing floats. A change
    of any other hyperparameter, or of the groups themselves, asks for a new trace.
    """

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self.optimizers = optimizers
        for optimizer in optimizers:
            if (reason := _REFUSED.get(type(optimizer).__name__)) is not None:
                raise TraceError(f"{type(optimizer).__name__} cannot be traced: {reason}. Take its step eagerly")
            if any(group.get("fused") for group in optimizer.param_groups):
                raise TraceError(f"{type(optimizer).__name__}(fused=True) cannot be traced: leave fused out")
        self._groups = [(o, i) for o in optimizers for i in range(len(o.param_groups))]
        self._rates = [_as_tensor(o.param_groups[i]["lr"], o) for o, i in self._groups]
        self._rate_values = [o.param_groups[i]["lr"] for o, i in self._groups]
        self._fixed = [_hyperparameters(o, o.param_groups[i]) for o, i in self._groups]
        self.watch_states()

    def watch_states(self) -> None:
        """Take note of the present state dictionaries; widen step counters."""
        self._states = [o.state for o in self.optimizers]
        self._stateful = [len(o.state) for o in self.optimizers]
        for optimizer in self.optimizers:
            for param, state in optimizer.state.items():
                step = state.get("step")
                if isinstance(step, Tensor) and (step.dtype != torch.float64 or step.device != param.device):
                    state["step"] = step.to(device=param.device, dtype=torch.float64)

    def states_replaced(self) -> bool:
        """Whether an optimiser has other state dictionaries than at the trace, as after ``load_state_dict``."""
        return any(o.state is not s for o, s in zip(self.optimizers, self._states, strict=True))

    def hyperparameters_changed(self) -> bool:
        """Whether anything but a learning rate was changed since the trace, or an optimiser's state was reset."""
        if [len(o.state) for o in self.optimizers] != self._stateful:
            return True
        for (optimizer, i), (count, names, values, params) in zip(self._groups, self._fixed, strict=True):
            if len(optimizer.param_groups) != count:
                return True
            group = optimizer.param_groups[i]
            if [group.get(name) for name in names] != values or _other(group["params"], params):
                return True
        return False

    def follow_rates(self) -> None:
        """Copy learning rates that changed into the tensors the program reads."""
        for i, (optimizer, group) in enumerate(self._groups):
            rate = optimizer.param_groups[group]["lr"]
            if rate is not self._rate_values[i]:
                self._rate_values[i] = rate
                self._rates[i].fill_(rate) if not isinstance(rate, Tensor) else self._rates[i].copy_(rate)
            elif isinstance(rate, Tensor):
                self._rates[i].copy_(rate)

    def slots(self) -> dict[int, StateSlot]:
        """State slots of learning rates and of every state tensor, by ``id``."""
        slots: dict[int, StateSlot] = {}
        for rate, (optimizer, group) in zip(self._rates, self._groups, strict=True):
            place = self.optimizers.index(optimizer)
            slots[id(rate)] = StateSlot.of(f"optimizer_{place}.lr_{group}", Fixed(rate), "optimizer")
        for place, optimizer in enumerate(self.optimizers):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for number, param in enumerate(parameters):
                slots.setdefault(
                    id(param), StateSlot.of(f"optimizer_{place}.parameter_{number}", Fixed(param), "parameter")
                )
                for name, value in optimizer.state.get(param, {}).items():
                    if isinstance(value, Tensor):
                        read = _state_reader(optimizer, param, name)
                        slots[id(value)] = StateSlot.of(f"optimizer_{place}.{name}_{number}", read, "optimizer")
        return slots

    @contextlib.contextmanager
    def traceable(self) -> Iterator[GradientSum]:
        """While tracing: learning rates are tensors, and an optimiser's step keeps its scalars as tensors.

        Yields the sum of all gradients that the steps use.
        """
        flag_before = torch.compiler._is_compiling_flag
        gradients = GradientSum()

        def begin(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            gradients.add(optimizer)
            torch.compiler._is_compiling_flag = True

        def end(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            torch.compiler._is_compiling_flag = flag_before

        handles = [register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)]
        for rate, (optimizer, group) in zip(self._rates, self._groups, strict=True):
            optimizer.param_groups[group]["lr"] = rate
        groups = [(type(o).__name__, group) for o in self.optimizers for group in o.param_groups]
        options = [
            *((group, "capturable", True) for name, group in groups if name in _BRANCH_ON_THE_STEP),
            *((group, "foreach", False) for _, group in groups if group.get("foreach")),  # it refuses lr as a tensor
        ]
        before = [group[option] for group, option, _ in options]
        for changed, option, value in options:
            changed[option] = value
        try:
            yield gradients
        finally:
            torch.compiler._is_compiling_flag = flag_before
            for handle in handles:
                handle.remove()
            for (changed, option, _), value in zip(options, before, strict=True):
                changed[option] = value
            for value, (optimizer, group) in zip(self._rate_values, self._groups, strict=True):
                optimizer.param_groups[group]["lr"] = value


class GradientSum:
    """The sum of the gradients that optimisers step on: finite where, short of an overflow, each of them is."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []

    def add(self, optimizer: Optimizer) -> None:
        """Add an optimiser's present gradients."""
        with torch.no_grad():
            for group in optimizer.param_groups:
                self._sums += [p.grad.sum() for p in group["params"] if p.grad is not None]

    def combined(self) -> tuple[Tensor, ...]:
        """The sum, or nothing where no optimiser stepped."""
        with torch.no_grad():
            return (torch.stack([s.to(self._sums[0]) for s in self._sums]).sum(),) if self._sums else ()


def _state_reader(optimizer: Optimizer, param: Tensor, name: str) -> Any:
    """Reads one state tensor; looks the parameter's dictionary up again only when the optimiser has other ones."""
    owner, own = optimizer.state, optimizer.state[param]

    def read() -> Tensor:
        nonlocal owner, own
        if optimizer.state is not owner:
            owner, own = optimizer.state, optimizer.state[param]
        return own[name]

    return read


def _as_tensor(rate: Any, optimizer: Optimizer) -> Tensor:
    device = optimizer.param_groups[0]["params"][0].device
    return torch.as_tensor(rate, dtype=torch.float64).detach().clone().to(device)


def _hyperparameters(optimizer: Optimizer, group: dict[str, Any]) -> tuple[int, list[str], list[Any], list[Tensor]]:
    """What the trace turns into constants: the number of groups, plain values by name, the parameters."""
    names = [k for k, v in group.items() if k not in ("params", "lr", "initial_lr") and _is_plain(v)]
    return len(optimizer.param_groups), names, [group[k] for k in names], [*group["params"]]


def _other(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) != len(b) or any(x is not y for x, y in zip(a, b, strict=True))


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (Number, str, tuple))
