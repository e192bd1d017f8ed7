"""The native library as machines with fewer instructions run it."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path
from typing import Any

import pytest

from graphrl.kernels import _lib

only_x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="only x86 has several versions")


def copy_of_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library once more. Each kernel asks for GRAPHRL_ISA at its first call, and those of a copy ask again."""
    copy = Path(shutil.copy(_lib._find(), folder))
    with monkeypatch.context() as patch:
        patch.setattr(_lib, "_find", lambda: copy)
        return _lib._load()
