"""The numerical kernels beside what other libraries do for the same numbers, which are compared before they are timed.

``error`` is that of every competitor against this library's result in float64.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from graphrl.bench import gae_peers, return_peers, tree_peers
from graphrl.bench.tables import BenchOptions, installed, measure
from graphrl.compiler.benchmark import BenchmarkTable, refused_row
from graphrl.compiler.verify import relative_error
from graphrl.kernels import SumTree, categorical_projection, discounted_sum, gae, n_step_return, td_lambda, vtrace

__all__ = ["suite"]

GAMMA, LMBDA, N = gae_peers.GAMMA, gae_peers.LMBDA, 3
GAE_SIZES = ((8, 128), (64, 2048), (1000, 1000), (4096, 32), (1, 1_000_000))
UNROLLED = 128  # steps up to which torch.compile gets through a loop over time
LOOPED = 10_000  # steps up to which a loop in Python is timed

Make = Callable[[], Callable[[], Any]]
Peer = tuple[str, bool, Make | str]  # the package, whether it runs on a GPU, and how to make it or why it is left out

NOTES = {
    "GAE 8 x 128": {
        "graphrl": "a tenth of the call is arithmetic, two fifths are what torch takes to make the two results; "
        "numba is handed numpy arrays that were made in advance"
    }
}
"""Remarks below a table, by its title and row: why a row of ours is slower than a peer's."""


def suite(
    options: BenchOptions,
    gae_sizes: Sequence[tuple[int, int]] = GAE_SIZES,
    size: int = 1000,
    rows: int = 4096,
    capacity: int = 1_000_000,
) -> list[BenchmarkTable]:
    """GAE at several sizes, the other returns on ``size`` x ``size`` steps, C51's projection, the sum tree."""
    # glibc returns large blocks to the system, at a page fault per 4 KiB, until it has seen a larger one freed.
    torch.empty(16 << 20, dtype=torch.uint8).fill_(0)
    tables = [_gae(*shape, options) for shape in gae_sizes]
    return [*tables, *_returns(size, options), _projection(rows, 51, options), *_sum_tree(capacity, 256, options)]


# ---- the parts of a table


def _table(
    title: str,
    makers: Mapping[str, Make | str],
    reference: Sequence[Tensor] | None,
    options: BenchOptions,
    last: Mapping[str, Make] | None = None,
) -> BenchmarkTable:
    """Make the competitors, compare what they return, and time them. A string is the reason why one is left out.

    last: not compared, and after all others.
    """
    runs: dict[str, Callable[[], Any]] = {}
    errors: dict[str, float] = {}
    seconds: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name, make in makers.items():
        start = time.perf_counter()
        try:
            if isinstance(make, str):
                raise _LeftOut(make)
            run = make()
            found = run()
        except Exception as why:  # a peer that does not load or work on this machine has its reason in the table
            if name == "graphrl":
                raise
            refused[name] = textwrap.shorten(str(why), 160) or type(why).__name__
            continue
        runs[name] = run
        if "compile" in name:
            seconds[name] = time.perf_counter() - start
        if reference is not None:
            errors[name] = _error(found, reference)
    runs |= {name: make() for name, make in (last or {}).items()}
    options = replace(options, threads=None)
    table = measure(f"{title}, per call", runs, options, compile_s=seconds, errors=errors, notes=NOTES.get(title))
    return replace(table, rows=(*table.rows, *(refused_row(name, why) for name, why in refused.items())))


class _LeftOut(Exception):
    pass


def _error(found: Any, reference: Sequence[Tensor]) -> float:
    several = found if isinstance(found, (tuple, list)) else (found,)
    tensors = [torch.as_tensor(x) for x in several]
    return max(relative_error(x.reshape(y.shape).to(y.device), y) for x, y in zip(tensors, reference, strict=True))


def _wanted(peers: Mapping[str, Peer], options: BenchOptions) -> dict[str, Make | str]:
    """The peers that this run is to have; a missing package is a reason."""
    wanted: dict[str, Make | str] = {}
    for name, (package, gpu, make) in peers.items():
        own = package in ("numpy", "torch")
        if (options.device == "cpu" or gpu) and (own or options.peers):
            there = own or installed(package, options)
            wanted[name] = make if there else f"{package} is not installed: pip install 'graphrl[peers]'"
    return wanted


def _copy(tensors: Sequence[Tensor]) -> dict[str, Make]:
    """The floor: as many bytes as a call reads and writes. Last, as OpenMP's threads spin on for a while afterwards,
    on the cores of whoever comes next."""
    into = [torch.empty_like(x) for x in tensors]
    return {"torch copy of the same bytes": lambda: lambda: [y.copy_(x) for x, y in zip(tensors, into, strict=True)]}


def _rollout(rows: int, steps: int, device: str) -> tuple[Tensor, ...]:
    """reward, value, next_value, done, terminated: [rows, steps, 1], done with probability .001."""
    generator = torch.Generator().manual_seed(0)
    shape = (rows, steps, 1)
    floats = [torch.randn(shape, generator=generator).to(device) for _ in range(3)]
    terminated, truncated = ((torch.rand(shape, generator=generator) < 0.0005).to(device) for _ in range(2))
    return (*floats, terminated | truncated, terminated)


def _double(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.double() if x.is_floating_point() else x for x in tensors]


def _float(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.float() if x.is_floating_point() else x for x in tensors]


# ---- the tables


def _gae(rows: int, steps: int, options: BenchOptions) -> BenchmarkTable:
    data = _rollout(rows, steps, options.device)
    looped = "" if steps <= LOOPED else f"left out: tens of seconds a call over {steps} steps"
    unrolled: Make | str = lambda: gae_peers.unrolled(data)  # noqa: E731
    if steps > UNROLLED:
        unrolled = f"left out: a loop over {steps} steps unrolls into more than torch.compile gets through"
    peers: dict[str, Peer] = {
        "numba loop": ("numba", False, lambda: gae_peers.numba_loop(data)),
        "numpy, loop over time": ("numpy", False, looped or (lambda: gae_peers.numpy_loop(data))),
        "scipy lfilter, each trajectory": ("scipy", False, lambda: gae_peers.lfilter(data)),
        "torchrl, loop": ("torchrl", True, looped or (lambda: gae_peers.torchrl(data, False))),
        "torchrl, vectorised": ("torchrl", True, looped or (lambda: gae_peers.torchrl(data, True))),
        "torch.compile of a loop over time": ("torch", True, unrolled),
    }
    return _over_trajectories(f"GAE {rows} x {steps}", gae, data, (GAMMA, LMBDA), peers, options)


def _returns(size: int, options: BenchOptions) -> list[BenchmarkTable]:
    reward, value, next_value, done, terminated = _rollout(size, size, options.device)
    ratio = (0.3 * torch.randn(reward.shape, generator=torch.Generator().manual_seed(1))).exp().to(options.device)
    td = (reward, next_value, done, terminated)
    cuts = (reward, done, terminated)
    vt = (reward, value, next_value, done, terminated, ratio)
    of_torchrl = (GAMMA, ratio.log(), torch.zeros_like(ratio), value, next_value, reward, done, terminated)
    peers, torchrl = return_peers, return_peers.torchrl
    loop, loops = "numpy, loop over time", "numpy, loop over the rewards"

    def td_torchrl(kind: str) -> Make:
        return lambda: torchrl(f"{kind}td_lambda_return_estimate", GAMMA, LMBDA, next_value, reward, done, terminated)

    families: dict[str, tuple[Any, tuple[Tensor, ...], tuple[Any, ...], dict[str, Peer]]] = {
        "td_lambda": (td_lambda, td, (GAMMA, LMBDA), {
            loop: ("numpy", False, lambda: peers.numpy_td_lambda(td, GAMMA, LMBDA)),
            "torchrl, loop": ("torchrl", True, td_torchrl("")),
            "torchrl, vectorised": ("torchrl", True, td_torchrl("vec_")),
        }),
        "vtrace": (vtrace, vt, (GAMMA,), {
            loop: ("numpy", False, lambda: peers.numpy_vtrace(vt, GAMMA)),
            "torchrl, loop": ("torchrl", True, lambda: torchrl("vtrace_advantage_estimate", *of_torchrl)),
        }),
        "discounted_sum": (discounted_sum, (reward, done), (GAMMA,), {
            loop: ("numpy", False, lambda: peers.numpy_discounted_sum((reward, done), GAMMA)),
            "torchrl, convolution": ("torchrl", True, lambda: torchrl("reward2go", reward, done, GAMMA)),
        }),
        "n_step_return": (n_step_return, cuts, (GAMMA, N), {
            loops: ("numpy", False, lambda: peers.numpy_n_step(cuts, GAMMA, N)),
        }),
    }  # fmt: skip
    return [_over_trajectories(f"{name} {size} x {size}", *parts, options) for name, parts in families.items()]


def _over_trajectories(
    title: str,
    function: Callable[..., Any],
    data: tuple[Tensor, ...],
    numbers: tuple[Any, ...],
    peers: Mapping[str, Peer],
    options: BenchOptions,
) -> BenchmarkTable:
    reference = function(*_double(data), *numbers)
    reference = reference if isinstance(reference, tuple) else (reference,)
    makers = _second(_wanted(peers, options), lambda: lambda: function(*data, *numbers))
    return _table(title, makers, reference, options, _copy([*data, *_float(reference)]))


def _second(peers: Mapping[str, Make | str], own: Make) -> dict[str, Make | str]:
    """Ours after the first peer, which is of numba or numpy: see :func:`_copy` for what torch's rows do to the next."""
    first, *rest = [*peers.items()] or [("graphrl", own)]
    return dict([first, ("graphrl", own), *rest])


def _projection(rows: int, atoms: int, options: BenchOptions) -> BenchmarkTable:
    generator, device = torch.Generator().manual_seed(0), options.device
    probs = torch.randn(rows, atoms, generator=generator).softmax(-1).to(device)
    reward = (3 * torch.randn(rows, 1, generator=generator)).to(device)
    terminated = (torch.rand(rows, 1, generator=generator) < 0.1).to(device)
    support = torch.linspace(-10, 10, atoms, device=device)
    data = (probs, reward, terminated)
    peers: dict[str, Peer] = {
        "numpy, bincount": ("numpy", False, lambda: return_peers.bincount_projection(*data, support, GAMMA)),
        "PyTorch, index_add_": ("torch", True, lambda: return_peers.index_add_projection(*data, support, GAMMA)),
    }
    makers = _second(_wanted(peers, options), lambda: lambda: categorical_projection(*data, GAMMA, support))
    reference = categorical_projection(probs.double(), reward.double(), terminated, GAMMA, support.double())
    return _table(f"categorical_projection {rows} x {atoms}", makers, [reference], options, _copy([*data, probs]))


def _sum_tree(capacity: int, batch: int, options: BenchOptions) -> list[BenchmarkTable]:
    """Drawing indices by priority, and writing new priorities. They are whole numbers, so that sums are exact."""
    generator, device = torch.Generator().manual_seed(0), options.device
    priority = torch.randint(1, 9, (capacity,), generator=generator).double()
    index = torch.randperm(capacity, generator=generator)[:batch]
    written = torch.randint(1, 9, (batch,), generator=generator).double()
    changed = priority.clone()
    changed[index] = written
    prefix = torch.rand(batch, generator=generator, dtype=torch.float64) * changed.sum()
    expected = torch.searchsorted(changed.cumsum(0), prefix, right=True)

    def checked(tree: Any, device: str = "cpu") -> Any:
        tree.update(index.to(device), written.to(device))
        found = tree.search(prefix.to(device))
        found = torch.as_tensor(found[0] if isinstance(found, tuple) else found)
        if not torch.equal(found.cpu(), expected):
            raise _LeftOut("finds other leaves than a running sum does")
        return tree

    def ours() -> SumTree:
        tree = SumTree(capacity, device=device)
        tree.build(priority.to(device))
        return checked(tree, device)  # type: ignore[no-any-return]

    def sampling(tree: Any) -> Callable[[], Any]:
        return lambda: tree.search(torch.rand(batch, dtype=torch.float64) * tree.total())

    def updating(tree: Any, device: str = "cpu") -> Callable[[], Any]:
        at, to = index.to(device), written.to(device)
        return lambda: tree.update(at, to)

    def table(what: str, run: Callable[[Any], Callable[[], Any]], own: Make) -> BenchmarkTable:
        peers: dict[str, Peer] = {
            "numpy, level by level": ("numpy", False, lambda: run(checked(tree_peers.NumpyTree(priority)))),
            "torchrl": ("torchrl", False, lambda: run(checked(tree_peers.TorchRLTree(priority)))),
        }
        return _table(
            f"sum tree of {capacity}, {what} {batch}", _wanted(peers, options) | {"graphrl": own}, None, options
        )

    def draw() -> Callable[[], Any]:
        tree = ours()
        return lambda: tree.sample(batch)

    return [table("sample", sampling, draw), table("update", updating, lambda: updating(ours(), device))]
