import pytest
import torch
from tensordict import TensorDict
from torch import nn

from graphrl.errors import GraphError, KeyMissingError, SpecError
from graphrl.graph import KeyedGraph
from graphrl.losses import LossGraph, LossTerm, value_error


def regression(**options):
    term = LossTerm(value_error, ["state_value", "value_target"], ["loss_critic"], **options)
    return LossGraph({"critic": KeyedGraph((nn.Linear(3, 1), ["observation"], ["state_value"])), "error": term})


def batch(n=5):
    return TensorDict(observation=torch.randn(n, 3), value_target=torch.randn(n, 1), batch_size=[n])


def test_returns_a_new_tensordict_of_scalars_and_leaves_the_batch():
    loss, td = regression(), batch()
    before = td.clone()
    out = loss(td)
    assert loss.returns_new and loss.in_keys == ["observation", "value_target"] and loss.out_keys == ["loss_critic"]
    assert out.batch_size == torch.Size([]) and set(out.keys()) == {"loss_critic"} and out["loss_critic"].shape == ()
    assert set(td.keys()) == set(before.keys()) and (td == before).all()


def test_takes_plain_tensors_by_keyword():
    loss, td = regression(), batch()
    plain = loss(observation=td["observation"], value_target=td["value_target"])
    assert torch.equal(plain, loss(td)["loss_critic"])


def test_a_flat_target_is_an_error_that_names_the_keys():
    with pytest.raises(SpecError, match=r"value_target='value_target'.*state_value \[5, 1\], value_target \[5\]"):
        regression()(observation=torch.randn(5, 3), value_target=torch.zeros(5))


def test_a_missing_key_names_the_node():
    with pytest.raises(KeyMissingError, match=r"node critic .* reads 'observation'.*Did you mean 'observations'"):
        regression()(TensorDict(observations=torch.randn(5, 3), value_target=torch.zeros(5, 1), batch_size=[5]))


def test_numbers_are_live_buffers_read_in_the_dtype_of_the_data():
    loss, td = regression(critic_coeff=0.1), batch()
    whole = regression()
    whole.nodes["critic"] = loss.nodes["critic"]
    assert loss.state_dict()["nodes.error.critic_coeff"].item() == 0.1
    torch.testing.assert_close(loss(td)["loss_critic"], 0.1 * whole(td)["loss_critic"])
    assert (
        loss(td)["loss_critic"].dtype == torch.float32
        and loss.double()(td.double())["loss_critic"].dtype == torch.float64
    )
    loss.term("error").option("critic_coeff").fill_(3.0)
    torch.testing.assert_close(loss(td.double())["loss_critic"], 3.0 * whole.double()(td.double())["loss_critic"])
    with pytest.raises(GraphError, match="Did you mean 'error'"):
        loss.term("eror")


def test_select_and_rename_give_losses_over_the_same_weights():
    loss, td = regression(), batch()
    cut = loss.select(out_keys=["loss_critic"])
    assert isinstance(cut, LossGraph) and list(cut.nodes) == ["critic", "error"]
    assert torch.equal(cut(td)["loss_critic"], loss(td)["loss_critic"])
    other = loss.rename(observation="obs", loss_critic="loss_value")
    td.rename_key_("observation", "obs")
    out = other(td)
    assert isinstance(other, LossGraph) and set(out.keys()) == {"loss_value"}
    out["loss_value"].backward()
    assert next(loss.parameters()).grad is not None and set(td.keys()) == {"obs", "value_target"}


def test_losses_nest():
    loss, td = regression(), batch()
    both = LossGraph({"one": loss, "twice": (lambda x: 2 * x, ["loss_critic"], ["loss_double"])})
    assert both.out_keys == ["loss_critic", "loss_double"]
    assert both(td)["loss_double"] == 2 * loss(td)["loss_critic"]


def test_a_newer_value_of_a_key_is_the_one_read():
    loss = LossGraph(
        {
            "first": (lambda x: x + 1, ["x"], ["x"]),
            "model": KeyedGraph((lambda y: y * 10, ["y"], ["x"])),
            "total": (lambda x: x.sum(), ["x"], ["loss"]),
        },
        out_keys=["loss"],
    )
    assert loss(TensorDict(x=torch.ones(2), y=torch.ones(2), batch_size=[2]))["loss"].item() == 20.0


@pytest.mark.parametrize("name", ["a.b", "values", "double", ""])
def test_node_names_that_cannot_be_are_refused(name):
    with pytest.raises(GraphError, match="cannot be called"):
        LossGraph({name: (torch.mean, ["x"], ["loss"])})


def test_an_error_inside_a_node_names_it():
    loss = LossGraph({"product": (torch.matmul, ["x", "y"], ["loss"])})
    with pytest.raises(GraphError, match=r"node product \(matmul\).*'x' \[2, 3\] float32, 'y' \[2, 3\] float32"):
        loss(TensorDict(x=torch.ones(2, 3), y=torch.ones(2, 3), batch_size=[2]))
