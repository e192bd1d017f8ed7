import pytest
import torch
from tensordict import TensorDict
from torch import nn, optim

import graphrl as grl
from graphrl.errors import GraphError
from graphrl.models import GRUModule, LSTMModule

KINDS = [GRUModule, LSTMModule]


def sequence(module, rows=3, steps=6, dtype=torch.float64):
    x = torch.randn(rows, steps, 4, dtype=dtype)
    is_init = torch.zeros(rows, steps, 1, dtype=torch.bool)
    is_init[1, 0], is_init[2, 4] = True, True
    state = torch.randn(rows, steps, *module.state_shape, dtype=dtype)
    return TensorDict(observation=x, recurrent_state=state, is_init=is_init, batch_size=[rows, steps])


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_torch_s_cell(kind):
    module = kind(4, 5, dtype=torch.float64)
    td = TensorDict(
        observation=torch.randn(3, 4, dtype=torch.float64),
        recurrent_state=torch.randn(3, *module.state_shape, dtype=torch.float64),
        is_init=torch.zeros(3, 1, dtype=torch.bool),
        batch_size=[3],
    )
    module(td)
    h = td["recurrent_state"]
    wanted = module.cell(td["observation"], h if kind is GRUModule else (h[:, 0], h[:, 1]))
    wanted = (wanted, wanted) if kind is GRUModule else (wanted[0], torch.stack(wanted, 1))
    torch.testing.assert_close((td["features"], td["next", "recurrent_state"]), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_over_time_is_one_step_after_the_other_and_starts_anew_where_a_row_says_so(kind):
    module = kind(4, 5, dtype=torch.float64)
    whole = module.over_time()(sequence(module))
    state = whole["recurrent_state"][:, 0]
    for t in range(6):
        td = TensorDict(
            observation=whole["observation"][:, t],
            recurrent_state=state,
            is_init=whole["is_init"][:, t],
            batch_size=[3],
        )
        module(td)
        torch.testing.assert_close(td["features"], whole["features"][:, t])
        state = td["next", "recurrent_state"]
        torch.testing.assert_close(state, whole["next", "recurrent_state"][:, t])
    alone = TensorDict(
        observation=whole["observation"][2:, 4:],
        recurrent_state=module.initial_state(1, 2),
        is_init=torch.zeros(1, 2, 1, dtype=torch.bool),
        batch_size=[1, 2],
    )
    torch.testing.assert_close(module.over_time()(alone)["features"][0], whole["features"][2, 4:])
    assert list(module.over_time().state_dict()) == list(module.state_dict())


@pytest.mark.parametrize("backend", ["eager", "inductor", "native", "onnx"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_policy_carries_its_state_and_resets_by_the_mask(kind, backend):
    module = kind(4, 5)
    graph = grl.KeyedGraph(module, (nn.Linear(5, 2), ["features"], ["action"]))
    fast = grl.compile(graph, backend=backend, strict=True)
    slow_state = fast_state = module.initial_state(3)
    with torch.no_grad():
        for t in range(8):
            x = torch.randn(3, 4)
            is_init = torch.tensor([[t == 0], [t == 3], [False]])
            a = fast(TensorDict(observation=x, recurrent_state=fast_state, is_init=is_init, batch_size=[3]))
            b = graph(TensorDict(observation=x, recurrent_state=slow_state, is_init=is_init, batch_size=[3]))
            torch.testing.assert_close(a["action"], b["action"], rtol=1e-5, atol=1e-6)
            fast_state, slow_state = a["next", "recurrent_state"], b["next", "recurrent_state"]
    assert len(fast.entries()) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_training_through_time_equals_eager(kind):
    def trainer():
        torch.manual_seed(0)
        module = kind(4, 5, dtype=torch.float64)
        head = nn.Linear(5, 1, dtype=torch.float64)
        graph = grl.KeyedGraph(module.over_time(), (head, ["features"], ["value"]))
        optimizer = optim.Adam(graph.parameters(), 0.01)

        def step(td):
            graph(td)
            loss = (td["value"].squeeze(-1) - td["observation"].cumsum(1).sum(-1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return {"loss": loss}

        return graph, step

    (graph, step), (other, eager) = trainer(), trainer()
    update = grl.compile_update(step, backend="eager")
    for seed in range(10):
        torch.manual_seed(seed)
        td = sequence(graph[0])
        torch.testing.assert_close(update(td.clone())["loss"], eager(td.clone())["loss"].detach())
    for p, q in zip(graph.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_what_is_no_flag_is_refused():
    module = GRUModule(4, 5)
    td = TensorDict(
        observation=torch.randn(3, 4),
        recurrent_state=module.initial_state(3),
        is_init=torch.zeros(3, 1),
        batch_size=[3],
    )
    with pytest.raises(GraphError, match=r"'is_init' is torch.float32 \[3, 1\]: expected bool"):
        module(td)
