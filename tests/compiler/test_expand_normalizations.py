from __future__ import annotations

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from graphrl.compiler.passes.pipeline import run_passes
from graphrl.compiler.trace import trace
from graphrl.graph import KeyedGraph


def traced(*layers: nn.Module):
    graph = KeyedGraph(TensorDictModule(nn.Sequential(*layers).eval().double(), in_keys=["x"], out_keys=["y"]))
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    return trace(graph, TensorDict(x=x, batch_size=[2])), x, graph


def operations(program):
    nodes = [n for n in program.graph_module.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    return [n.target._schema.name.removeprefix("aten::") for n in nodes]


def test_fixed_statistics_fold_to_a_difference_a_product_and_a_sum():
    norm = nn.BatchNorm2d(4)
    with torch.no_grad():
        norm.running_mean.uniform_(-3, 3), norm.running_var.uniform_(0.1, 4), norm.weight.uniform_(0.5, 2)
        norm.bias.uniform_(-1, 1)
    program, x, graph = traced(norm)
    deployed = run_passes(program, deploy=True)
    assert operations(deployed) == ["sub", "mul", "add"]
    torch.testing.assert_close(deployed.run(x)[0], graph(x).detach(), rtol=1e-12, atol=1e-12)


def test_group_and_instance_normalisation_become_arithmetic():
    for norm in (nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.GroupNorm(4, 4, affine=False)):
        program, x, graph = traced(norm)
        deployed = run_passes(program, deploy=True)
        assert not any("norm" in name for name in operations(deployed))
        torch.testing.assert_close(deployed.run(x)[0], graph(x).detach(), rtol=1e-12, atol=1e-12)


def test_live_programs_keep_the_operation_so_that_they_equal_eager_to_the_bit():
    program, _, _ = traced(nn.BatchNorm2d(4), nn.GroupNorm(2, 4))
    assert {"_native_batch_norm_legit_no_training", "native_group_norm"} <= set(operations(run_passes(program)))


def test_other_programs_are_left_as_they_are():
    program, _, _ = traced(nn.Conv2d(4, 4, 1), nn.Tanh())
    assert operations(run_passes(program, deploy=True)) == ["convolution", "tanh"]
