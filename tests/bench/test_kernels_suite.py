import pytest
import torch

from graphrl.bench import gae_peers, kernels, to_markdown
from graphrl.bench.tables import BenchOptions
from graphrl.bench.tree_peers import NumpyTree
from graphrl.kernels import gae

SMALL = {"gae_sizes": [(3, 20), (1, 40)], "size": 12, "rows": 6, "capacity": 300}
OURS = ["GAE 3 x 20", "GAE 1 x 40", "td_lambda 12 x 12", "vtrace 12 x 12", "discounted_sum 12 x 12"]
OURS += ["n_step_return 12 x 12", "categorical_projection 6 x 51", "sum tree of 300, sample 256"]
OURS += ["sum tree of 300, update 256"]


@pytest.fixture(autouse=True)
def nothing_to_compile(monkeypatch):
    monkeypatch.setattr(kernels, "UNROLLED", 0)


def test_every_kernel_has_a_table_without_peers():
    tables = kernels.suite(BenchOptions(peers=False, repeats=2, round_s=0.0), **SMALL)
    assert [table.title for table in tables] == [f"{title}, per call" for title in OURS]
    for table in tables:
        assert table.row("graphrl").median_us > 0
        assert not [row.name for row in table.rows if "torchrl" in row.name or "numba" in row.name]
        if "sum tree" not in table.title:
            assert table.rows[-1].name == "torch copy of the same bytes" or "unrolls" in table.rows[-1].note
            assert all(row.error < 1e-5 for row in table.rows if row.median_us > 0 and "copy" not in row.name)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # the peers' own
def test_every_peer_agrees_or_has_its_reason():
    for name in ("numba", "scipy", "torchrl"):
        pytest.importorskip(name)
    tables = kernels.suite(BenchOptions(repeats=2, round_s=0.0), **SMALL)
    rows = {(table.title, row.name): row for table in tables for row in table.rows}
    assert {name for _, name in rows} >= {"numba loop", "scipy lfilter, each trajectory", "torchrl, vectorised"}
    for (title, name), row in rows.items():
        if "sum tree" not in title and "copy" not in name and row.median_us > 0:
            assert row.error < 1e-5, (title, name)
        reasons = ("unrolls", "does not load")
        assert row.median_us > 0 or any(x in row.note for x in reasons), (title, name, row.note)
    assert "| graphrl |" in to_markdown(tables)


def test_a_peer_that_is_not_installed_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(kernels, "installed", lambda package, options: False)
    table = kernels._gae(2, 8, BenchOptions(repeats=2, round_s=0.0))
    assert table.row("numba loop").note == "numba is not installed: pip install 'graphrl[peers]'"
    assert "| numba loop | - |" in table.to_markdown()


def test_a_loop_too_long_for_python_is_left_out(monkeypatch):
    monkeypatch.setattr(kernels, "LOOPED", 7)
    table = kernels._gae(2, 8, BenchOptions(peers=False, repeats=2, round_s=0.0))
    assert "over 8 steps" in table.row("numpy, loop over time").note


def test_a_peer_with_another_result_shows_in_the_error_column():
    wrong = {"wrong": lambda: lambda: torch.ones(3), "graphrl": lambda: lambda: torch.zeros(3)}
    table = kernels._table("made up", wrong, [torch.zeros(3)], BenchOptions(repeats=2, round_s=0.0))
    assert table.row("wrong").error == 1000 and table.row("graphrl").error == 0


def test_the_loop_that_torch_compile_unrolls_is_gae():
    data = kernels._rollout(3, 9, "cpu")
    data[3][0, 4] = data[4][0, 4] = data[3][1, 2] = True
    expected = gae(*data, gae_peers.GAMMA, gae_peers.LMBDA)
    torch.testing.assert_close(gae_peers.unrolled(data, compiled=False)(), expected)


@pytest.mark.parametrize("capacity", [1, 2, 3, 8, 300])
def test_the_numpy_tree_finds_what_a_running_sum_finds(capacity):
    priority = torch.randint(0, 5, (capacity,)).double()
    priority[-1] = 1
    tree = NumpyTree(priority)
    index = torch.randint(0, capacity, (4,)).unique()
    priority[index] = 3.0
    tree.update(index, priority[index])
    prefix = torch.arange(int(priority.sum()), dtype=torch.float64) + 0.5
    expected = torch.searchsorted(priority.cumsum(0), prefix, right=True)
    assert tree.total() == priority.sum() and torch.equal(torch.as_tensor(tree.search(prefix)), expected)
