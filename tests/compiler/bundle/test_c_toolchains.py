"""The C of every robot policy under the compilers, processors and analysers that a robot's makers use."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from robot_c import SANITIZERS, STRICT, assert_selftests_pass, includes, run, write_robot_c

from graphrl.compiler.bundle.c_bench import stack_at_most

CROSS = [
    ("arm-linux-gnueabihf-gcc", "qemu-arm", "gcc-arm-linux-gnueabihf libc6-dev-armhf-cross"),
    ("aarch64-linux-gnu-gcc", "qemu-aarch64", "gcc-aarch64-linux-gnu libc6-dev-arm64-cross"),
]
NEEDED = {"memcpy", "memset", "sqrtf"}
"""All that the policies' object files ask of a C library, as docs/deploy.md states."""
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


def needs(program: str, package: str) -> str:
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}: apt-get install {package}")
    return program


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hidden sizes a sixteenth: the operations and loops are those of the real ones."""
    return write_robot_c(tmp_path_factory.mktemp("c"))


@pytest.fixture(scope="module")
def objects(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """policy.o of each, with its stack use beside it."""
    folder = tmp_path_factory.mktemp("objects")
    flags = (*STRICT, "-O2", "-fno-stack-protector", "-fstack-usage")
    for name, path in sources.items():
        run("gcc", *flags, "-c", path / f"{name}.c", "-o", folder / f"{name}.o")
    return {name: folder / f"{name}.o" for name in sources}


def symbols(tool: str, file: Path) -> list[tuple[str, str]]:
    """(kind, name) of each symbol."""
    return [(kind, name) for kind, name in (line.split()[-2:] for line in run(tool, file).splitlines())]


def test_object_files_need_nothing_but_what_the_page_lists(objects: dict[str, Path]) -> None:
    needs("nm", "binutils")
    for name, file in objects.items():
        found = symbols("nm", file)
        assert {symbol for kind, symbol in found if kind == "U"} <= NEEDED, name
        assert not [symbol for kind, symbol in found if kind in "bBdDC"], name  # memory that a step could change
        public = {symbol.removeprefix(f"{name}_") for kind, symbol in found if kind == "T"}
        assert public == {"state_size", "init", "reset", "step", "contract_hash"}
    page = (Path(__file__).parents[3] / "docs" / "deploy.md").read_text()
    assert all(f"`{symbol}`" in page for symbol in NEEDED)


PAINT = """
#define _XOPEN_SOURCE 700
#include <stdio.h>
#include <string.h>
#include <ucontext.h>
static unsigned char stack[1 << 21];
static ucontext_t here, there;
static size_t used(void (*const work)(void))
{
    size_t i = 0;
    memset(stack, 0xA5, sizeof stack);
    getcontext(&there);
    there.uc_stack.ss_sp = stack;
    there.uc_stack.ss_size = sizeof stack;
    there.uc_link = &here;
    makecontext(&there, work, 0);
    swapcontext(&here, &there);
    while (stack[i] == 0xA5) { ++i; }
    return sizeof stack - i;
}
static void nothing(void) {}
"""


def test_a_step_takes_no_more_stack_than_is_reported(
    sources: dict[str, Path], objects: dict[str, Path], tmp_path: Path
) -> None:
    lines = [PAINT, *(f'#include "{name}.h"' for name in sources)]
    for name in sources:
        lines.append(f"static {name}_state {name}_st; static {name}_obs {name}_in; static {name}_command {name}_out;")
        lines.append(f"static void {name}_once(void) {{ (void){name}_step(&{name}_st, &{name}_in, &{name}_out); }}")
    calls = [f'    printf("{name} %zu\\n", used({name}_once) - used(nothing));' for name in sources]
    (tmp_path / "paint.c").write_text("\n".join([*lines, "int main(void)", "{", *calls, "    return 0;", "}", ""]))
    program = tmp_path / "paint"
    run("gcc", "-std=c99", "-O1", *includes(sources), tmp_path / "paint.c", *objects.values(), "-lm", "-Wl,-z,now",
        "-o", program)  # fmt: skip
    found = {name: int(size) for name, size in (line.split() for line in run(program).splitlines())}
    assert found.keys() == sources.keys()
    for name, file in objects.items():
        reported = stack_at_most(file.with_suffix(".su"), name)
        assert reported is not None and reported / 4 < found[name] <= reported + 64, (
            name
        )  # 64: its caller, sqrtf, memset


def test_stack_that_grows_at_run_time_is_not_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = tmp_path / "policy.su"
    assert stack_at_most(usage, "policy") is None
    lines = ["policy.c:1:6:policy_reset\t800\tstatic", "policy.c:2:6:policy_run\t96\tstatic",
             "policy.c:3:6:policy_step\t48\tdynamic,bounded"]  # fmt: skip
    usage.write_text("\n".join(lines))
    monkeypatch.setattr(platform, "machine", lambda: "armv7l")
    assert stack_at_most(usage, "policy") == 144  # a reset is no part of a step
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert stack_at_most(usage, "policy") == 144 + 128
    usage.write_text("\n".join([*lines, "policy.c:4:6:helper\t16\tdynamic"]))
    assert stack_at_most(usage, "policy") is None


def test_headers_are_cplusplus_too(sources: dict[str, Path], objects: dict[str, Path], tmp_path: Path) -> None:
    compiler = needs("g++", "g++")
    lines = [*(f'#include "{name}.h"' for name in sources), "#include <cstring>", "int main() {"]
    for name in sources:
        lines.append(f"    static {name}_state {name}; {name}_init(&{name});")
        lines.append(f"    if ({name}_state_size() != sizeof {name}) return 1;")
        lines.append(f"    if (std::strcmp({name}_contract_hash(), {name.upper()}_CONTRACT_HASH) != 0) return 2;")
    (tmp_path / "use.cpp").write_text("\n".join([*lines, "    return 0;", "}", ""]))
    flags = "-std=c++11 -Wall -Wextra -Werror -pedantic".split()
    run(compiler, *flags, *includes(sources), tmp_path / "use.cpp", *objects.values(), "-lm", "-o", tmp_path / "use")
    run(tmp_path / "use")


@pytest.mark.parametrize("flag", ["-ffast-math", "-Ofast", "-ffinite-math-only"])
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_arithmetic_that_is_not_ieee_is_refused(compiler: str, flag: str, sources: dict[str, Path]) -> None:
    """With it exponentials are wrong by their whole size, and NaN is taken for a number."""
    needs(compiler, compiler)
    command = [compiler, "-std=c99", flag, "-fsyntax-only", str(sources["go1"] / "go1.c")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode != 0 and "compile without -ffast-math" in result.stderr
    run(*command, "-fno-fast-math", "-fno-finite-math-only")


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_selftests_pass_under_sanitizers(compiler: str, sources: dict[str, Path], tmp_path: Path) -> None:
    assert_selftests_pass(needs(compiler, compiler), SANITIZERS, sources, tmp_path)


@pytest.mark.parametrize(("compiler", "emulator", "package"), CROSS, ids=["armhf", "arm64"])
def test_selftests_pass_on_arm(
    compiler: str, emulator: str, package: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    needs(compiler, package)
    needs(emulator, "qemu-user")
    assert_selftests_pass(compiler, ("-O2", "-static"), sources, tmp_path, (emulator,))


def test_a_microcontroller_needs_no_more(sources: dict[str, Path], tmp_path: Path) -> None:
    """A Cortex-M7 with single-precision arithmetic, no operating system: fabsf is a function there."""
    compiler = needs("arm-linux-gnueabihf-gcc", CROSS[0][2])
    flags = "-O2 -ffreestanding -mcpu=cortex-m7 -mthumb -mfpu=fpv5-sp-d16 -mfloat-abi=hard".split()
    for name in ("crazyflie", "h1_lstm", "g1_fast_sac", "depth_parkour"):
        file = tmp_path / f"{name}.o"
        run(compiler, *STRICT, *flags, "-c", sources[name] / f"{name}.c", "-o", file)
        found = symbols("arm-linux-gnueabihf-nm", file)
        assert {symbol for kind, symbol in found if kind == "U"} <= NEEDED | {"fabsf"}, name  # no double arithmetic
        assert not [symbol for kind, symbol in found if kind in "bBdDC"], name


def without_numbers(text: str) -> str:
    """The tables of weights as zeros of the same size: an analyser takes a minute over numbers that tell it nothing."""
    return re.sub(r"(static const \w[\w ]*(?:\[\d+\])+ = )\{\n[^;]*\};", r"\1{0};", text)


def analyse(folder: Path) -> subprocess.CompletedProcess[str]:
    command = "cppcheck --enable=warning,style,performance,portability --std=c99 --error-exitcode=1 --quiet".split()
    files = [str(file) for file in sorted(folder.rglob("*.c"))]
    return subprocess.run([*command, *files], capture_output=True, text=True, timeout=300)


def assert_clean(sources: dict[str, Path], folder: Path) -> None:
    for name, path in sources.items():
        (folder / name).mkdir()
        for file in path.glob("*.[ch]"):
            (folder / name / file.name).write_text(without_numbers(file.read_text()))
    result = analyse(folder)
    assert result.returncode == 0, result.stderr[:3000]


def test_cppcheck_finds_nothing(sources: dict[str, Path], tmp_path: Path) -> None:
    needs("cppcheck", "cppcheck")
    assert_clean({name: path for name, path in sources.items() if name != "digit"}, tmp_path)
    spoilt = tmp_path / "go1" / "go1.c"
    spoilt.write_text(spoilt.read_text().replace("uint32_t status = 0u;", "uint32_t status;"))
    result = analyse(spoilt.parent)
    assert result.returncode == 1 and "Uninitialized variable: status" in result.stderr
    result = analyse(Path(__file__).parents[3] / "examples" / "robot")
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_cppcheck_finds_nothing_in_attention(sources: dict[str, Path], tmp_path: Path) -> None:
    needs("cppcheck", "cppcheck")
    assert_clean({"digit": sources["digit"]}, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["-O0", "-O3"])
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_selftests_pass_at_every_level(compiler: str, level: str, sources: dict[str, Path], tmp_path: Path) -> None:
    assert_selftests_pass(needs(compiler, compiler), (level,), sources, tmp_path)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_robot_c(tmp_path_factory.mktemp("real"), 1, ("go1", "g1_fast_sac", "g1_lstm"))


@pytest.mark.slow
@pytest.mark.parametrize(("compiler", "emulator", "package"), CROSS, ids=["armhf", "arm64"])
def test_real_sizes_pass_on_arm(
    compiler: str, emulator: str, package: str, real: dict[str, Path], tmp_path: Path
) -> None:
    test_selftests_pass_on_arm(compiler, emulator, package, real, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_real_sizes_pass_under_sanitizers(compiler: str, real: dict[str, Path], tmp_path: Path) -> None:
    test_selftests_pass_under_sanitizers(compiler, real, tmp_path)
