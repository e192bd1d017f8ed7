"""Each operation of the numpy runtime against torch: value, shape and dtype, on the arguments ATen itself takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graphrl.compiler.bundle.runtime import OPERATIONS

G = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=G)


X, Y, P = normal(3, 5) * 2, normal(3, 5) * 2, normal(3, 5).abs() + 0.01
ROW, ONE, WIDE = normal(5), normal(()), normal(()).double()
INT, FLAG = torch.randint(-9, 9, (3, 5), generator=G), X > 0
TIES = torch.tensor([[1.0, 3.0, 3.0, -1.0, 0.0], [2.0, 2.0, 2.0, 2.0, 2.0], [0.0, -0.0, 5.0, 5.0, 1.0]])
ODD = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -3e38])
A, B, SQUARE = normal(2, 3, 4), normal(2, 4, 5), normal(5, 5)
IMAGE, INDEX = normal(1, 4, 9, 8), torch.tensor([[0, 4], [2, 2], [1, 3]])
f32, f64, i64 = torch.float32, torch.float64, torch.int64

UNARY = {
    "tanh sigmoid silu relu exp expm1 exp2 sin cos tan atan sinh cosh asinh erf erfc abs neg sign floor ceil trunc "
    "round reciprocal isnan isinf isfinite signbit": [(X,), (ONE,), (ODD,)],
    "log log2 log10 log1p sqrt rsqrt": [(P,), (ODD,)], "acosh": [(P + 1,)], "asin acos atanh": [(X.tanh(),)],
    "exp sqrt tanh abs neg sign floor ceil round logical_not bitwise_not": [(INT.abs(),)],
    "logical_not bitwise_not sign": [(FLAG,)], "t": [(X,), (ROW,)], "squeeze": [(X[None, :1],), (ONE,)],
    "alias detach clone lift_fresh_copy": [(X,)], "sum mean prod": [(X,), (ONE,)],
    "sum prod any all": [(FLAG,), (INT,)],
    "max min argmax argmin amax amin": [(X,), (ONE,), (TIES[0],)], "any all": [(X,)], "gelu": [(X,)],
    "zeros_like ones_like": [(X,), (INT,)],
}  # fmt: skip
BINARY = {
    "add sub mul div maximum minimum gt lt ge le eq ne fmod remainder atan2 hypot copysign":
        [(X, Y), (X, ROW), (X, ONE), (X, WIDE), (X.double(), X)],
    "add sub mul gt lt ge le eq ne maximum minimum": [(INT, INT[0]), (X, INT)],
    "fmod remainder": [(INT, INT.abs() + 2)],
    "mul maximum eq": [(FLAG, ~FLAG)], "add": [(FLAG, FLAG)], "div atan2": [(INT, INT.abs() + 1)],
    "logical_and logical_or logical_xor": [(FLAG, X > Y), (X, FLAG)],
    "bitwise_and bitwise_or bitwise_xor": [(FLAG, X > Y), (INT, INT[0])], "mm": [(X, SQUARE)], "matmul": [(A, B)],
    "bmm": [(A, B)], "mv": [(X, ROW)], "dot": [(ROW, ROW)],
}  # fmt: skip
SCALAR = ["add mul sub div gt lt ge le eq ne fmod remainder rsub".split(), [2, 0.3, -1.5]]

CASES: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("add.Tensor", (X, Y), {"alpha": 0.3}), ("sub.Tensor", (X, Y), {"alpha": 2}), ("rsub.Tensor", (X, Y), {"alpha": 2}),
    ("rsub.Scalar", (X, 1.0), {}), ("div.Tensor_mode", (X, Y), {"rounding_mode": "floor"}),
    ("div.Tensor_mode", (X, Y), {"rounding_mode": "trunc"}), ("div.Scalar_mode", (INT, 3), {"rounding_mode": "floor"}),
    ("div.Scalar_mode", (INT, 3), {"rounding_mode": "trunc"}), ("div.Tensor_mode", (X, Y), {"rounding_mode": None}),
    *[("pow.Tensor_Scalar", (P, e), {}) for e in (2, 3, 0.5, -1, 1.7)], ("pow.Tensor_Scalar", (INT, 2), {}),
    ("pow.Scalar", (1.3, X), {}), ("pow.Tensor_Tensor", (P, Y), {}), ("copysign.Scalar", (X, -1), {}),
    ("bitwise_and.Scalar", (INT, 3), {}), ("bitwise_or.Scalar", (INT, 3), {}), ("bitwise_xor.Scalar", (INT, 3), {}),
    ("__lshift__.Scalar", (INT, 2), {}), ("__rshift__.Scalar", (INT, 1), {}),
    ("__lshift__.Tensor", (INT, INT.abs()), {}),
    ("__rshift__.Tensor", (INT, INT.abs()), {}), ("remainder.Scalar_Tensor", (7, INT.abs() + 1), {}),
    ("clamp.default", (X, -0.5, 0.7), {}), ("clamp.default", (X, None, 0.7), {}), ("clamp.default", (ODD, -1, 1), {}),
    ("clamp.default", (INT, -2, 3), {}), ("clamp.Tensor", (X, Y - 1, Y + 1), {}), ("clamp_min.default", (X, 0.2), {}),
    ("clamp_min.Tensor", (X, Y), {}), ("clamp_max.default", (X, 0.2), {}), ("clamp_max.Tensor", (X, Y), {}),
    ("hardtanh.default", (X, -0.5, 2.0), {}), ("hardtanh.default", (X,), {}), ("elu.default", (X,), {}),
    ("elu.default", (X, 0.5, 1.1, 2.0), {}), ("leaky_relu.default", (X,), {}), ("leaky_relu.default", (X, 0.2), {}),
    ("softplus.default", (X * 20,), {}), ("softplus.default", (X, 2.0, 3.0), {}),
    ("gelu.default", (X,), {"approximate": "tanh"}), ("round.decimals", (X,), {"decimals": 2}),
    ("where.self", (FLAG, X, Y), {}), ("where.self", (FLAG, X, ONE), {}), ("where.self", (FLAG, INT, X), {}),
    ("where.ScalarSelf", (FLAG, 1.0, X), {}), ("where.ScalarOther", (FLAG, X, 2), {}),
    ("where.Scalar", (FLAG, 1, 0.5), {}),
    ("_softmax.default", (X, -1, False), {}), ("_softmax.default", (X * 50, 0, False), {}),
    ("_log_softmax.default", (X, 1, False), {}), ("_softmax.default", (ONE, 0, False), {}),
    ("_log_softmax.default", (ONE, 0, False), {}),
    # shapes
    ("view.default", (X, [5, -1]), {}), ("reshape.default", (X, [15]), {}),
    ("_unsafe_view.default", (X, [1, 3, 5]), {}),
    ("permute.default", (A, [2, 0, 1]), {}), ("transpose.int", (A, 0, -1), {}), ("unsqueeze.default", (X, -1), {}),
    ("squeeze.dim", (X[:1], 0), {}), ("squeeze.dim", (X, 0), {}), ("squeeze.dims", (X[:1, None], [0, 1]), {}),
    ("expand.default", (X[:1], [2, 4, -1]), {}), ("cat.default", ([X, Y], -1), {}), ("cat.default", ([X, INT],), {}),
    ("cat.default", ([torch.zeros(0), X], 0), {}), ("split_with_sizes.default", (X, [2, 3], 1), {}),
    ("split.Tensor", (X, 2, -1), {}), ("slice.Tensor", (X, -1, 1, 9223372036854775807, 2), {}),
    ("slice.Tensor", (X, 1, -2), {}), ("slice_scatter.default", (X, Y[:, :2], 1, 1, 3), {}),
    ("select.int", (X, 1, -1), {}), ("select_scatter.default", (X, Y[:, 0], 1, 2), {}), ("unbind.int", (A, 1), {}),
    ("flip.default", (A, [0, -1]), {}), ("roll.default", (X, [2], [-1]), {}), ("roll.default", (X, [2]), {}),
    ("repeat.default", (X, [2, 1, 3]), {}), ("diagonal.default", (A, 1, 1, 2), {}), ("diagonal.default", (SQUARE,), {}),
    ("constant_pad_nd.default", (X, [1, 2], 0.5), {}), ("constant_pad_nd.default", (A, [-1, 2, 0, -1]), {}),
    ("unfold.default", (X, -1, 3, 2), {}), ("index.Tensor", (X, [None, INDEX]), {}),
    ("index.Tensor", (A, [INDEX[:2, 0] % 2, None, INDEX[:2, 1] % 4]), {}), ("index.Tensor", (X, [INDEX[:, 0] % 3]), {}),
    ("index_put.default", (X, [INDEX[:, 0] % 3, INDEX[:, 1]], Y[:, 0]), {}),
    ("index_put.default", (X, [None, torch.tensor([1, 1])], Y[:, :2], True), {}),
    ("index_select.default", (X, 1, INDEX[:, 1]), {}), ("gather.default", (X, 1, INDEX), {}),
    ("gather.default", (X, 0, INDEX[:2] % 3), {}), ("scatter.value", (X, 1, INDEX[:, :1], 9.0), {}),
    ("scatter.src", (X, 1, INDEX[:2], Y), {}), ("scatter_add.default", (X, 1, INDEX, Y), {}),
    ("embedding.default", (SQUARE, INDEX), {}), ("embedding.default", (SQUARE, INDEX, -1, False, False), {}),
    ("bucketize.Tensor", (X, torch.tensor([-1.0, 0.0, 1.0])), {}),
    ("bucketize.Tensor", (TIES, torch.tensor([0.0, 2.0])), {"right": True, "out_int32": True}),
    ("_to_copy.default", (X,), {"dtype": i64}), ("_to_copy.default", (FLAG,), {"dtype": f32}),
    ("_to_copy.default", (X,), {"dtype": torch.bool}), ("copy.default", (X, INT[:1]), {}),
    # made from nothing
    ("full.default", ([2, 3], 0.5), {}), ("full.default", ([2], 3), {}), ("full.default", ([2], True), {}),
    ("full.default", ([], 1), {"dtype": f32, "device": torch.device("cpu"), "pin_memory": False}),
    ("full_like.default", (X, 3), {}), ("full_like.default", (X, 3), {"dtype": i64}), ("zeros.default", ([2, 3],), {}),
    ("ones.default", ([2, 3],), {"dtype": i64}), ("new_zeros.default", (INT, [2, 2]), {}),
    ("new_ones.default", (X, [2, 2]), {}), ("new_full.default", (X, [2, 2], 4), {}),
    ("scalar_tensor.default", (2,), {}),
    ("scalar_tensor.default", (2.5,), {"dtype": f64}), ("arange.default", (5,), {}), ("arange.start", (1, 5), {}),
    ("arange.start_step", (0, 6, 2), {"dtype": f32}), ("arange.start_step", (0.0, 1.0, 0.25), {}),
    # reductions
    *[(f"{n}.{o}", (X, d, k), {}) for n, o, d in (("sum", "dim_IntList", [1]), ("mean", "dim", [0, -1]),
      ("amax", "default", [1]), ("amin", "default", [0]), ("any", "dims", [0, 1]), ("all", "dims", [1]),
    ("max", "dim", 1),
      ("min", "dim", 0), ("argmax", "default", 1), ("argmin", "default", 0), ("prod", "dim_int", 1), ("any", "dim", 0),
      ("all", "dim", 1)) for k in (False, True)],
    ("sum.dim_IntList", (INT, [0]), {}), ("sum.dim_IntList", (X, None), {"dtype": f64}),
    ("sum.dim_IntList", (X, []), {}),
    ("prod.dim_int", (FLAG, 0), {}), ("max.dim", (TIES, 1), {}), ("argmax.default", (TIES, -1, True), {}),
    ("var.correction", (X, [1]), {"correction": 0}), ("var.correction", (X, None), {}),
    ("var.correction", (X, [0]), {"keepdim": True}),
    ("var_mean.correction", (X, [1]), {"correction": 1, "keepdim": True}),
    *[("linalg_vector_norm.default", (X, n, [1], True), {}) for n in (2, 1, 3.0, float("inf"), -float("inf"), 0)],
    ("linalg_vector_norm.default", (X,), {}), ("cumsum.default", (X, 1), {}), ("cumsum.default", (FLAG, 0), {}),
    ("cumprod.default", (X, 0), {}), ("sort.default", (X, 0, True), {}), ("sort.default", (X,), {}),
    ("sort.stable", (TIES,), {"stable": True, "dim": -1, "descending": True}), ("topk.default", (X, 3), {}),
    ("topk.default", (X, 2, 0, False, True), {}),
    # layers
    ("addmm.default", (ROW, X, SQUARE), {}), ("addmm.default", (X, X, SQUARE), {"beta": 0.5, "alpha": 2}),
    ("addmv.default", (Y[:, 0], X, ROW), {}), ("baddbmm.default", (normal(2, 3, 5), A, B), {}),
    ("native_layer_norm.default", (X, [5], ROW, ROW, 1e-5), {}),
    ("native_layer_norm.default", (A, [3, 4], None, None, 0.1), {}),
    ("native_group_norm.default", (IMAGE, ROW[:4], ROW[1:], 1, 4, 72, 2, 1e-5), {}),
    ("_native_batch_norm_legit_no_training.default", (IMAGE, ROW[:4], ROW[1:], ROW[:4], P[0, :4], 0.1, 1e-5), {}),
    ("_native_batch_norm_legit.no_stats", (IMAGE, None, None, True, 0.1, 1e-5), {}),
    ("convolution.default", (IMAGE, normal(6, 4, 3, 3), normal(6), [2, 1], [1, 0], [1, 2], False, [0, 0], 1), {}),
    ("convolution.default", (IMAGE, normal(6, 2, 3, 3), None, [1], [0], [1], False, [0], 2), {}),
    ("convolution.default", (IMAGE[0], normal(3, 9, 3), normal(3), [1], [1], [1], False, [0], 1), {}),
    ("convolution.default", (IMAGE, normal(4, 3, 3, 2), normal(6), [2, 3], [1, 0], [1, 2], True, [1, 2], 2), {}),
    ("convolution.default", (IMAGE, normal(4, 3, 1, 1), None, [1, 1], [1, 1], [1, 1], True, [0, 0], 1), {}),
    ("max_pool2d_with_indices.default", (IMAGE, [3, 2], [2, 2], [1, 1], [1, 1], True), {}),
    ("max_pool2d_with_indices.default", (IMAGE, [2, 2]), {}),
    ("max_pool2d_with_indices.default", (IMAGE, [2, 2], [3, 3], [1, 1], [2, 2]), {}),
    ("max_pool3d_with_indices.default", (normal(1, 2, 4, 5, 6), [2, 2, 2]), {}), ("avg_pool1d.default", (A, [2]), {}),
    ("avg_pool2d.default", (IMAGE, [3, 3], [2, 2], [1, 1], True), {}),
    ("avg_pool2d.default", (IMAGE, [3, 3], [2, 2], [1, 1], True, False), {}),
    ("avg_pool2d.default", (IMAGE, [2, 2], [], [0, 0], False, True, 3), {}),
    ("avg_pool3d.default", (normal(1, 2, 4, 5, 6), [2, 2, 2]), {}),
    ("_adaptive_avg_pool2d.default", (IMAGE, [4, 3]), {}),
    ("_adaptive_avg_pool3d.default", (normal(1, 2, 4, 5, 6), [3, 1, 2]), {}),
]  # fmt: skip


def _overload(name: str, arguments: tuple[Any, ...]) -> str:
    """The overload torch itself picks for a call of ``name``."""
    packet = getattr(torch.ops.aten, name)
    wanted = "Tensor" if len(arguments) == 2 and isinstance(arguments[1], Tensor) else "Scalar"
    return wanted if wanted in packet.overloads() and len(arguments) == 2 else "default"


for table in (UNARY, BINARY):
    CASES += [(f"{n}.{_overload(n, a)}", a, {}) for names, rows in table.items() for n in names.split() for a in rows]
CASES += [(f"{n}.Scalar", (t, v), {}) for n in SCALAR[0] for v in SCALAR[1] for t in (X, ONE)]
CASES += [(f"{n}.Tensor", (INT, v), {}) for n in ("add", "mul", "sub", "div") for v in (2, 0.5)]


def as_numpy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.numpy()
    if isinstance(value, (list, tuple)):
        return [as_numpy(v) for v in value]
    if isinstance(value, torch.dtype):
        return np.dtype(str(value).removeprefix("torch."))
    return None if isinstance(value, torch.device) else value


@pytest.mark.parametrize(("name", "args", "kwargs"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_an_operation_computes_as_torch_does(name: str, args: Any, kwargs: Any) -> None:
    base, overload = name.rsplit(".", 1)
    wanted = getattr(getattr(torch.ops.aten, base), overload)(*args, **kwargs)
    with np.errstate(all="ignore"):
        found = OPERATIONS[f"aten.{name}"](*(as_numpy(a) for a in args), **{k: as_numpy(v) for k, v in kwargs.items()})
    several = isinstance(wanted, (tuple, list))
    pairs = list(zip(found, wanted, strict=False)) if several else [(found, wanted)]
    assert pairs and (not several or len(found) == len(wanted) or "pool" in name or "batch_norm" in name)
    for mine, theirs in pairs:
        assert str(theirs.dtype).removeprefix("torch.") == mine.dtype.name and mine.shape == theirs.shape
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=3e-6, atol=1e-6)


def test_every_operation_is_tested() -> None:
    tested = {f"aten.{name}" for name, _, _ in CASES}
    unknown_values = {"aten.empty.memory_format", "aten.empty_like.default"}  # torch leaves them unwritten
    assert set(OPERATIONS) - tested - unknown_values == {"getitem"}
