import pytest

from graphrl.cli import main
from graphrl.compiler.bundle.c_policy import find_compiler


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("seed", [3])
def test_the_demo_learns_and_the_c_policy_acts_alike(tmp_path, capsys, seed):
    assert main(["demo", "--out", str(tmp_path / "demo"), "--seed", str(seed)]) == 0
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if "return of the eager policy over" in line)
    assert float(line.split(":")[1]) >= -250
    assert "compile_update" in out
    for name in ("checkpoint/state.json", "progress.csv", "bundle/manifest.json"):
        assert (tmp_path / "demo" / name).is_file()
    if find_compiler() is not None:
        assert "return of the C policy" in out
