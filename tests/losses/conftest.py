from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributions import Distribution
from torch.fx.experimental.proxy_tensor import make_fx


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


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
