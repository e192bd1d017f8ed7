"""The scripts of examples/robot as modules, imported as they import each other."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

__all__ = ["ROBOT", "robot_scripts"]

ROBOT = Path(__file__).parents[1] / "examples" / "robot"


@contextlib.contextmanager
def robot_scripts(*names: str) -> Iterator[SimpleNamespace]:
    """Modules by name; at the end none of that folder is left, and others that had their names are back."""
    scripts = [path.stem for path in ROBOT.glob("*.py")]
    before = {name: sys.modules.pop(name) for name in scripts if name in sys.modules}
    sys.path.insert(0, str(ROBOT))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(ROBOT))
        for name in scripts:
            sys.modules.pop(name, None)
        sys.modules.update(before)
