"""How many CPU threads torch uses, for the length of a block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["torch_threads"]


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use ``count`` CPU threads within the block.

    A minibatch of 64 gains nothing from a second thread on idle cores (7.4 ms for 32 updates either way) and loses
    much on busy ones: where another process holds the second core every parallel region waits for it, and the same
    updates took 100 to 2500 ms.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
