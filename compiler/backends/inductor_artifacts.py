"""What Inductor made of a program, as files that a later process runs without Inductor.

Inductor writes a Python module that compiles C++ kernels when it is executed, allocates buffers and calls them. Kept
are that module without its compiling part and the kernels' shared libraries; loading executes the one around the
others. Triton kernels stay source in the module: Triton keeps their binaries itself.

Private parts of torch used here: the module's shape (checked as it is packed; what does not fit is not kept), its
kernels' entry point, ``PyCodeCache``. Checked with torch 2.11 and 2.13.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from graphrl.compiler import cache
from graphrl.compiler.program import Program

__all__ = ["cxx_compilers", "kept_on_disk", "pack", "unpack"]

MODULE, FACTS = "module.py", "facts.json"


def kept_on_disk(
    program: Program, settings: Mapping[str, Any], compile_afresh: Callable[[], Any]
) -> Callable[[list[Any]], Any]:
    """``program`` from the cache, or from ``compile_afresh`` and then into it.

    What was just written is loaded again and returned, so the check before the first use is of what later processes
    will run.
    """
    from torch._inductor import config

    cxx = next((c for c in cxx_compilers(config) if c), None)
    key = cache.cache_key(program, "inductor", cxx, **settings, inductor=config.get_hash().hex())
    start = time.perf_counter()
    if (run := _loaded(cache.load(key))) is not None:
        cache.note_outcome(program, f"hit, loaded in {time.perf_counter() - start:.2f} s")
        return run
    compiled = compile_afresh()
    files = None if key is None else pack(compiled)
    entry = None if key is None or files is None else cache.store(key, files, time.perf_counter() - start)
    run = _loaded(entry)
    cache.note_outcome(program, "miss, not kept" if run is None else "miss, now kept")
    return run or getattr(compiled, "current_callable", None) or compiled  # the inner one skips profiling checks


def cxx_compilers(config: Any) -> tuple[Any, ...]:
    """The C++ compilers that Inductor would try, in order."""
    value = config.cpp.cxx
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _loaded(entry: cache.CacheEntry | None) -> Callable[[list[Any]], Any] | None:
    try:
        return None if entry is None else unpack(entry.folder, entry.files)
    except Exception:  # cleared meanwhile, or no longer understood: whatever does not load is compiled
        return None


def pack(compiled: Any) -> dict[str, bytes] | None:
    """The files of what ``compile_fx_inner`` returned; ``None`` where it is not of the plain kind."""
    from torch._inductor import config
    from torch._inductor.codecache import PyCodeCache

    if (key := getattr(compiled, "cache_key", None)) is None:  # no operation left: a plain function came back
        return None
    module = next((m for m in PyCodeCache.modules if getattr(m, "key", None) == key), None)
    wrapped = config.triton.cudagraphs or getattr(compiled, "_wrap_compiled_regions", False)
    if module is None or wrapped or compiled.constants or compiled.torchbind_constants:
        return None
    kernels = {name: file for name, value in vars(module).items() if (file := _library_of(value)) is not None}
    source = _without_compiling(compiled.source_code, set(kernels))
    if source is None:
        return None
    check, deferred = list(compiled.inputs_to_check), getattr(compiled, "_defers_input_alignment", False)
    if deferred:  # the module copies what is misaligned itself, but not what it writes into
        check = [i for i in check if i in compiled.mutated_input_idxs]
    facts = {
        "kernels": sorted(kernels),
        "check_alignment": check,
        "mutated": sorted(compiled.mutated_input_idxs),
    }
    try:
        files = {f"{name}.so": Path(file).read_bytes() for name, file in kernels.items()}
    except OSError:  # a kernel loaded earlier, from a cache of Inductor's that is gone
        return None
    files |= {MODULE: source.encode(), FACTS: json.dumps(facts).encode()}
    return files


def unpack(folder: Path, files: Mapping[str, bytes]) -> Callable[[list[Any]], Any]:
    """The callable that ``pack`` took apart. ``files`` are the verified bytes of ``folder``."""
    facts = json.loads(files[FACTS])
    module = types.ModuleType(f"graphrl_program_{folder.name}")
    module.__file__ = str(folder / MODULE)
    for name in facts["kernels"]:
        setattr(module, name, _kernel(folder, name))
    exec(compile(files[MODULE], module.__file__, "exec"), module.__dict__)
    run: Callable[[list[Any]], Any] = module.call
    if facts["check_alignment"]:
        from torch._inductor.utils import align_inputs_from_check_idxs
        from torch.utils._ordered_set import OrderedSet

        run = align_inputs_from_check_idxs(run, facts["check_alignment"], OrderedSet(facts["mutated"]))
    return run


def _library_of(value: Any) -> str | None:
    """The file of the extension module whose function this is."""
    if not isinstance(value, types.BuiltinFunctionType) or value.__name__ != "kernel":
        return None
    return getattr(value.__self__, "__file__", None)


def _kernel(folder: Path, name: str) -> Any:
    address = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(address)  # the kernels ask for it as they load
    full = f"graphrl_kernels.{folder.name}.{name}.kernel"  # the last part names the library's PyInit function
    spec = importlib.util.spec_from_file_location(full, folder / f"{name}.so")
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder / name}.so is no extension module")
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    return library.kernel


# ---- the module's text


def _without_compiling(source: str, kernels: set[str]) -> str | None:
    """The module without the definitions of ``kernels`` and without imports and names it then no longer needs."""
    from torch._inductor.select_algorithm import extern_kernels

    tree = ast.parse(source)
    body = [s for s in tree.body if not isinstance(s, ast.If) and _defined(s) not in ("get_args", *_UNUSED)]
    defined = {_defined(s) for s in body if _compiles(s)}
    if defined != kernels:
        return None
    body = [s for s in body if not _compiles(s)]
    if not any("async_compile." in ast.unparse(s) and "async_compile.wait" not in ast.unparse(s) for s in body):
        body = [s for s in body if "async_compile" not in ast.unparse(s)]  # no kernel is left to compile
    while True:
        used = {n.id for s in body for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        kept = [s for s in body if not _only_names(s) or _names(s) & (used | {"call"})]
        if len(kept) == len(body):
            break
        body = kept
    called = {
        n.attr
        for s in body
        for n in ast.walk(s)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "extern_kernels"
    }
    text = ast.unparse(ast.Module(body, []))
    if called and all(getattr(extern_kernels, n) is getattr(torch, n, None) for n in called):  # importing takes 0.7 s
        text = text.replace("from torch._inductor.select_algorithm import extern_kernels", "extern_kernels = torch")
    if "inductor_ops." in text or "torch.ops.inductor" in text:
        text = f"import torch._inductor.inductor_prims\n{text}"
    return f"{text}\n"


_UNUSED = ("benchmark_compiled_module", "recursively_apply_fns")


def _defined(statement: ast.stmt) -> str:
    """The one name a statement gives a value, or nothing."""
    if isinstance(statement, ast.FunctionDef):
        return statement.name
    names = _names(statement)
    return next(iter(names)) if len(names) == 1 else ""


def _names(statement: ast.stmt) -> set[str]:
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {(a.asname or a.name).split(".")[0] for a in statement.names}
    if isinstance(statement, ast.Assign):
        return {t.id for t in statement.targets if isinstance(t, ast.Name)}
    return set()


def _only_names(statement: ast.stmt) -> bool:
    """Whether a statement only makes something known under a name."""
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return True
    return isinstance(statement, ast.Assign) and isinstance(statement.value, (ast.Attribute, ast.Name))


def _compiles(statement: ast.stmt) -> bool:
    """Whether a statement defines a C++ kernel."""
    value = statement.value if isinstance(statement, ast.Assign) else None
    return isinstance(value, ast.Call) and ast.unparse(value.func) == "async_compile.cpp_pybinding"
