import pytest
import torch
from tensordict import TensorDict
from torch import nn

import graphrl as grl
from graphrl import KeyedGraph
from graphrl.compiler.passes.eliminate_dead_code import drop_unread_draws, eliminate_dead_code
from graphrl.compiler.passes.fold_constants import fold_constants, freeze_state
from graphrl.compiler.passes.fold_normalizer import fold_normalizer
from graphrl.compiler.passes.guard_nonfinite import FINITE, guard_nonfinite
from graphrl.compiler.passes.merge_common_subexpressions import merge_common_subexpressions
from graphrl.compiler.passes.pipeline import DEPLOY, LIVE, run_passes
from graphrl.compiler.passes.remove_noops import remove_noops
from graphrl.models import GaussianActor, RunningNorm

PASSES = [remove_noops, merge_common_subexpressions, fold_constants, eliminate_dead_code]


def traced(*nodes, out_keys=None, width=3, rows=4, **more):
    td = TensorDict({"x": torch.randn(rows, width), **more}, batch_size=[rows])
    return grl.trace(KeyedGraph(*nodes, out_keys=out_keys), td), td


def lines(program):
    """The operations of a printed program, without shapes and prefixes."""
    body = program.code.split("):\n", 1)[1].strip().splitlines()
    return [line.split("  #")[0].strip().replace("torch.ops.aten.", "") for line in body]


def values(program, td):
    torch.manual_seed(2)
    return program.run(*(td.get(k) for k in program.in_keys))


def assert_equal_values(before, after, td):
    after.graph_module.graph.lint()
    for a, b in zip(values(before, td), values(after, td), strict=True):
        assert torch.equal(a, b)


# ---- before and after


def test_remove_noops():
    program, td = traced((lambda x: x.view(4, 3).detach().expand(4, 3).permute(0, 1)[:, 0:3].tanh(), ["x"], ["y"]))
    after = remove_noops(program)
    assert lines(after) == ["tanh = tanh.default(x)", "return (tanh,)"]
    assert_equal_values(program, after, td)


def test_remove_noops_keeps_what_changes_something():
    program, td = traced((lambda x: x.t().contiguous().to(torch.float64).view(4, 3)[1:].sum(0), ["x"], ["_"]),
                         (lambda x: x.permute(1, 0).permute(1, 0), ["x"], ["y"]))  # fmt: skip
    assert_equal_values(program, remove_noops(program), td)
    square, td = traced((lambda x: x.t(), ["x"], ["y"]), width=4)
    assert remove_noops(square).node_count() == 1, "a transposed square has the same shape"
    assert_equal_values(square, remove_noops(square), td)


def test_merge_common_subexpressions():
    program, td = traced((lambda x: (x.tanh() + 1, x.tanh() + 2), ["x"], ["a", "b"]))
    after = merge_common_subexpressions(program)
    assert lines(after) == [
        "tanh = tanh.default(x)",
        "add = add.Tensor(tanh, 1)",
        "add_1 = add.Tensor(tanh, 2)",
        "return (add, add_1)",
    ]
    assert_equal_values(program, after, td)


def test_merging_keeps_two_outputs_apart_and_tells_numbers_of_two_types_apart():
    program, td = traced((lambda x: (x.tanh(), x.tanh(), x.tanh()), ["x"], ["a", "b", "c"]))
    after = merge_common_subexpressions(program)
    assert len({t.data_ptr() for t in values(after, td)}) == 3
    program, td = traced((lambda i: (i + 1, i + 1.0, (i + True) * 2), ["i"], ["a", "b", "c"]), i=torch.ones(4).long())
    after = merge_common_subexpressions(program)
    assert [t.dtype for t in values(after, td)] == [torch.int64, torch.float32, torch.int64]
    assert_equal_values(program, after, td)


def test_equal_draws_are_two_draws():
    program, td = traced((lambda x: (torch.randn_like(x) + 0, torch.randn_like(x) + 0), ["x"], ["a", "b"]))
    after = run_passes(program)
    a, b = values(after, td)
    assert len(after.noise) == 2 and not torch.equal(a, b)


def test_fold_constants():
    program, td = traced((lambda x: x * (torch.tensor([1.0, 2.0, 3.0]) + 1).sqrt(), ["x"], ["y"]))
    after = fold_constants(program)
    assert [line.split(" = ")[-1].split("(")[0] for line in lines(after)[:-1]] == ["mul.Tensor"]
    assert [slot.kind for slot in after.state] == ["constant", "constant"]
    assert len(eliminate_dead_code(after).state) == 1
    assert_equal_values(program, after, td)


def test_weights_are_folded_only_when_frozen():
    layer = nn.Linear(3, 2)
    program, td = traced((lambda x: x @ layer.weight.exp().t(), ["x"], ["y"]))
    live, frozen = run_passes(program), run_passes(program, deploy=True)
    assert live.node_count() == 3 and frozen.node_count() == 1
    expected = values(program, td)[0]
    with torch.no_grad():
        layer.weight.zero_()
    torch.testing.assert_close(values(frozen, td)[0], expected)
    assert torch.equal(values(live, td)[0], td["x"].sum(-1, keepdim=True).expand(4, 2))


def test_freezing_leaves_written_state_live():
    graph = KeyedGraph((nn.BatchNorm1d(3), ["x"], ["y"]))
    frozen = freeze_state(grl.trace(graph, TensorDict(x=torch.randn(4, 3), batch_size=[4])))
    assert {slot.kind for slot in frozen.state if slot.mutated} == {"buffer"}
    assert {slot.kind for slot in frozen.state if not slot.mutated} == {"constant"}


def test_eliminate_dead_code():
    one, two = nn.Linear(3, 2), nn.Linear(3, 2)
    program, td = traced((lambda x: (one(x), two(x)), ["x"], ["a", "b"]), out_keys=["a"])
    after = eliminate_dead_code(program)
    assert after.node_count() == 2 and len(after.state) == 2 and after.in_keys == ["x"]
    assert_equal_values(program, after, td)


def test_draws_stay_until_deployment():
    program, td = traced((lambda x: (torch.randn_like(x), x + torch.randn_like(x)), ["x"], ["a", "b"]), out_keys=["b"])
    after = eliminate_dead_code(program)
    assert len(after.noise) == 2 and len(drop_unread_draws(after).noise) == 1
    assert_equal_values(program, after, td)


def test_effects_are_kept():
    norm = nn.BatchNorm1d(3)
    program, td = traced((norm, ["x"], ["y"]), (lambda x: x + 1, ["x"], ["z"]), out_keys=["z"])
    after = run_passes(program)
    assert sum(slot.mutated for slot in after.state) == 3
    values(after, td)
    torch.testing.assert_close(norm.running_mean, 0.1 * td["x"].mean(0))


@pytest.mark.parametrize("clip", [None, 5.0])
@pytest.mark.parametrize("bias", [True, False])
def test_folding_the_normaliser_keeps_values(clip, bias):
    norm = RunningNorm(3, clip=clip)
    norm.update(100 + 10 * torch.randn(64, 3))
    layers = nn.Sequential(norm, nn.Linear(3, 4, bias=bias), nn.Tanh()).double().eval()
    td = TensorDict(x=100 + 10 * torch.randn(5, 3, dtype=torch.float64), batch_size=[5])
    program = grl.trace(KeyedGraph((layers, ["x"], ["y"])), td)
    after = run_passes(program, deploy=True)
    torch.testing.assert_close(values(after, td), values(program, td), rtol=1e-12, atol=1e-12)
    names = [line.split(" = ")[-1].split("(")[0] for line in lines(after)]
    assert (names[:2] == ["addmm.default", "tanh.default"]) == (clip is None), "a clipped value must be computed"


def test_a_normaliser_with_a_second_reader_stays():
    norm, layer = RunningNorm(3, clip=None), nn.Linear(3, 2)
    norm.update(torch.randn(8, 3) * 4 + 1)
    td = TensorDict(x=torch.randn(5, 3), batch_size=[5])
    graph = KeyedGraph((norm, ["x"], ["z"]), (layer, ["z"], ["y"]))
    program = grl.trace(graph.eval(), td)
    frozen = run_passes(program, deploy=True)
    assert any("div" in line for line in lines(frozen))
    torch.testing.assert_close(values(frozen, td), values(program, td))


def test_a_live_program_is_never_normalised_away():
    norm = RunningNorm(3, clip=None)
    program, td = traced((nn.Sequential(norm, nn.Linear(3, 2)), ["x"], ["y"]))
    live = run_passes(program)
    before = values(live, td)[0]
    norm.update(td["x"] * 50)
    assert not torch.equal(values(live, td)[0], before)
    assert fold_normalizer(live).node_count() == live.node_count()


def test_guard_nonfinite():
    program, td = traced((Count(), ["x"], ["y"]))
    count = program.state[0].read()
    guarded = guard_nonfinite(program)
    assert guarded.out_keys == ["y", FINITE]
    assert values(guarded, td)[-1].item() is True and count.item() == 1
    td["x"][0, 0] = float("inf")
    assert values(guarded, td)[-1].item() is False and count.item() == 1


class Count(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        return x.sin().sum(-1)


# ---- laws that every pass obeys

GRAPHS = {
    "actor": lambda: GaussianActor(3, 2, in_keys=["x"]),
    "noise": lambda: KeyedGraph((lambda x: (x + torch.rand(4, 3)).view(12).view(4, 3), ["x"], ["y"])),
    "batch norm": lambda: KeyedGraph((nn.BatchNorm1d(3), ["x"], ["y"]), (nn.Linear(3, 3), ["y"], ["z"])),
    "repeated": lambda: KeyedGraph(
        (lambda x: (x.exp() * torch.tensor(2.0), x.exp()), ["x"], ["a", "b"]),
        (lambda x, a: (x.exp() + a).sum(-1), ["x", "a"], ["c"]),
    ),
}


@pytest.mark.parametrize("make", GRAPHS.values(), ids=GRAPHS.keys())
@pytest.mark.parametrize("step", PASSES, ids=lambda p: p.__name__)
def test_a_pass_keeps_values_signature_and_effects_and_does_nothing_twice(step, make):
    td = TensorDict(x=torch.randn(4, 3), batch_size=[4])
    program = grl.trace(make(), td)
    text = program.code
    once = step(program)
    twice = step(once)
    assert program.code == text, "the argument is left alone"
    assert twice.code == once.code
    assert (once.inputs, once.outputs, once.noise) == (program.inputs, program.outputs, program.noise)
    assert [s.name for s in once.state if s.mutated] == [s.name for s in program.state if s.mutated]
    assert once.node_count() <= program.node_count()
    assert_equal_values(program, once, td)


@pytest.mark.parametrize("deploy", [False, True])
def test_every_pass_leaves_a_record(deploy):
    program, _ = traced((nn.Linear(3, 2), ["x"], ["y"]))
    history = run_passes(program, deploy=deploy).history
    assert [record.name for record in history] == [step.__name__ for step in (DEPLOY if deploy else LIVE)]
    assert all(record.seconds >= 0 for record in history)
    pairs = zip(history, history[1:], strict=False)
    assert all(a.nodes_after == b.nodes_before for a, b in pairs)


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_the_pipeline_can_be_cut_short(limit, monkeypatch):
    monkeypatch.setenv("GRAPHRL_PASS_LIMIT", str(limit))
    program, td = traced((lambda x: x.tanh() + x.tanh(), ["x"], ["y"]))
    cut = run_passes(program)
    assert [record.name for record in cut.history] == [step.__name__ for step in LIVE[:limit]]
    assert_equal_values(program, cut, td)
