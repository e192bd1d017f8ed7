"""Check a lowered program against the interpreter, in float64, before its first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from graphrl.compiler.backends.base import Lowered
from graphrl.compiler.program import Program
from graphrl.errors import ParityError

__all__ = [
    "ROUNDING",
    "allowed_error",
    "float64_reference",
    "product_rounding",
    "relative_error",
    "vary",
    "verify_lowered",
    "widened_run",
]

# 64 units in the last place; more for float64, whose eager result is the reference itself and so shows no error
ROUNDING = {torch.float64: 1e-10, torch.float32: 7.7e-6, torch.bfloat16: 0.5, torch.float16: 6.3e-2}


def verify_lowered(program: Program, lowered: Lowered, backend: str, arguments: Sequence[Tensor]) -> float:
    """Run ``lowered`` and the interpreter on fresh inputs near the example; return the largest relative error.

    Each result, outputs and written state alike, may be no farther from the float64 interpreter than eager in the
    program's own dtype is, times 8, plus a fixed rounding allowance; or than rounding of its arguments moves eager,
    times 10: an optimiser's first step is nearly the sign of a gradient, and some gradients are all rounding. The
    caller's tensors are untouched. Raises :class:`ParityError` naming the backend and the first key that differs.
    """
    generator = torch.Generator().manual_seed(0)
    n_in = len(program.inputs)
    fresh = [vary(t, generator) if i < n_in else t.detach().clone() for i, t in enumerate(arguments)]
    reference = _run_reference(program, fresh)
    eager = _results(program, program.graph_module, [t.clone() for t in fresh])
    found = _results(program, lambda *values: lowered(list(values)), [t.clone() for t in fresh])
    worst = 0.0
    shaken: list[list[Tensor]] = []
    for i, (name, ref, own, got) in enumerate(zip(_result_names(program), reference, eager, found, strict=True)):
        allowed = allowed_error(program, own, ref)
        error = relative_error(got, ref)
        worst = max(worst, error)
        if not error <= allowed:
            shaken = shaken or [_results(program, program.graph_module, _shaken(program, fresh, k)) for k in range(4)]
            margin = 2 if product_rounding(program) else 10  # rounding of products is already counted at its largest
            allowed = max(allowed, *(margin * relative_error(results[i], ref) for results in shaken))
        if got.shape != own.shape or got.dtype != own.dtype or not error <= allowed:
            raise ParityError(
                f"{backend} computes {name} of {program.name} wrongly: {got.dtype} {list(got.shape)} with relative "
                f"error {error:.2e} against float64; eager gives {own.dtype} {list(own.shape)} with "
                f"{relative_error(own, ref):.2e}. "
                "Use backend='eager' and report this program: print(grl.trace(...))"
            )
    return worst


def allowed_error(program: Program, own: Tensor, reference: Tensor) -> float:
    """How far a result may be from ``reference``: 8 times as far as eager's ``own``, and a fixed rounding allowance."""
    return 8 * relative_error(own, reference) + max(ROUNDING.get(own.dtype, 0.0), product_rounding(program))


def float64_reference(program: Program, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The program's outputs computed in float64: float32 inputs and state widened, every operation in double."""
    arguments = program.arguments(inputs)
    return tuple(_run_reference(program, arguments)[: len(program.outputs)])


def product_rounding(program: Program) -> float:
    """Relative error that bfloat16 products bring into a program: 0 where there are none.

    Each rounds three times, its factors and its result, by up to 2^-8; sums inside it run in float32. Roundings of one
    product and the next are independent, so that the error along a chain of L products grows as their root: 3 * 2^-8 *
    sqrt(L), for the longest chain.
    """
    longest: dict[fx.Node, int] = {}
    for node in program.graph_module.graph.nodes:
        value = node.meta.get("val")
        parts = value if isinstance(value, (tuple, list)) else [value]
        low = any(isinstance(v, Tensor) and v.dtype == torch.bfloat16 for v in parts)
        product = low and any(word in str(node.target) for word in ("mm", "convolution"))
        longest[node] = product + max((longest[n] for n in node.all_input_nodes), default=0)
    return float(3 * 2**-8 * max(longest.values(), default=0) ** 0.5)


def relative_error(found: Tensor, reference: Tensor) -> float:
    """Largest error of ``found`` relative to the scale of ``reference``; equal NaN and infinities count as equal.

    ``max|found - reference| / max(floor, max|reference|)`` over finite entries; infinite when finiteness differs. The
    floor is 1 for a single number, a loss or a KL that may be nothing but cancelled terms, and 1e-3 for a tensor.
    """
    if found.shape != reference.shape:
        return float("inf")
    if found.numel() == 0:
        return 0.0
    if not found.is_floating_point():
        return 0.0 if torch.equal(found, reference.to(found.dtype)) else float("inf")
    a, b = found.double(), reference.double()
    special = ~torch.isfinite(b)
    equal = torch.isclose(a[special], b[special], rtol=0, atol=0, equal_nan=True)
    if not equal.all() or not torch.isfinite(a[~special]).all():
        return float("inf")
    a, b = a[~special], b[~special]
    if a.numel() == 0:
        return 0.0
    return float((a - b).abs().max() / b.abs().max().clamp_min(1.0 if found.numel() == 1 else 1e-3))


def vary(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """A tensor like ``tensor`` but not equal to it, inside its range; integers and flags are kept."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return tensor.detach().clone()
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device)
    wide = tensor.detach().double()
    low, high = wide.min(), wide.max()
    if not bool(low < high):  # a constant example (all zeros, say) tells nothing of the range
        return (wide + 0.5 * noise.abs()).to(tensor.dtype)
    return (wide + 0.1 * (high - low) * noise).clamp(low, high).to(tensor.dtype)


def _shaken(program: Program, arguments: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Copies of the arguments, floating-point numbers moved by about what rounding moves them."""
    generator = torch.Generator().manual_seed(seed)

    def shake(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.clone()
        ulps = 64 if tensor.dtype.itemsize >= 4 else 1  # a plain sum over a batch rounds more than eager's
        step = max(ulps * torch.finfo(tensor.dtype).eps, product_rounding(program))
        return tensor * (1 + step * torch.randn(tensor.shape, generator=generator).to(tensor))

    return [shake(t) for t in arguments]


def _results(program: Program, run: Any, arguments: list[Tensor]) -> list[Tensor]:
    """Outputs, then the values of the state the run wrote."""
    with torch.no_grad():
        outputs = [t.detach().clone() for t in run(*arguments)]
    first = len(program.inputs)
    return outputs + [arguments[first + i] for i, slot in enumerate(program.state) if slot.mutated]


def _result_names(program: Program) -> list[str]:
    return [repr(p.key) for p in program.outputs] + [slot.name for slot in program.state if slot.mutated]


def _run_reference(program: Program, arguments: Sequence[Tensor]) -> list[Tensor]:
    wide = [t.detach().to(torch.float64 if t.is_floating_point() else t.dtype, copy=True) for t in arguments]
    return _results(program, widened_run(program), wide)


def widened_run(program: Program) -> Callable[..., Any]:
    """``program`` as a function of float64 tensors that computes in float64 throughout."""
    return _Float64(program.graph_module).run


class _Float64(fx.Interpreter):
    """Interprets a program with every floating dtype in it replaced by float64."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = _widened(args), {k: _widened(v) for k, v in kwargs.items()}
        return super().call_function(target, args, kwargs)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    if isinstance(value, (tuple, list)):
        return type(value)(_widened(v) for v in value)
    return value
