from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributions import Distribution
from torch.fx.experimental.proxy_tensor import make_fx


@pytest.fixture(autouse=True)
def fresh_torch() -> Iterator[None]:
    """A fixed seed, and torch's own default for argument checks, which importing torchrl switches off."""
    torch.manual_seed(0)
    checked = Distribution._validate_args
    Distribution.set_default_validate_args(True)
    yield
    Distribution.set_default_validate_args(checked)


@pytest.fixture
def trace() -> Any:
    """Trace a function of tensors on real tensors, argument checks of distributions off, as the compiler does."""
    checked = Distribution._validate_args

    def run(function: Callable[..., Any], *args: Any) -> Any:
        Distribution.set_default_validate_args(False)
        try:
            return make_fx(function)(*args)
        finally:
            Distribution.set_default_validate_args(checked)

    return run
