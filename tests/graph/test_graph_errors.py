import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from graphrl import KeyedGraph
from graphrl.errors import GraphError, KeyMissingError


def policy():
    return KeyedGraph((nn.Linear(3, 2), ["observation"], ["hidden"]), (torch.tanh, ["hidden"], ["action"]))


def test_a_missing_key_names_node_key_contents_and_the_remedy():
    with pytest.raises(KeyMissingError) as error:
        policy()(TensorDict(observations=torch.zeros(5, 3), reward=torch.zeros(5, 1), batch_size=[5]))
    text = str(error.value)
    assert "node 0 (Linear) reads 'observation'" in text and "the batch [5]" in text
    assert "'observations' [5, 3] float32" in text and "'reward' [5, 1] float32" in text
    assert "Did you mean 'observations'?" in text and "graph.rename(observation='observations')" in text
    assert isinstance(error.value, KeyError) and isinstance(error.value, ValueError)


def test_an_empty_batch_is_said_to_be_empty():
    with pytest.raises(KeyMissingError, match="has no keys"):
        policy()(TensorDict(batch_size=[5]))


def test_a_wrong_width_names_node_key_shape_and_what_the_layer_takes():
    with pytest.raises(GraphError) as error:
        policy()(TensorDict(observation=torch.zeros(5, 4), batch_size=[5]))
    text = str(error.value)
    assert "node 0 (Linear)" in text and "'observation' [5, 4] float32" in text and "[..., 3] float32" in text


def test_a_wrong_dtype_names_both_dtypes():
    with pytest.raises(GraphError, match=r"'observation' \[5, 3\] float64; the layer takes \[\.\.\., 3\] float32"):
        policy()(TensorDict(observation=torch.zeros(5, 3, dtype=torch.float64), batch_size=[5]))


def test_a_later_node_is_named_with_what_it_read():
    graph = KeyedGraph((lambda x: x[..., :1], ["x"], ["h"]), (nn.Linear(3, 1), ["h"], ["y"]))
    with pytest.raises(GraphError, match=r"node 1 \(Linear\).*'h' \[2, 1\] float32"):
        graph(TensorDict(x=torch.zeros(2, 3), batch_size=[2]))


def test_a_wrong_number_of_arguments_shows_the_signature():
    def add(left, right):
        return left + right

    with pytest.raises(GraphError, match=r"node 0 \(add\).*its signature is \(left, right\)"):
        KeyedGraph((add, ["x"], ["y"]))(TensorDict(x=torch.zeros(2), batch_size=[2]))


def test_a_value_overwritten_before_anyone_reads_it_is_an_error():
    with pytest.raises(GraphError, match=r"nodes 0 \(relu\) and 1 \(tanh\) both write 'h' and nobody reads the first"):
        KeyedGraph((torch.relu, ["x"], ["h"]), (torch.tanh, ["x"], ["h"]))


def test_an_output_named_twice_is_an_error():
    with pytest.raises(GraphError, match=r"node 0 \(.*\) writes 'h' twice"):
        KeyedGraph((lambda x: (x, x), ["x"], ["h", "h"]))


def test_an_unknown_out_key_names_the_nearest():
    with pytest.raises(GraphError, match=r"out_keys has 'actoin', which no node writes.*Did you mean 'action'"):
        KeyedGraph((torch.tanh, ["x"], ["action"]), out_keys=["actoin"])


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (nn.Linear(3, 2), r"node 1 is a Linear without keys.*\(callable, in_keys, out_keys\)"),
        ((torch.relu, ["x"]), r"node 1 is \(.*expected a tuple \(callable, in_keys, out_keys\)"),
        (("relu", ["x"], ["y"]), r"node 1 is \('relu'.*expected a tuple"),
        ((torch.relu, [3], ["y"]), r"3 \(int\) is not a key"),
        ((torch.relu, ["x"], [("y", 1)]), r"1 \(int\) is not a key"),
    ],
)
def test_a_malformed_node_is_refused_with_its_place(node, message):
    with pytest.raises(GraphError, match=message):
        KeyedGraph(TensorDictModule(torch.relu, in_keys=["x"], out_keys=["h"]), node)


def test_the_cause_is_kept():
    with pytest.raises(GraphError) as error:
        policy()(TensorDict(observation=torch.zeros(5, 4), batch_size=[5]))
    assert isinstance(error.value.__cause__, RuntimeError)
