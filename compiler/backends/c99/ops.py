"""How each elementwise operation reads in C: one line an operation. ``{0} {1} ..`` are its tensor or number arguments.

``kind`` says in which type it computes: ``"same"`` (the result's), ``"compare"`` (the operands' common type, result
bool), ``"logic"`` (bool).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ELEMENTWISE", "Elementwise", "VIEWS"]


@dataclass(frozen=True)
class Elementwise:
    """``text``: the C expression. ``inputs``: schema names of its operands, in order. ``integer``: also for ints."""

    text: str
    inputs: tuple[str, ...] = ("self",)
    kind: str = "same"
    integer: bool = False


def _unary(text: str, integer: bool = False) -> Elementwise:
    return Elementwise(text, integer=integer)


def _binary(text: str, kind: str = "same", integer: bool = True) -> Elementwise:
    return Elementwise(text, ("self", "other"), kind, integer)


ELEMENTWISE: dict[str, Elementwise] = {
    # activations
    "tanh.default": _unary("k_tanhf({0})"),
    "sigmoid.default": _unary("k_sigmoidf({0})"),
    "silu.default": _unary("({0} * k_sigmoidf({0}))"),
    "relu.default": _unary("k_select({0} < 0.0f, 0.0f, {0})"),
    "elu.default": Elementwise("k_eluf({0}, {1}, {2}, {3})", ("self", "alpha", "scale", "input_scale")),
    "leaky_relu.default": Elementwise("k_select({0} > 0.0f, {0}, {0} * {1})", ("self", "negative_slope")),
    "softplus.default": Elementwise("k_softplusf({0}, {1}, {2})", ("self", "beta", "threshold")),
    "hardtanh.default": Elementwise("k_maxf({1}, k_minf({0}, {2}))", ("self", "min_val", "max_val")),
    # functions
    "exp.default": _unary("k_expf({0})"),
    "expm1.default": _unary("k_expm1f({0})"),
    "log.default": _unary("k_logf({0})"),
    "log1p.default": _unary("k_log1pf({0})"),
    "sqrt.default": _unary("sqrtf({0})"),
    "rsqrt.default": _unary("(1.0f / sqrtf({0}))"),
    "reciprocal.default": _unary("(1.0f / {0})"),
    "abs.default": _unary("fabsf({0})"),
    "neg.default": _unary("(-{0})", integer=True),
    "sign.default": _unary("k_signf({0})"),
    "floor.default": _unary("floorf({0})"),
    "ceil.default": _unary("ceilf({0})"),
    "trunc.default": _unary("truncf({0})"),
    "round.default": _unary("rintf({0})"),
    "sin.default": _unary("sinf({0})"),
    "cos.default": _unary("cosf({0})"),
    "tan.default": _unary("tanf({0})"),
    "asin.default": _unary("asinf({0})"),
    "acos.default": _unary("acosf({0})"),
    "atan.default": _unary("atanf({0})"),
    "sinh.default": _unary("sinhf({0})"),
    "cosh.default": _unary("coshf({0})"),
    "atanh.default": _unary("(0.5f * (k_log1pf({0}) - k_log1pf(-{0})))"),
    "erf.default": _unary("k_erff({0})"),
    "atan2.default": _binary("atan2f({0}, {1})", integer=False),
    "fmod.Tensor": _binary("fmodf({0}, {1})", integer=False),
    "fmod.Scalar": _binary("fmodf({0}, {1})", integer=False),
    "pow.Tensor_Tensor": Elementwise("powf({0}, {1})", ("self", "exponent")),
    # arithmetic
    "mul.Tensor": _binary("({0} * {1})"),
    "mul.Scalar": _binary("({0} * {1})"),
    "div.Tensor": _binary("({0} / {1})", integer=False),
    "div.Scalar": _binary("({0} / {1})", integer=False),
    "maximum.default": _binary("k_maxf({0}, {1})", integer=False),
    "minimum.default": _binary("k_minf({0}, {1})", integer=False),
    # comparisons and logic
    "gt.Tensor": _binary("({0} > {1})", "compare"),
    "gt.Scalar": _binary("({0} > {1})", "compare"),
    "ge.Tensor": _binary("({0} >= {1})", "compare"),
    "ge.Scalar": _binary("({0} >= {1})", "compare"),
    "lt.Tensor": _binary("({0} < {1})", "compare"),
    "lt.Scalar": _binary("({0} < {1})", "compare"),
    "le.Tensor": _binary("({0} <= {1})", "compare"),
    "le.Scalar": _binary("({0} <= {1})", "compare"),
    "eq.Tensor": _binary("({0} == {1})", "compare"),
    "eq.Scalar": _binary("({0} == {1})", "compare"),
    "ne.Tensor": _binary("({0} != {1})", "compare"),
    "ne.Scalar": _binary("({0} != {1})", "compare"),
    "isnan.default": Elementwise("({0} != {0})", kind="compare"),
    "isinf.default": Elementwise("(fabsf({0}) > 3.402823466e+38f)", kind="compare"),
    "logical_and.default": _binary("({0} & {1})", "logic"),
    "logical_or.default": _binary("({0} | {1})", "logic"),
    "logical_xor.default": _binary("({0} ^ {1})", "logic"),
    "logical_not.default": Elementwise("(!{0})", kind="logic", integer=True),
}
"""``add sub rsub where clamp pow gelu`` and type conversions take arguments of their own: see ``elementwise.py``."""

VIEWS = frozenset(
    "view.default _unsafe_view.default reshape.default permute.default transpose.int t.default expand.default "
    "slice.Tensor select.int squeeze.default squeeze.dim squeeze.dims unsqueeze.default split_with_sizes.default "
    "split.Tensor unbind.int getitem alias.default detach.default flip.default lift_fresh_copy.default".split()
)
"""Operations that only look at their operand another way."""
