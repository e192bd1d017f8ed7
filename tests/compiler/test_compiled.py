import copy
import io
import pickle
import threading

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModule, set_interaction_type
from torch import nn

import graphrl as grl
from graphrl import KeyedGraph
from graphrl.compiler import compiled as compiled_module
from graphrl.errors import CompileError, GraphError, KeyMissingError, SpecError
from graphrl.models import GaussianActor


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def policy(**options):
    layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    return KeyedGraph((layers, ["observation"], ["action"]), **options)


def rows(n=4, dtype=torch.float32, **more):
    return TensorDict({"observation": torch.randn(n, 3, dtype=dtype), **more}, batch_size=[n])


def assert_same(fast, graph, td):
    found, expected = fast(td.clone()), graph(td.clone())
    assert set(found.keys(True, True)) == set(expected.keys(True, True))
    for key in expected.keys(True, True):
        assert torch.equal(found.get(key), expected.get(key)), key


def test_unrelated_keys_never_compile_again():
    fast = grl.compile(policy(), backend="eager")
    td = rows()
    for i in range(10):
        fast(td)
        td[f"extra_{i}"] = torch.zeros(4)
        td["next", f"extra_{i}"] = torch.zeros(4, 1)
    assert len(fast.entries()) == 1 and fast.retraces == []


def test_writes_what_eager_writes_and_leaves_the_rest():
    graph = KeyedGraph(
        (nn.Linear(3, 2), ["observation"], ["h"]), (torch.tanh, ["h"], [("next", "y")]), out_keys=[("next", "y")]
    )
    fast = grl.compile(graph, backend="eager")
    td = rows(other=torch.ones(4), next=TensorDict(z=torch.ones(4), batch_size=[4]))
    assert_same(fast, graph, td)
    assert fast(td) is td and (td["next", "z"] == 1).all() and td.batch_size == torch.Size([4])


def test_a_locked_batch_is_refused_as_in_eager():
    graph, td = policy(), rows().lock_()
    with pytest.raises((RuntimeError, GraphError), match="[Ll]ocked"):
        graph(td)
    with pytest.raises((RuntimeError, GraphError), match="[Ll]ocked"):
        grl.compile(graph, backend="eager")(td)
    assert td.is_locked and set(td.keys()) == {"observation"}


def test_the_device_of_the_batch_is_kept():
    td = rows().to("cpu")
    fast = grl.compile(policy(), backend="eager")
    assert fast(td)["action"].device == td.device and td.device == torch.device("cpu")


def test_a_batch_size_the_outputs_do_not_fit_is_an_error_as_in_eager():
    graph = KeyedGraph((lambda x: x.sum(-1), ["observation"], ["y"]))
    fast = grl.compile(graph, backend="eager")
    fast(rows())
    wide = TensorDict(observation=torch.randn(4, 3), batch_size=[4, 3])
    with pytest.raises(GraphError, match="batch dimension mismatch"):
        fast(wide)
    assert "y" not in wide.keys()


def test_the_batch_size_may_matter_to_a_node():
    class Count(TensorDictModule):
        def forward(self, tensordict):
            return tensordict.set("n", torch.full(tensordict.batch_size, float(tensordict.numel())))

    fast = grl.compile(Count(lambda x: x, in_keys=["observation"], out_keys=["n"]), backend="eager")
    assert fast(rows())["n"].tolist() == [4.0] * 4
    assert fast(TensorDict(observation=torch.zeros(4, 3), batch_size=[]))["n"].item() == 1.0


def test_plain_tensors_by_position_keyword_and_call():
    graph = KeyedGraph((torch.sub, ["x", ("next", "x")], ["d"]))
    fast = grl.compile(graph, backend="eager")
    a, b = torch.ones(3, 1), torch.zeros(3, 1)
    assert torch.equal(fast(a, b), a) and torch.equal(fast(x=a, next_x=b), a)
    assert isinstance(fast.call(a, b), tuple) and torch.equal(fast.call(a, b)[0], a)
    assert len(fast.entries()) == 1
    fast(TensorDict({"x": a, ("next", "x"): b}, batch_size=[3]))
    assert len(fast.entries()) == 1, "plain tensors and a TensorDict of the same shape share a program"


def test_wrong_calls_name_the_key():
    fast = grl.compile(policy(), backend="eager")
    with pytest.raises(KeyMissingError, match=r"reads 'observation'.*Did you mean 'observations'"):
        fast(TensorDict(observations=torch.zeros(2, 3), batch_size=[2]))
    with pytest.raises(GraphError, match=r"no input 'obs'.*\['observation'\]"):
        fast(obs=torch.zeros(2, 3))
    with pytest.raises(KeyMissingError, match="input 'observation' is missing"):
        fast()
    with pytest.raises(SpecError, match="got 2 tensors, expected 1"):
        fast.call(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(GraphError, match=r"node 0 \(Sequential\).*\[2, 4\]"):
        fast.call(torch.zeros(2, 4))


# ---- weights


def zeroed(graph):
    return {name: torch.zeros_like(value) for name, value in graph.state_dict().items()}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("assign", [False, True])
def test_zero_weights_give_exactly_zero(assign, backend):
    graph = policy()
    fast = grl.compile(graph, rows(), backend=backend, strict=True)
    assert fast(rows())["action"].abs().sum() > 0
    graph.load_state_dict(zeroed(graph), assign=assign)
    assert (fast(rows())["action"] == 0).all() and fast.retraces == []


def test_weights_changed_in_place_or_replaced_are_seen():
    graph = policy()
    fast = grl.compile(graph, rows(), backend="eager")
    layer = graph[0].module[2]
    layer.weight.mul_(2)
    assert_same(fast, graph, rows())
    layer.weight = nn.Parameter(torch.randn(2, 8))
    assert_same(fast, graph, rows())
    layer.weight.data = torch.randn(2, 8)
    assert_same(fast, graph, rows())
    assert fast.retraces == []


def test_an_optimiser_step_is_seen():
    graph = policy()
    fast = grl.compile(graph, rows(), backend="eager")
    with torch.enable_grad():
        graph(rows())["action"].sum().backward()
    torch.optim.SGD(graph.parameters(), lr=0.5).step()
    assert_same(fast, graph, rows())


@pytest.mark.parametrize("move", [lambda g: g.to(torch.float64), lambda g: g.double()])
def test_another_dtype_compiles_again(move):
    graph = policy()
    fast = grl.compile(graph, rows(), backend="eager")
    move(fast)
    assert graph[0].module[0].weight.dtype == torch.float64
    assert_same(fast, graph, rows(dtype=torch.float64))
    assert fast(rows(dtype=torch.float64))["action"].dtype == torch.float64


def test_weights_of_another_dtype_under_the_same_inputs_compile_again():
    graph = KeyedGraph((nn.Embedding(3, 2), ["index"], ["y"]))
    td = TensorDict(index=torch.tensor([0, 2]), batch_size=[2])
    fast = grl.compile(graph, td, backend="eager")
    graph.double()
    assert_same(fast, graph, td)
    assert any("became torch.float64" in reason for reason in fast.retraces)


def test_state_dict_names_are_the_graph_s_own_and_load_both_ways(tmp_path):
    graph, other = policy(), policy()
    fast = grl.compile(graph, backend="eager")
    assert list(fast.state_dict()) == list(graph.state_dict())
    torch.save(fast.state_dict(), tmp_path / "weights.pt")
    other.load_state_dict(torch.load(tmp_path / "weights.pt"), strict=True)
    assert_same(fast, other, rows())
    fast.load_state_dict(policy().state_dict(), strict=True)
    assert_same(fast, graph, rows())
    outer = KeyedGraph(fast, (torch.tanh, ["action"], ["y"]))
    assert list(outer.state_dict()) == [f"nodes.0.{name}" for name in graph.state_dict()]


def test_non_persistent_buffers_stay_out_of_the_state_dict():
    class Holder(KeyedGraph):
        def __init__(self):
            super().__init__((nn.Linear(3, 2), ["observation"], ["action"]))
            self.register_buffer("scratch", torch.zeros(1), persistent=False)

    graph = Holder()
    assert list(grl.compile(graph, backend="eager").state_dict()) == list(graph.state_dict())


# ---- modes


def test_train_and_eval_take_effect_from_either_side():
    graph = KeyedGraph((nn.Dropout(0.5), ["observation"], ["y"]))
    fast = grl.compile(graph, backend="eager")
    td = TensorDict(observation=torch.ones(4, 8), batch_size=[4])
    for change in (fast.eval, graph.train, graph.eval, fast.train):
        change()
        torch.manual_seed(0)
        found = fast(td.clone())["y"]
        torch.manual_seed(0)
        assert torch.equal(found, graph(td.clone())["y"])
        assert (found == 1).all() == (not graph.training)
    assert len(fast.entries()) == 2


def test_batch_norm_updates_its_statistics_in_training_only():
    graph = KeyedGraph((nn.BatchNorm1d(3), ["observation"], ["y"]))
    other = copy.deepcopy(graph)
    fast = grl.compile(graph, backend="eager")
    for training in (True, True, False, True):
        graph.train(training), other.train(training)
        assert_same(fast, other, rows())
    found, expected = graph.state_dict(), other.state_dict()
    assert expected["nodes.0.module.num_batches_tracked"] == 3
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])


def test_the_interaction_type_takes_effect():
    actor = GaussianActor(3, 2)
    fast, td = grl.compile(actor, backend="eager"), rows()
    for kind in (InteractionType.RANDOM, InteractionType.DETERMINISTIC, InteractionType.RANDOM):
        with set_interaction_type(kind):
            torch.manual_seed(5)
            found = fast(td.clone())
            torch.manual_seed(5)
            assert torch.equal(found["action"], actor(td.clone())["action"])
    assert len(fast.entries()) == 2


def test_the_first_call_draws_what_eager_draws():
    graph = KeyedGraph((lambda x: x + torch.randn_like(x), ["observation"], ["y"]))
    td = rows()
    torch.manual_seed(1)
    expected = [graph(td.clone())["y"] for _ in range(2)]
    fast = grl.compile(graph, backend="eager")
    torch.manual_seed(1)
    assert all(torch.equal(fast(td.clone())["y"], y) for y in expected)


# ---- outputs and inputs


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_an_output_is_not_overwritten_by_the_next_call(backend):
    fast = grl.compile(KeyedGraph((lambda x: x**3, ["x"], ["y"])), backend=backend, strict=True)
    one, two = fast.call(torch.tensor([1.0]))[0], fast.call(torch.tensor([2.0]))[0]
    assert one.item() == 1.0 and two.item() == 8.0


def test_a_random_output_is_not_overwritten_by_the_next_call():
    fast = grl.compile(
        KeyedGraph((lambda x: (torch.randn_like(x), torch.randn_like(x) + x), ["x"], ["e", "y"])), backend="eager"
    )
    kept = fast.call(torch.zeros(5))
    first = [t.clone() for t in kept]
    fast.call(torch.zeros(5))
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


def test_writing_an_output_in_place_harms_neither_constants_nor_other_outputs():
    def node(x):
        return torch.tensor([1.0, 2.0]), x.tanh(), x.tanh(), x.to(torch.float32, copy=True)

    fast = grl.compile(KeyedGraph((node, ["x"], ["literal", "a", "b", "copy"])), backend="eager")
    x = torch.zeros(2)
    for _ in range(2):
        literal, a, b, copied = fast.call(x)
        assert literal.tolist() == [1.0, 2.0] and (a == 0).all() and (b == 0).all() and (copied == 0).all()
        literal.add_(5), a.add_(5), copied.add_(5)
        assert (b == 0).all() and (x == 0).all()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_inputs_of_any_memory_layout(backend):
    graph = policy()
    fast = grl.compile(graph, backend=backend)
    for x in (torch.randn(3, 4).t(), torch.randn(8, 6)[::2, ::2], torch.randn(1, 3).expand(4, 3)):
        torch.testing.assert_close(fast.call(x)[0], graph(x))
    assert len(fast.entries()) == 1


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("n", [0, 1])
def test_batches_of_no_and_one_row(n, backend):
    graph = policy()
    fast = grl.compile(graph, backend=backend)
    td = rows(n)
    torch.testing.assert_close(fast(td.clone())["action"], graph(td.clone())["action"])
    assert fast(td)["action"].shape == (n, 2)


def test_an_input_changed_in_place_by_a_node_changes_as_in_eager():
    fast = grl.compile(KeyedGraph((lambda x: x.mul_(2) + 1, ["x"], ["y"])), backend="eager")
    x = torch.ones(3)
    assert fast.call(x)[0].tolist() == [3.0] * 3 and x.tolist() == [2.0] * 3


# ---- copies and threads


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))])
def test_a_copy_has_weights_of_its_own(clone):
    fast = grl.compile(policy(), rows(), backend="eager")
    other, td = clone(fast), rows()
    assert torch.equal(other(td.clone())["action"], fast(td.clone())["action"])
    other.load_state_dict(zeroed(other))
    assert (other(td.clone())["action"] == 0).all() and (fast(td.clone())["action"] != 0).any()


def test_torch_save_takes_a_compiled_graph():
    fast, buffer = grl.compile(policy(), rows(), backend="eager"), io.BytesIO()
    torch.save(fast, buffer)
    buffer.seek(0)
    td = rows()
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(loaded(td.clone())["action"], fast(td.clone())["action"])


def test_two_threads_with_batches_of_different_size():
    graph = policy()
    fast = grl.compile(graph, backend="eager")
    wrong: list[str] = []

    def work(n):
        with torch.no_grad():
            x = torch.randn(n, 3)
            expected = graph(x)
            for _ in range(300):
                try:
                    if not torch.equal(fast.call(x)[0], expected):
                        wrong.append("value")
                except Exception as error:
                    wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(n,)) for n in (2, 5)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert wrong == [] and len(fast.entries()) == 2


def test_inference_mode_shares_the_program_of_no_grad():
    graph = policy()
    fast = grl.compile(graph, backend="eager")
    with torch.inference_mode():
        fast(rows())
    assert_same(fast, graph, rows())
    assert len(fast.entries()) == 1
    with torch.enable_grad():
        fast(rows())["action"].sum().backward()
    assert graph[0].module[0].weight.grad is not None


# ---- choosing a backend


def test_an_unknown_backend_names_the_nearest():
    with pytest.raises(CompileError, match="no backend 'inductr'.*Did you mean 'inductor'"):
        grl.compile(policy(), backend="inductr")


def test_a_refusal_falls_back_and_is_told_or_is_an_error_when_strict():
    fast = grl.compile(policy(), rows(0), backend="inductor")
    assert fast.entries()[0].backend == "eager" and "inductor: " in fast.entries()[0].refusals[0]
    assert "refused by inductor" in str(grl.explain(fast))
    with pytest.raises(CompileError, match="inductor refuses.*empty.*strict=False"):
        grl.compile(policy(), rows(0), backend="inductor", strict=True)


def test_past_the_limit_of_programs_calls_run_eagerly(monkeypatch):
    monkeypatch.setattr(compiled_module, "MAX_PROGRAMS", 2)
    graph = policy()
    fast = grl.compile(graph, backend="eager")
    for n in range(1, 5):
        assert_same(fast, graph, rows(n))
    assert [e.backend for e in fast.entries()] == ["eager", "eager", "eager graph", "eager graph"]
    assert "2 programs are compiled already" in str(grl.explain(fast))


def test_anything_a_graph_takes_as_a_node_compiles():
    td = rows()
    assert torch.equal(grl.compile((torch.tanh, ["observation"], ["y"]), backend="eager")(td)["y"], td["y"])
    module = TensorDictModule(nn.Linear(3, 2), in_keys=["observation"], out_keys=["y"])
    assert_same(grl.compile(module, backend="eager"), module, rows())


def test_the_distribution_is_the_graph_s():
    actor = GaussianActor(3, 2)
    td = rows()
    assert torch.equal(grl.compile(actor, backend="eager").get_dist(td).mode, actor.get_dist(td).mode)


def test_a_replaced_module_is_used_at_the_next_call():
    graph = grl.KeyedGraph(TensorDictModule(nn.Linear(3, 2), in_keys=["x"], out_keys=["y"]))
    fast = grl.compile(graph, backend="eager")
    x = torch.randn(4, 3)
    with torch.no_grad():
        fast.call(x)
        graph[0].module = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
        torch.testing.assert_close(fast.call(x)[0], graph(x))
    assert fast.retraces == ["a module was replaced by another"]


def test_code_that_writes_its_input_writes_one_that_lies_transposed():
    def double(x, y):
        return x.mul_(2) + y

    fast = grl.compile(grl.KeyedGraph((double, ["x", "y"], ["z"])), backend="eager")
    x, y = torch.ones(2, 3).t(), torch.ones(1, 2).expand(3, 2)
    with torch.no_grad():
        assert torch.equal(fast.call(x, y)[0], torch.full((3, 2), 3.0)) and torch.equal(x, torch.full((3, 2), 2.0))
