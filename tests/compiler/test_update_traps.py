"""Steps and calls that are easily got silently wrong: each equals eager, or is refused with the reason."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import graphrl as grl
from graphrl.errors import GraphRLError, ParityError, SpecError, TraceError


def _batch() -> TensorDict:
    return TensorDict(x=torch.ones(2, 1), batch_size=[2])


def _sgd_step(module, optimizer):
    def step(batch):
        optimizer.zero_grad()
        loss = module(batch["x"]).square().sum()
        loss.backward()
        optimizer.step()
        return {"loss": loss}

    return step


def test_gradients_left_by_the_call_before_are_refused():
    module = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)

    def step(batch):  # no zero_grad
        loss = module(batch["x"]).sum()
        loss.backward()
        optimizer.step()
        return {"loss": loss}

    with pytest.raises(ParityError, match="zero_grad missing"):
        grl.compile_update(step, _batch(), backend="eager")


def test_replacing_data_is_refused_and_undone():
    source, target = nn.Linear(1, 1), nn.Linear(1, 1)
    before = target.weight.detach().clone()

    def step(batch):
        target.weight.data = 0.5 * target.weight.data + 0.5 * source.weight.data
        return {"value": target(batch["x"]).mean()}

    with pytest.raises(TraceError, match="copy_, lerp_"):
        grl.compile_update(step, _batch(), backend="eager")
    assert torch.equal(target.weight, before)


def test_freezing_and_unfreezing_midway_takes_effect():
    module = nn.Linear(1, 1)
    update = grl.compile_update(_sgd_step(module, torch.optim.SGD(module.parameters(), 0.1)), backend="eager")
    update(_batch())
    module.bias.requires_grad_(False)
    bias = module.bias.clone()
    update(_batch())
    assert torch.equal(module.bias, bias)
    module.bias.requires_grad_(True)
    update(_batch())
    assert not torch.equal(module.bias, bias)


def test_momentum_of_a_parameter_added_later_starts_at_its_first_gradient():
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([first], 0.1, momentum=0.9)

    def step(batch):
        optimizer.zero_grad()
        second.grad = None
        loss = ((first + second) * batch["x"].mean()).sum()
        loss.backward()
        optimizer.step()
        return {"loss": loss}

    update = grl.compile_update(step, backend="eager")
    update(_batch())
    optimizer.add_param_group({"params": [second]})
    update(_batch())
    assert second.item() == pytest.approx(-0.1)


def test_a_bias_without_a_true_gradient_is_no_parity_error():
    for seed in range(4):
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(module.parameters(), 1e-2)
        batch = TensorDict(x=torch.randn(16, 1), batch_size=[16])
        grl.compile_update(_sgd_step(module, optimizer), batch, backend="eager")


@pytest.mark.parametrize("index", [[0, 1], torch.empty(0, dtype=torch.int64), torch.tensor(0), torch.tensor([0.0])])
def test_an_index_that_is_none_says_what_it_must_be(index):
    module = nn.Linear(1, 1)
    update = grl.compile_update(_sgd_step(module, torch.optim.SGD(module.parameters(), 0.1)), backend="eager")
    with pytest.raises(SpecError, match="expected int64 row numbers"):
        update(_batch(), index)


@pytest.mark.parametrize("backend", ["native", "inductor"])
def test_a_square_weight_transposed_in_place_is_noticed(backend):
    graph = grl.KeyedGraph((nn.Linear(4, 4), ["x"], ["y"]))
    fast, x = grl.compile(graph, backend=backend), torch.randn(3, 4)
    with torch.no_grad():
        fast.call(x)
        weight = graph[0].module.weight
        weight.data = weight.data.t()
        torch.testing.assert_close(fast.call(x)[0], graph(x))


@pytest.mark.parametrize("backend", ["native", "onnx", "eager"])
def test_a_lazily_negated_input_keeps_its_sign(backend):
    fast = grl.compile(grl.KeyedGraph((lambda x: x * 2, ["x"], ["y"])), backend=backend)
    assert fast.call(torch.tensor([1 + 2j]).conj().imag)[0].item() == -4


def test_a_graph_without_gradient_runs_with_gradients_enabled():
    class Detached(nn.Linear):
        def forward(self, x):
            return super().forward(x).detach()

    module = Detached(3, 4)
    fast, x = grl.compile(grl.KeyedGraph((module, ["x"], ["y"]))), torch.randn(5, 3)
    torch.testing.assert_close(fast.call(x)[0], module(x))


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_an_lstm_compiles(backend):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 4, batch_first=True)

        def forward(self, x):
            return self.lstm(x)[0][:, -1]

    graph, x = grl.KeyedGraph((Last(), ["x"], ["y"])), torch.randn(2, 5, 3)
    torch.testing.assert_close(grl.compile(graph, backend=backend).call(x)[0], graph(x))


def test_a_dictionary_with_one_key_is_an_example():
    fast = grl.compile(grl.KeyedGraph((nn.Linear(3, 2), ["x"], ["y"])), {"x": torch.randn(8, 3)}, backend="eager")
    assert fast.entries()[0].program.outputs[0].shape == (8, 2)


def test_every_refusal_is_a_graphrl_error():
    assert all(issubclass(e, GraphRLError) for e in (ParityError, SpecError, TraceError))


@pytest.mark.parametrize("backend", ["native", "onnx"])
def test_a_graph_that_writes_into_its_input_is_refused_with_the_key(backend):
    def shifted(x):
        x.add_(1)
        return x * 2

    fast = grl.compile(grl.KeyedGraph((shifted, ["x"], ["y"])), {"x": torch.zeros(2, 3)}, backend=backend)
    assert any("writes into its input 'x'" in refusal for refusal in fast.entries()[0].refusals)
