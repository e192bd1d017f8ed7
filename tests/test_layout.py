"""The plan of the house: who may import whom, sizes, docstrings, and what importing graphrl loads."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("compiler", "kernels", "models", "losses")

ROOT_FILES = {"keys", "graph", "specs", "errors", "node_messages", "opaque_nodes", "progress", "_version"}
"""The keyed graph and its vocabulary, importable from every room."""

WORK = {"envs", "collectors", "buffers", "training"}

MAY_IMPORT = {
    "root": {"root"},
    "kernels": {"kernels", "root"},
    "compiler": {"compiler", "kernels", "root"},
    "models": {"models", "kernels", "root"},
    "losses": {"losses", "kernels", "root", "models.distributions"},
    "work": {"work", "compiler", "kernels", "models", "losses", "root"},
    "front": {"front", "work", "compiler", "kernels", "models", "losses", "root"},  # commands
}


LONG_FILES: dict[str, str] = {
    "compiler/bundle/runtime.py": "goes into every bundle as one file that needs nothing but numpy",
}
"""Files over 500 lines, each with its reason."""

LONG_FUNCTIONS: dict[str, str] = {}
"""Functions over 60 lines, each with its reason."""


def sources() -> list[Path]:
    own = [p for p in (ROOT / "graphrl").rglob("*.py") if not any(part in ROOMS for part in p.relative_to(ROOT).parts)]
    return sorted([*own, *(p for room in ROOMS for p in (ROOT / room).rglob("*.py"))])


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "graphrl" else ("graphrl", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """``graphrl.losses.ppo`` lies in ``losses``, ``graphrl.graph`` in ``root``, ``graphrl.envs`` in ``work``."""
    parts = module.split(".")
    if len(parts) == 1:
        return "front"
    if parts[1] in ROOMS:
        return parts[1]
    if parts[1] in ROOT_FILES:
        return "root"
    return "work" if parts[1] in WORK else "front"


def imports_of(path: Path) -> set[str]:
    """Every module a file imports, wherever in it, type checking blocks left out; ``from a import b`` gives ``a.b``."""
    tree = ast.parse(path.read_text())
    skipped = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found = set()
    package = module_name(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{name}.{alias.name}" for alias in node.names}
    return found


MODULES = {module_name(path) for path in sources()}


def resolved(name: str) -> str:
    """The module behind an imported name: ``graphrl.compiler.trace.trace`` -> ``graphrl.compiler.trace``."""
    parent = name
    while parent not in MODULES and "." in parent:
        parent = parent.rpartition(".")[0]
    return parent


def refusal(module: str, name: str) -> str | None:
    """Why ``module`` may not import ``name``, or ``None`` when it may."""
    if name.split(".")[0] != "graphrl":
        return None
    target, room = resolved(name), room_of(module)
    if target == "graphrl":  # the package itself loads every room
        fine = room in ("front", "work") or name in ("graphrl", "graphrl.__version__")
        return None if fine else f"{module} imports {name} from the top: import it from its own room"
    inner = target.removeprefix("graphrl.")
    allowed = MAY_IMPORT[room]
    if room_of(target) in allowed or any(inner.startswith(part) for part in allowed if "." in part):
        return None
    return f"{module} (room {room}) may not import {target} (room {room_of(target)})"


@pytest.mark.parametrize("path", sources(), ids=lambda p: module_name(p))
def test_imports_point_one_way(path):
    assert [why for name in imports_of(path) if (why := refusal(module_name(path), name))] == []


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("graphrl.graph", "graphrl.compiler.trace.trace"),
        ("graphrl.kernels.gae.op", "graphrl.models.mlp"),
        ("graphrl.models.mlp", "graphrl.losses.ppo.PPOLoss"),
        ("graphrl.losses.ppo", "graphrl.models.actors"),
        ("graphrl.compiler.trace", "graphrl.envs.base"),
        ("graphrl.compiler.trace", "graphrl.KeyedGraph"),
        ("graphrl.envs.base", "graphrl.cli.main"),
    ],
)
def test_an_import_against_the_plan_is_noticed(module, name):
    assert refusal(module, name)


@pytest.mark.parametrize("folder", ["graphrl", *ROOMS, "tests", "examples"])
def test_no_room_is_imported_by_its_bare_name(folder):
    for path in (ROOT / folder).rglob("*.py"):
        for name in imports_of(path) if folder in ("graphrl", *ROOMS) else _absolute_imports(path):
            assert name.split(".")[0] not in ROOMS, f"{path} imports {name}: write graphrl.{name}"


def _absolute_imports(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return found | {n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module and not n.level}


@pytest.mark.parametrize("path", sources(), ids=lambda p: module_name(p))
def test_files_and_functions_are_short(path):
    text = path.read_text()
    name = str(path.relative_to(ROOT))
    assert len(text.splitlines()) <= 500 or name in LONG_FILES, f"{name} has {len(text.splitlines())} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 60 or f"{name}:{node.name}" in LONG_FUNCTIONS, f"{name}:{node.name} has {length} lines"


def test_every_exception_to_the_sizes_is_still_needed():
    for name in LONG_FILES:
        assert len((ROOT / name).read_text().splitlines()) > 500, f"{name} is short now: drop it from the list"


@pytest.mark.parametrize("path", sources(), ids=lambda p: module_name(p))
def test_every_public_name_has_a_docstring(path):
    if path.name.startswith(("triton", "_triton")) or path.name == "_gpu.py":
        pytest.skip("needs triton, an optional package")
    module = importlib.import_module(module_name(path))
    assert inspect.getdoc(module) or path.name == "_version.py", f"{module.__name__} has no docstring"
    lines = path.read_text()
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)  # every name in __all__ exists
        if inspect.isfunction(value) or inspect.isclass(value):
            assert (value.__doc__ or "").strip(), f"{module.__name__}.{name} has no docstring"
            assert len((value.__doc__ or "").splitlines()) <= 25, f"{module.__name__}.{name}: over 25 lines; use docs/"
        elif value.__class__.__module__ == "builtins" and name != "__version__" and f"\n{name} =" in lines:
            after = lines.split(f"\n{name} =", 1)[1]
            assert '"""' in after, f"{module.__name__}.{name} has no description below it"


BANNED = (
    "onnx",
    "onnxruntime",
    "ray",
    "mujoco",
    "gymnasium",
    "tensorboard",
    "matplotlib",
    "triton",
    "torchrl",
    "wandb",
)


def test_importing_graphrl_loads_no_optional_package():
    code = (
        "import sys, tensordict; before = set(sys.modules); import graphrl; "
        f"print([m for m in {BANNED!r} if m in sys.modules and m not in before])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_rooms_refuse_their_bare_names():
    result = subprocess.run([sys.executable, "-c", "import compiler"], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode and "import graphrl.compiler, not compiler" in result.stderr


def test_no_file_names_a_place_on_someone_s_machine():
    place = re.compile(r"(?<![\w.])/(home|Users|root|work)/\w+")
    kinds = {".py", ".md", ".toml", ".cpp", ".hpp", ".h", ".c", ".txt", ".yaml", ".yml", ".json", ""}
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    for name in tracked.stdout.splitlines():
        path = ROOT / name
        if path.is_file() and not path.is_symlink() and path.suffix in kinds and path != Path(__file__):
            found = place.search(path.read_text(errors="ignore"))
            assert not found, f"{name} has {found and found.group()!r}"


def test_public_names_are_those_promised():
    import graphrl as grl

    promised = "KeyedGraph trace compile explain benchmark compile_update Program".split()
    assert set(promised) <= set(grl.__all__) and all(hasattr(grl, name) for name in grl.__all__)


def test_a_script_beside_a_checkout_called_graphrl_gets_the_package(tmp_path):
    (tmp_path / "graphrl").symlink_to(ROOT)
    script = tmp_path / "script.py"
    script.write_text("import graphrl as grl\nfrom graphrl.kernels import gae\nprint(grl.KeyedGraph.__name__)\n")
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert result.stdout.strip() == "KeyedGraph", result.stderr
