"""The native library as a Python module: conversions, errors, the interpreter lock, and which tensors go direct."""

import threading
import time

import pytest
import torch

from graphrl.kernels import _lib
from graphrl.kernels._lib import lib

T = 3


def arguments(steps=T):
    floats = [torch.ones(1, steps) for _ in range(3)]
    flags = [torch.zeros(1, steps, dtype=torch.bool) for _ in range(2)]
    out = [torch.empty(1, steps) for _ in range(2)]
    pointers = [x.data_ptr() for x in (*floats, *flags)]
    into = [x.data_ptr() for x in out]
    return [*pointers, None, None, 0.5, 1.0, *into, 1, steps, 1, 1], out, (floats, flags)


def test_a_kernel_is_called_with_pointers_none_and_numbers():
    args, (advantage, _), _kept = arguments()
    assert lib.grl_gae_f32(*args) is None
    assert advantage.tolist() == [[0.875, 0.75, 0.5]]
    args[7] = 1  # an int where the function takes a double
    lib.grl_gae_f32(*args)
    assert advantage.tolist() == [[3.0, 2.0, 1.0]]


def test_wrong_arguments_are_refused_before_the_call():
    args, (advantage, _), _kept = arguments()
    advantage.fill_(-1)
    with pytest.raises(TypeError, match="14 arguments, expected 15"):
        lib.grl_gae_f32(*args[:-1])
    for position, wrong in [(0, "x"), (0, 1.5), (7, "x"), (11, 1.5), (12, None), (14, 2**70)]:
        with pytest.raises((TypeError, OverflowError)):
            lib.grl_gae_f32(*args[:position], wrong, *args[position + 1 :])
    assert advantage.eq(-1).all()


def test_other_threads_run_while_a_kernel_does():
    args, *_kept = arguments(20_000_000)
    seen, stop = [], threading.Event()

    def watch():
        while not stop.is_set():
            seen.append(time.perf_counter())
            time.sleep(1e-4)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        for _ in range(20):
            start = time.perf_counter()
            lib.grl_gae_f32(*args)
            end = time.perf_counter()
            margin = (end - start) / 10
            if any(start + margin < t < end - margin for t in seen):
                return
        pytest.fail("nothing else ran during 20 calls")
    finally:
        stop.set()
        thread.join()


def test_a_library_of_another_version_or_of_nothing_says_what_to_do(monkeypatch, tmp_path):
    with monkeypatch.context() as patch, pytest.raises(ImportError, match="version 3, not -1: run 'pip install -e .'"):
        patch.setattr(_lib, "VERSION", -1)
        _lib._load()
    other = tmp_path / "_native.abi3.so"
    other.write_bytes(b"not a library")
    with monkeypatch.context() as patch, pytest.raises(ImportError, match="does not load .*: run 'pip install -e .'"):
        patch.setattr(_lib, "_find", lambda: other)
        _lib._load()


FLOAT, FLAG = torch.zeros(2, T, 4, 1), torch.zeros(2, T, 4, 1, dtype=torch.bool)


@pytest.mark.parametrize(
    ("time_dim", "extents"), [(-3, (2, 3, 4)), (1, (2, 3, 4)), (None, (6, 4, 1)), (-1, (24, 1, 1)), (0, (1, 2, 12))]
)
def test_trajectories_gives_itemsize_and_extents(time_dim, extents):
    assert lib.trajectories(FLOAT, FLOAT, FLAG, 2, time_dim) == (4, *extents)
    assert lib.trajectories(FLOAT.double(), FLAG, FLAG, 1, time_dim) == (8, *extents)
    with torch.no_grad():
        strange = FLOAT.as_strided((2, T, 1, 1), (T, 1, 99, 7))  # strides of dimensions of size one do not matter
    assert lib.trajectories(strange, 1, 1) == (4, 2, 3, 1)


def test_time_is_last_where_there_is_no_trailing_one():
    assert lib.trajectories(torch.zeros(2, 5), 1, None) == (4, 2, 5, 1)
    assert lib.trajectories(torch.zeros(1), 1, None) == (4, 1, 1, 1)
    assert lib.trajectories(torch.zeros(5, 1), 1, None) == (4, 1, 5, 1)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "wrong",
    [
        FLOAT.double(),
        FLOAT.half(),
        FLOAT.int(),
        FLAG,
        FLOAT[:, :2],
        FLOAT.transpose(0, 2),
        FLOAT.transpose(1, 2).contiguous().transpose(1, 2),
        FLOAT[:1].expand(2, T, 4, 1),
        FLOAT.squeeze(-1),
        FLOAT.to("meta"),
        FLOAT.to_sparse(),
        FLOAT.to(torch.complex64),
        torch.nn.Parameter(FLOAT),
        FLOAT.as_subclass(Subclass),
        FLOAT.numpy(),
        None,
    ],
    ids=lambda x: f"{type(x).__name__} {getattr(x, 'dtype', '')} {tuple(getattr(x, 'shape', ()))}",
)
def test_trajectories_leaves_all_else_to_the_dispatcher(wrong):
    assert lib.trajectories(FLOAT, wrong, FLAG, 2, -2) is None
    assert lib.trajectories(FLOAT, FLAG, wrong, 1, -2) is None or wrong is FLAG


def test_trajectories_refuses_what_is_no_layout():
    assert lib.trajectories(FLOAT, FLAG, 1, 4) is None and lib.trajectories(FLOAT, FLAG, 1, -5) is None
    assert lib.trajectories(torch.zeros(()), 1, -1) is None
    assert lib.trajectories(FLOAT, 1, "x") is None and lib.trajectories(FLOAT, 1, 2**70) is None
    assert lib.trajectories(FLOAT[:, :0], 1, 1) is None
    for wrong in [(), (FLOAT, 1), (FLOAT, "x", 1)]:
        with pytest.raises(TypeError):
            lib.trajectories(*wrong)
