import copy
import functools

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModule, set_interaction_type
from torch import nn

import graphrl as grl
from graphrl import KeyedGraph
from graphrl.errors import KeyMissingError, SpecError, TraceError
from graphrl.losses import PPOLoss
from graphrl.models import CategoricalActor, GaussianActor, TanhGaussianActor, ValueCritic

aten = torch.ops.aten


def rows(*batch, features=3, **more):
    return TensorDict({"x": torch.randn(*batch, features), **more}, batch_size=batch)


def run(program, td):
    return dict(zip(program.out_keys, program.run(*(td.get(k) for k in program.in_keys)), strict=True))


def assert_traced_equals_eager(graph, td, seed=3):
    program = grl.trace(graph, td)
    torch.manual_seed(seed)
    found = run(program, td)
    torch.manual_seed(seed)
    with torch.no_grad():
        expected = graph(td.clone())
    for key, value in found.items():
        assert torch.equal(value, expected.get(key)), key
    return program


@pytest.mark.parametrize("batch", [1, 3])
def test_a_single_module_with_one_output_keeps_its_shape(batch):
    module = TensorDictModule(nn.Linear(3, 4), in_keys=["x"], out_keys=["y"])
    program = assert_traced_equals_eager(module, rows(batch))
    assert program.outputs[0].shape == (batch, 4)


def test_hidden_keys_stay_hidden():
    graph = KeyedGraph((nn.Linear(3, 4), ["x"], ["h"]), (nn.Linear(4, 2), ["h"], ["y"]), out_keys=["y"])
    assert assert_traced_equals_eager(graph, rows(3)).out_keys == ["y"]


@pytest.mark.parametrize(
    "node",
    [
        lambda x: x.sin() + 1,
        functools.partial(torch.clamp, min=-0.5, max=0.5),
        torch.tanh,
        nn.Sequential(nn.Linear(3, 3), nn.ELU()),
        torch.nn.functional.relu,
    ],
    ids=["lambda", "partial", "builtin", "module", "function"],
)
def test_any_callable_traces(node):
    assert_traced_equals_eager(KeyedGraph((node, ["x"], ["y"])), rows(4))


@pytest.mark.parametrize("kind", [InteractionType.RANDOM, InteractionType.DETERMINISTIC, InteractionType.MODE])
@pytest.mark.parametrize("actor", [GaussianActor, TanhGaussianActor, CategoricalActor])
def test_actors_trace_under_every_interaction_type(actor, kind):
    td = TensorDict(observation=torch.randn(4, 5), batch_size=[4])
    with set_interaction_type(kind):
        program = grl.trace(actor(5, 2), td)
    assert bool(program.noise) == (kind is InteractionType.RANDOM)


@pytest.mark.parametrize("actor", [GaussianActor, TanhGaussianActor, CategoricalActor])
def test_a_traced_actor_samples_as_eager_does(actor):
    assert_traced_equals_eager(actor(5, 2), TensorDict(observation=torch.randn(4, 5), batch_size=[4]))


def test_a_loss_traces():
    loss = PPOLoss(GaussianActor(3, 2), ValueCritic(3))
    td = TensorDict(
        {"observation": torch.randn(8, 3), "action": torch.randn(8, 2), "action_log_prob": torch.randn(8)}
        | {"advantage": torch.randn(8, 1), "value_target": torch.randn(8, 1)},
        batch_size=[8],
    )
    program = assert_traced_equals_eager(loss, td)
    assert "loss_objective" in program.out_keys and program.outputs[0].shape == ()


DRAWS = {
    "three of different shape": lambda x: torch.rand(4, 3)[:, :1] + torch.randn(4, 1) * torch.rand(7, 4, 1)[2],
    "normal with parameters": lambda x: torch.normal(x, x.exp()),
    "normal in place": lambda x: torch.empty_like(x).normal_(1.0, 2.0),
    "like a transposed tensor": lambda x: torch.randn_like(x.t()).t() + torch.rand_like(x.t()).t(),
    "dropout then normal": lambda x: nn.functional.dropout(x, 0.5) + torch.randn_like(x),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()) + torch.rand(1),
    "bernoulli in float64": lambda x: torch.bernoulli(x.double().sigmoid()) + torch.rand(1),
    "bernoulli in place": lambda x: torch.empty_like(x).bernoulli_(0.3) + torch.rand(1),
    "categorical": lambda x: torch.distributions.Categorical(logits=x).sample() + torch.rand(4),
    "multinomial": lambda x: torch.multinomial(x.softmax(-1), 1) + torch.rand(1),
    "gumbel softmax": lambda x: nn.functional.gumbel_softmax(x, hard=True),
    "integers": lambda x: torch.randint(3, 9, (4, 1)) + torch.randn(4, 1),
    "permutation": lambda x: x[torch.randperm(4)] + torch.randn(4, 1),
    "beta": lambda x: torch.distributions.Beta(x.exp(), x.exp()).sample(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_random_draws_are_eager_s_one_for_one(draw):
    program = assert_traced_equals_eager(KeyedGraph((draw, ["x"], ["y"])), rows(4, features=8))
    names = [str(n.target) for n in program.graph_module.graph.nodes]
    assert not any("rand" in name or "bernoulli" in name or "multinomial" in name for name in names)


def test_a_uniform_draw_with_bounds_differs_by_rounding_only():
    graph = KeyedGraph((lambda x: torch.empty_like(x).uniform_(-1, 2), ["x"], ["y"]))
    td = rows(4)
    torch.manual_seed(1)
    found = run(grl.trace(graph, td), td)["y"]
    torch.manual_seed(1)
    torch.testing.assert_close(found, graph(td)["y"], atol=3e-7, rtol=0)


def test_a_draw_nobody_reads_still_advances_the_generator():
    graph = KeyedGraph(
        (lambda x: (x + torch.randn_like(x), x), ["x"], ["h", "y"]),
        (lambda y: y + torch.rand_like(y), ["y"], ["z"]),
        out_keys=["z"],
    )
    td = rows(4)
    fast = grl.compile(graph, td, backend="eager")
    torch.manual_seed(1)
    expected = graph(td.clone())["z"]
    torch.manual_seed(1)
    with torch.no_grad():
        assert torch.equal(fast(td.clone())["z"], expected)


def test_train_and_eval_are_traced_as_they_are():
    graph = KeyedGraph((nn.Dropout(0.5), ["x"], ["y"]))
    assert len(grl.trace(graph, rows(3)).noise) == 1
    program = grl.trace(graph.eval(), rows(3))
    assert not program.noise and program.node_count() <= 1


def test_batch_norm_statistics_are_effects():
    graph = KeyedGraph((nn.BatchNorm1d(3, momentum=0.1), ["x"], ["y"]))
    td = TensorDict(x=2 * torch.ones(4, 3), batch_size=[4])
    program = grl.trace(graph, td)
    written = {slot.name.rsplit(".", 1)[1] for slot in program.state if slot.mutated}
    assert written == {"running_mean", "running_var", "num_batches_tracked"}
    assert (graph[0].module.running_mean == 0).all()
    run(program, td)
    torch.testing.assert_close(graph[0].module.running_mean, torch.full((3,), 0.2))
    assert graph[0].module.num_batches_tracked == 1
    graph.eval()
    assert not any(slot.mutated for slot in grl.trace(graph, td).state)


@pytest.mark.parametrize("grad", [True, False])
def test_tracing_changes_nothing(grad):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.norm = nn.BatchNorm1d(3)
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            self.count.add_(1)
            return self.drop(self.norm(x)) + torch.randn_like(x)

    graph = KeyedGraph((Counting(), ["x"], ["y"]), (lambda x: x.mul_(2), ["i"], ["z"]))
    td = rows(4, i=torch.ones(4))
    graph(td.clone())["y"].sum().backward()
    state = copy.deepcopy(graph.state_dict())
    grads = [p.grad.clone() for p in graph.parameters()]
    before, random = td.clone(), torch.get_rng_state()
    validate = torch.distributions.Distribution._validate_args
    with torch.set_grad_enabled(grad):
        grl.trace(graph, td)
        grl.compile(graph, td, backend="eager")
    assert all(torch.equal(state[k], v) for k, v in graph.state_dict().items())
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, graph.parameters(), strict=True))
    assert torch.equal(random, torch.get_rng_state())
    assert set(td.keys()) == {"x", "i"} and (td == before).all()
    assert torch.distributions.Distribution._validate_args == validate


def test_the_printed_program_runs():
    actor = GaussianActor(3, 2)
    td = TensorDict(observation=torch.randn(4, 3), batch_size=[4])
    program = grl.trace(actor, td)
    namespace = {}
    exec(str(program), namespace)
    torch.manual_seed(1)
    arguments = program.arguments([td["observation"]])
    with torch.no_grad():
        printed = namespace["gaussian_actor"](*arguments)
        expected = program.graph_module(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(printed, expected, strict=True))


@pytest.mark.parametrize("key", ["lambda", "torch", "device", "nan", "add", "1x", "é", "a b", ("next", "x"), "~"])
def test_any_key_makes_a_runnable_print(key):
    program = grl.trace(
        KeyedGraph((lambda x: torch.full_like(x, float("nan")) + x.to(torch.float64), [key], ["y"])),
        TensorDict({key: torch.ones(2)}, batch_size=[]),
    )
    namespace = {}
    exec(program.code, namespace)
    assert namespace["program"](torch.ones(2))[0].dtype == torch.float64


def test_names_that_look_alike_stay_apart_in_print():
    td = TensorDict({"a_b": torch.ones(1), ("a", "b"): torch.zeros(1), "a/b": torch.full((1,), 3.0)}, batch_size=[])
    program = grl.trace(KeyedGraph((lambda a, b, c: a + 10 * b + 100 * c, ["a_b", ("a", "b"), "a/b"], ["y"])), td)
    namespace = {}
    exec(program.code, namespace)
    assert namespace["program"](*(td.get(k) for k in program.in_keys))[0].item() == 301.0


GOLDEN = """\
# program: 1 inputs, 4 state tensors, 5 operations
#   in    observation: f32[2, 3]
#   out   action: f32[2, 1]
#   state nodes.0.module.0.weight: f32[4, 3]
#   state nodes.0.module.0.bias: f32[4]
#   state nodes.0.module.2.weight: f32[1, 4]
#   state nodes.0.module.2.bias: f32[1]
import torch
from torch import device, inf, nan  # noqa: F401

def program(observation, nodes_0_module_0_weight, nodes_0_module_0_bias, nodes_0_module_2_weight, nodes_0_module_2_bias):
    permute = torch.ops.aten.permute.default(nodes_0_module_0_weight, [1, 0])  # f32[3, 4]
    addmm = torch.ops.aten.addmm.default(nodes_0_module_0_bias, observation, permute)  # f32[2, 4]
    tanh = torch.ops.aten.tanh.default(addmm)  # f32[2, 4]
    permute_1 = torch.ops.aten.permute.default(nodes_0_module_2_weight, [1, 0])  # f32[4, 1]
    addmm_1 = torch.ops.aten.addmm.default(nodes_0_module_2_bias, tanh, permute_1)  # f32[2, 1]
    return (addmm_1,)
"""  # noqa: E501


def test_the_print_of_a_small_actor():
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    graph = KeyedGraph((network, ["observation"], ["action"]))
    program = grl.trace(graph, TensorDict(observation=torch.zeros(2, 3), batch_size=[2]))
    assert "".join(line + "\n" for line in program.code.splitlines()) == GOLDEN


def test_inputs_are_bound_by_name_whatever_the_order_of_the_batch():
    graph = KeyedGraph((lambda a, b: (a + 10 * b, b), ["a", "b"], ["y", "z"]))
    one, two = torch.ones(1), torch.full((1,), 2.0)
    for td in (TensorDict(a=one, b=two, batch_size=[1]), TensorDict(b=two, a=one, batch_size=[1])):
        out = run(grl.trace(graph, td), td)
        assert out["y"].item() == 21.0 and out["z"].item() == 2.0
        with torch.no_grad():
            fast = grl.compile(graph, backend="eager")(td.clone())
        assert fast["y"].item() == 21.0


def branching(x):
    if x.sum() > 0:  # the line an error must name
        return x
    return -x


def masking(x):
    return x[x > 0].sum()  # the line an error must name


@pytest.mark.parametrize("wrong", [branching, masking, lambda x: x * float(x[0, 0]), lambda x: torch.nonzero(x)])
def test_code_that_depends_on_values_is_refused_at_the_user_s_line(wrong):
    line = wrong.__code__.co_firstlineno + (0 if wrong.__name__ == "<lambda>" else 1)
    with pytest.raises(TraceError, match=rf"test_trace\.py:{line}.*torch\.where"):
        grl.trace(KeyedGraph((wrong, ["x"], ["y"])), rows(3))


def test_writing_under_a_mask_is_fine():
    def clear(x):
        x = x.clone()
        x[x > 0] = 0.0
        return x

    assert_traced_equals_eager(KeyedGraph((clear, ["x"], ["y"])), rows(3))


def test_literals_are_constants_and_closed_over_tensors_stay_live():
    held = torch.ones(3)
    graph = KeyedGraph((lambda x: x + held.exp() * torch.tensor(2.0), ["x"], ["y"]))
    program = grl.trace(graph, rows(2))
    assert sorted(slot.kind for slot in program.state) == ["buffer", "constant"]
    fast = grl.compile(graph, rows(2), backend="eager")
    with torch.no_grad():
        held.zero_()
        assert torch.equal(fast.call(torch.zeros(2, 3))[0], torch.full((2, 3), 2.0))


def test_a_compiled_graph_inside_a_graph_is_traced_through():
    inner = grl.compile(KeyedGraph((nn.Linear(3, 3), ["x"], ["h"])), rows(2), backend="eager")
    graph = KeyedGraph(inner, (torch.tanh, ["h"], ["y"]))
    program = assert_traced_equals_eager(graph, rows(2))
    assert [slot.kind for slot in program.state] == ["parameter", "parameter"]


def test_a_missing_key_and_what_is_no_example():
    graph = KeyedGraph((torch.tanh, ["observation"], ["y"]))
    with pytest.raises(KeyMissingError, match=r"reads 'observation'.*Did you mean 'observations'"):
        grl.trace(graph, TensorDict(observations=torch.zeros(2), batch_size=[]))
    with pytest.raises(SpecError, match="the example is a list"):
        grl.trace(graph, [torch.zeros(2)])
    with pytest.raises(SpecError, match="'observation' is a TensorDict in the example"):
        grl.trace(graph, TensorDict(observation=TensorDict(a=torch.zeros(2)), batch_size=[]))
    assert grl.trace(graph, {"observation": torch.zeros(2)}).in_keys == ["observation"]


def test_a_program_refuses_other_inputs_by_name():
    program = grl.trace(KeyedGraph((torch.tanh, ["x"], ["y"])), rows(2))
    with pytest.raises(SpecError, match=r"'x' is x: f32\[3, 3\], but this program was traced for x: f32\[2, 3\]"):
        program.run(torch.zeros(3, 3))
    with pytest.raises(SpecError, match="got 0 tensors, expected 1"):
        program.run()
