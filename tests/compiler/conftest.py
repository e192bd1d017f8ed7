from collections.abc import Iterator

import pytest
import torch
from torch.distributions import Distribution


@pytest.fixture(autouse=True)
def fresh_torch() -> Iterator[None]:
    """A fixed seed, and torch's own default for argument checks, which importing torchrl switches off."""
    torch.manual_seed(0)
    checked = Distribution._validate_args
    Distribution.set_default_validate_args(True)
    yield
    Distribution.set_default_validate_args(checked)
