"""Small programs, one an operation or a few, that every generated backend must compute as eager does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn

from graphrl.compiler.backends.base import Backend
from graphrl.compiler.program import Program
from graphrl.compiler.trace import trace
from graphrl.graph import KeyedGraph

B = 3


@dataclass(frozen=True)
class Case:
    """``fn`` of ``inputs`` tensors shaped [3, 7]; ``positive`` draws them from (0, 2)."""

    name: str
    fn: Callable[..., Tensor]
    inputs: int = 1
    positive: bool = False
    tolerance: float = 2e-6

    def program(self) -> Program:
        keys = [f"x{i}" for i in range(self.inputs)]
        graph = KeyedGraph((self.fn, keys, ["y"]))
        return trace(graph, TensorDict(dict(zip(keys, self.values(), strict=True)), batch_size=[B]))

    def values(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        made = [torch.randn(B, 7, generator=generator) * 2 for _ in range(self.inputs)]
        return [x.abs() + 0.01 for x in made] if self.positive else made


def run_together(
    chosen_from: list[Case], backend: Backend, prepare: Callable[[Program], Program]
) -> dict[str, tuple[Tensor, Tensor]]:
    """All cases as one program for each kind of input, so that they also share scratch memory: (found, wanted)."""
    results = {}
    for positive in (False, True):
        chosen = [c for c in chosen_from if c.positive == positive]
        graph = KeyedGraph(*((c.fn, ["x0", "x1"][: c.inputs], [c.name]) for c in chosen))
        widest = max(chosen, key=lambda c: c.inputs)
        inputs = TensorDict(dict(zip(("x0", "x1"), widest.values(), strict=True)), batch_size=[3])
        program = prepare(trace(graph, inputs))
        arguments = program.arguments([inputs[k] for k in program.in_keys])
        found, wanted = backend.lower(program)(arguments), program.graph_module(*arguments)
        results.update(dict(zip(program.out_keys, zip(found, wanted, strict=True), strict=True)))
    return results


def assert_equal(case: Case, found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    assert ((found.double() - wanted.double()).abs() <= case.tolerance * (1 + wanted.double().abs())).all()


def cases() -> list[Case]:
    return [*_unary(), *_binary(), *_moves(), *_reductions(), *_products(), *_layers()]


def _unary() -> list[Case]:
    plain = {
        "tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu": torch.relu, "silu": F.silu, "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "elu": F.elu, "elu_alpha": lambda x: F.elu(x, 0.5),
        "selu": F.selu, "celu": lambda x: F.celu(x, 2.0), "softplus": F.softplus, "leaky_relu": F.leaky_relu,
        "hardtanh": F.hardtanh, "relu6": F.relu6, "hardswish": F.hardswish, "hardsigmoid": F.hardsigmoid,
        "mish": F.mish, "softsign": F.softsign, "logsigmoid": F.logsigmoid, "exp": torch.exp, "expm1": torch.expm1,
        "abs": torch.abs, "neg": torch.neg, "sign": torch.sign, "floor": torch.floor, "ceil": torch.ceil,
        "round": torch.round, "trunc": torch.trunc, "sin": torch.sin, "cos": torch.cos, "atan": torch.atan,
        "erf": torch.erf, "square": torch.square, "cube": lambda x: x**3, "reciprocal": torch.reciprocal,
        "clamp": lambda x: x.clamp(-1, 0.5), "clamp_min": lambda x: x.clamp_min(0.25),
        "clamp_max": lambda x: x.clamp_max(0.25), "affine": lambda x: 3 - x * 0.1 + 7,
        "floor_divide": lambda x: torch.div(x, 0.7, rounding_mode="floor"), "nan_to_num": torch.nan_to_num,
        "floor_divide_by_tenths": lambda x: torch.div(x.round(), 0.1, rounding_mode="floor"),
        "remainder": lambda x: x % 0.7 + (x * 8).round() % -0.5,
        "cast": lambda x: (x > 0).float() + (x * 10).to(torch.int64).to(torch.float32),
    }  # fmt: skip
    positive = {"log": torch.log, "log1p": torch.log1p, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt,
                "power": lambda x: x**1.7, "power_of": lambda x: 1.3**x}  # fmt: skip
    return [Case(n, f) for n, f in plain.items()] + [Case(n, f, positive=True) for n, f in positive.items()]


def _binary() -> list[Case]:
    return [
        Case("add", lambda a, b: a + b, 2),
        Case("sub_alpha", lambda a, b: torch.sub(a, b, alpha=0.3), 2),
        Case("mul", lambda a, b: a * b, 2),
        Case("div", lambda a, b: a / b, 2, positive=True),
        Case("minimum", torch.minimum, 2),
        Case("maximum", torch.maximum, 2),
        Case("atan2", torch.atan2, 2),
        Case("remainder_of_tensors", torch.remainder, 2),
        Case("floor_divide_tensors", torch.floor_divide, 2),
        Case("pow", torch.pow, 2, positive=True, tolerance=5e-6),
        Case("where", lambda a, b: torch.where(a > b, a, b - 1), 2),
        Case("logic", lambda a, b: torch.where(((a > 0) & (b > 0)) | ~(a <= b), a, 0.0), 2),
        Case("compare", lambda a, b: (a >= b).float() + (a != b) + (a == 1.0), 2),
        Case("broadcast_row", lambda a, b: a * b[0], 2),
        Case("broadcast_column", lambda a, b: a - b[:, :1], 2),
        Case("broadcast_outer", lambda a, b: a[:, :, None] + b[:, None, :3], 2),
        Case("broadcast_scalar", lambda a: a * torch.tensor(2.5) + a[:1, :1]),
        Case("transposed", lambda a, b: (a.t() + b.t()).t(), 2),
        Case("lerp", lambda a, b: torch.lerp(a, b, 0.3), 2),
        Case("addcmul", lambda a, b: torch.addcmul(a, a, b, value=0.5), 2),
        Case("clamp_tensor", lambda a, b: torch.clamp(a, b - 1, b + 1), 2),
    ]


def _moves() -> list[Case]:
    return [
        Case("cat", lambda a, b: torch.cat([a, b[:, 1:3], a[:, :1]], -1), 2),
        Case("stack", lambda a, b: torch.stack([a, b], 1), 2),
        Case("slice_step", lambda a: a[:, 1:6:2]),
        Case("select", lambda a: a[:, 3]),
        Case("chunk", lambda a: a.chunk(3, -1)[1] * 2),
        Case("unbind", lambda a: a.unbind(-1)[2] + 1),
        Case("view", lambda a: a.view(B, 7, 1).permute(0, 2, 1).reshape(B, 7)),
        Case("permute_copy", lambda a, b: torch.einsum("bi,bj->bij", a, b).permute(0, 2, 1).reshape(B, -1), 2),
        Case("expand", lambda a: a.unsqueeze(1).expand(B, 2, 7).reshape(B, 14)),
        Case("flip", lambda a: a.flip(-1) + a),
        Case("roll", lambda a: torch.roll(a, 2, -1)),
        Case("repeat", lambda a: a.repeat(1, 3)),
        Case("gather_columns", lambda a: a[:, [4, 0, 0, 6]]),
        Case("gather", lambda a: a.gather(-1, a.argmax(-1, keepdim=True))),
        Case("pad", lambda a: F.pad(a, (1, 2), value=0.5)),
        Case("constants", lambda a: a + torch.arange(7) + torch.full((7,), 0.5) + torch.ones(B, 1)),
        Case("passes_through", lambda a: a),
    ]


def _reductions() -> list[Case]:
    return [
        Case("sum", lambda a: a.sum(-1)),
        Case("sum_first", lambda a: a - a.sum(0)),
        Case("sum_all", lambda a: a + a.sum()),
        Case("mean", lambda a: a.mean(-1, keepdim=True)),
        Case("amax", lambda a: a.amax(-1)),
        Case("amin", lambda a: a.amin(0, keepdim=True) + a),
        Case("max_dim", lambda a: a.max(-1).values * a.min(-1).indices),
        Case("argmax", lambda a: a.argmax(-1)),
        Case("argmin", lambda a: a.argmin(-1)),
        Case("prod", lambda a: a.prod(-1)),
        Case("var", lambda a: a.var(-1)),
        Case("std_biased", lambda a: a.std(-1, correction=0)),
        Case("norm", lambda a: torch.linalg.vector_norm(a, dim=-1)),
        Case("any_all", lambda a: (a > 1).any(-1) & ~(a > 0).all(-1)),
        Case("softmax", lambda a: a.softmax(-1)),
        Case("softmax_first", lambda a: a.softmax(0)),
        Case("log_softmax", lambda a: a.log_softmax(-1)),
        Case("logsumexp", lambda a: a.logsumexp(-1)),
        Case("cumsum", lambda a: a.cumsum(-1)),
        Case("layer_norm", lambda a: F.layer_norm(a, (7,)), tolerance=4e-6),
    ]


def _products() -> list[Case]:
    weight = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    return [
        Case("linear", lambda a: F.linear(a, weight, weight[:, 0])),
        Case("linear_no_bias", lambda a: a @ weight.t()),
        Case("linear_rows", lambda a: a @ weight.t().contiguous()),
        Case("linear_deep", lambda a: F.linear(a.view(B, 1, 7), weight, weight[:, 0])),
        Case("gram", lambda a, b: a @ b.t(), 2),
        Case("bmm", lambda a, b: torch.bmm(a.view(B, 7, 1), b.view(B, 1, 7)), 2),
        Case("ensemble", lambda a: torch.einsum("bi,eoi->beo", a, torch.stack([weight, weight * 2]))),
        Case("vector", lambda a: a @ weight[0]),
        Case("one_weight", lambda a: a * weight[1, 2:3] + weight[2:3, 1]),  # views into a table, one number each
    ]


def _layers() -> list[Case]:
    torch.manual_seed(2)
    lstm, gru = nn.LSTMCell(7, 4), nn.GRUCell(7, 4)
    norm = nn.Sequential(nn.Linear(7, 9), nn.LayerNorm(9), nn.SiLU(), nn.Linear(9, 2))
    with torch.no_grad():
        norm[1].weight.uniform_(0.5, 2)
        norm[1].bias.uniform_(-1, 1)
    wide = nn.Sequential(nn.Linear(7, 65), nn.Tanh(), nn.Linear(65, 81), nn.ELU(), nn.Linear(81, 1), nn.Tanh())
    return [
        Case("lstm", lambda a: torch.cat(lstm(a), -1)),
        Case("gru", lambda a, b: gru(a, b[:, :4]), 2),
        Case("normed_mlp", lambda a: norm(a), tolerance=5e-6),
        Case("wide_mlp", lambda a: wide(a)),
    ]
