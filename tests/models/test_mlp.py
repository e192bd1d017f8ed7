import warnings

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from graphrl.errors import GraphError
from graphrl.graph import KeyedGraph
from graphrl.models import MLP


def test_layers_alternate_with_activations():
    mlp = MLP(3, 2, num_cells=[4, 5], activation_class=nn.ReLU)
    assert [type(m).__name__ for m in mlp] == ["Linear", "ReLU", "Linear", "ReLU", "Linear"]
    assert [(m.in_features, m.out_features) for m in mlp if isinstance(m, nn.Linear)] == [(3, 4), (4, 5), (5, 2)]


def test_output_is_the_composition_of_its_layers():
    mlp, x = MLP(3, 2, num_cells=[4], dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    expected = torch.tanh(x @ mlp[0].weight.T + mlp[0].bias) @ mlp[2].weight.T + mlp[2].bias
    torch.testing.assert_close(mlp(x), expected)


def test_depth_repeats_one_width_and_neither_is_a_linear_layer():
    assert len([m for m in MLP(3, 2, depth=3, num_cells=8) if isinstance(m, nn.Linear)]) == 4
    assert [type(m) for m in MLP(3, 2)] == [nn.Linear]


def test_options_reach_each_layer():
    mlp = MLP(
        3,
        2,
        num_cells=[4, 4],
        activation_class=nn.LeakyReLU,
        activation_kwargs=[{"negative_slope": 0.1}, {"negative_slope": 0.2}],
        norm_class=nn.LayerNorm,
        norm_kwargs={"normalized_shape": 4},
        dropout=0.5,
        bias_last_layer=False,
    )
    assert [m.negative_slope for m in mlp if isinstance(m, nn.LeakyReLU)] == [0.1, 0.2]
    assert sum(isinstance(m, nn.LayerNorm) for m in mlp) == sum(isinstance(m, nn.Dropout) for m in mlp) == 2
    assert mlp[-1].bias is None


def test_several_inputs_are_joined():
    mlp, a, b = MLP(5, 1, num_cells=[4]), torch.randn(6, 2), torch.randn(6, 3)
    assert torch.equal(mlp(a, b), mlp(torch.cat([a, b], -1)))


def test_an_output_shape_is_unflattened():
    assert MLP(3, (2, 4))(torch.randn(6, 3)).shape == (6, 2, 4)


@pytest.mark.parametrize("batch", [(), (0,), (1,), (2, 3)])
def test_any_batch_shape(batch):
    assert MLP(3, 2, num_cells=[4])(torch.randn(*batch, 3)).shape == (*batch, 2)


def test_float64_observations_are_float32_inside():
    mlp, x = MLP(3, 2, num_cells=[4]), torch.randn(5, 3, dtype=torch.float64)
    assert mlp(x).dtype == torch.float32 and torch.equal(mlp(x), mlp(x.float()))


def test_a_wrong_width_names_the_key_and_both_widths():
    graph = KeyedGraph((MLP(3, 2), ["observation"], ["hidden"]))
    with pytest.raises(GraphError, match=r"'observation' \[5, 4\] float32: MLP takes \[\.\.\., 3\]"):
        graph(TensorDict(observation=torch.randn(5, 4), batch_size=[5]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"in_features": None, "out_features": 2}, "in_features"),
        ({"in_features": 3, "out_features": 0}, "out_features"),
        ({"in_features": 3, "out_features": 2, "num_cells": 4}, "needs a depth"),
        ({"in_features": 3, "out_features": 2, "num_cells": [4, 4], "depth": 3}, "give one"),
        ({"in_features": 3, "out_features": 2, "num_cells": [4], "activation_kwargs": [{}, {}]}, "2 mappings for 1"),
    ],
)
def test_sizes_that_cannot_be_built_are_refused(arguments, message):
    with pytest.raises(GraphError, match=message):
        MLP(**arguments)


def test_trace_equals_eager(trace):
    mlp, x = MLP(3, 2, num_cells=[4]), torch.randn(5, 3)
    torch.testing.assert_close(trace(mlp, x)(x), mlp(x))


@pytest.mark.peers
def test_takes_the_weights_and_arguments_of_torchrl():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = pytest.importorskip("torchrl.modules")
    options = {"in_features": 3, "out_features": 2, "num_cells": [8, 8], "activation_class": nn.ELU}
    theirs, ours, x = modules.MLP(**options), MLP(**options), torch.randn(5, 3)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    torch.testing.assert_close(ours(x), theirs(x))
