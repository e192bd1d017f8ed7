"""The CMake file of a bundle: built by itself, inside another project, and found once it is installed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from robot_c import run, write_robot_c

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake: apt-get install cmake")

APP = """\
cmake_minimum_required(VERSION 3.10)
project(app C)
if(BUNDLE)
  add_compile_options(-ffast-math)
  add_subdirectory(${BUNDLE} policy)
else()
  find_package(g1_fast_sac REQUIRED)
endif()
add_executable(app main.c)
target_link_libraries(app PRIVATE g1_fast_sac::g1_fast_sac)
"""
MAIN = """\
#include "g1_fast_sac.h"
int main(void)
{
    static g1_fast_sac_state state;
    return (int)g1_fast_sac_selftest(&state);
}
"""


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_a_bundle_is_a_cmake_package(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}: apt-get install {compiler}")
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("CFLAGS", "-Werror")
    monkeypatch.delenv("CMAKE_GENERATOR", raising=False)
    bundle = write_robot_c(tmp_path, names=["g1_fast_sac"])["g1_fast_sac"]
    built, installed, app = tmp_path / "built", tmp_path / "installed", tmp_path / "app"
    run("cmake", "-S", bundle, "-B", built, f"-DCMAKE_INSTALL_PREFIX={installed}")
    run("cmake", "--build", built)
    assert os.access(built / "g1_fast_sac_bench", os.X_OK)
    assert "100% tests passed, 0 tests failed out of 1" in run("cmake", "-E", "chdir", built, "ctest")
    run("cmake", "--install", built)
    monkeypatch.delenv("CFLAGS")  # clang warns where one option takes back another
    app.mkdir()
    (app / "CMakeLists.txt").write_text(APP)
    (app / "main.c").write_text(MAIN)
    for name, option in (("inside", f"-DBUNDLE={bundle}"), ("found", f"-DCMAKE_PREFIX_PATH={installed}")):
        run("cmake", "-S", app, "-B", tmp_path / name, option)
        run("cmake", "--build", tmp_path / name)
        run(tmp_path / name / "app")
    assert not list((tmp_path / "inside").rglob("*_selftest"))  # a project around it gets the library alone
