import pytest
import torch
from tensordict import TensorDict
from torch import nn

import graphrl as grl
from graphrl import KeyedGraph
from graphrl.compiler.program import Noise, Port, StateSlot


def program():
    graph = KeyedGraph((nn.Linear(3, 2), [("next", "x")], ["h"]), (lambda h: h + torch.randn_like(h), ["h"], ["y"]))
    return graph, grl.trace(graph, TensorDict({("next", "x"): torch.zeros(4, 3)}, batch_size=[4]))


def test_the_signature():
    graph, traced = program()
    assert traced.in_keys == [("next", "x")] and traced.out_keys == ["h", "y"]
    assert str(traced.inputs[0]) == "next/x: f32[4, 3]"
    assert [str(s) for s in traced.state] == ["nodes.0.module.weight: f32[2, 3]", "nodes.0.module.bias: f32[2]"]
    assert [(n.kind, n.shape) for n in traced.noise] == [("normal", (4, 2))]
    assert traced.node_count() == 3
    assert traced.state_values()["nodes.0.module.bias"] is graph[0].module.bias


def test_the_header_says_what_goes_in_and_out():
    head = program()[1].code.split("import torch")[0].splitlines()
    assert head == [
        "# program: 1 inputs, 2 state tensors, 3 operations",
        "#   in    next/x: f32[4, 3]",
        "#   out   h: f32[4, 2]",
        "#   out   y: f32[4, 2]",
        "#   state nodes.0.module.weight: f32[2, 3]",
        "#   state nodes.0.module.bias: f32[2]",
        "#   draw  normal f32[4, 2]",
    ]


def test_state_is_read_at_the_call():
    graph, traced = program()
    graph[0].module.weight = nn.Parameter(torch.zeros(2, 3))
    assert torch.equal(traced.run(torch.ones(4, 3))[0], graph[0].module.bias.expand(4, 2))


@pytest.mark.parametrize(
    ("noise", "make"),
    [
        (Noise((20,), torch.float32, torch.device("cpu"), "normal"), lambda: torch.randn(20)),
        (Noise((20,), torch.float64, torch.device("cpu"), "uniform"), lambda: torch.rand(20, dtype=torch.float64)),
        (Noise((20,), torch.int64, torch.device("cpu"), "random", (3, 9)), lambda: torch.randint(3, 9, (20,))),
        (Noise((20,), torch.int64, torch.device("cpu"), "randperm"), lambda: torch.randperm(20)),
        (
            Noise((20,), torch.float32, torch.device("cpu"), "bernoulli", (0.3,)),
            lambda: torch.empty(20).bernoulli_(0.3),
        ),
        (Noise((5, 4), torch.float32, torch.device("cpu"), "normal", (), (1, 5)), lambda: torch.randn_like(STRIDED)),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_a_draw_is_torch_s_own(noise, make):
    torch.manual_seed(4)
    expected = make()
    torch.manual_seed(4)
    found = noise.draw()
    assert torch.equal(found, expected) and found.is_contiguous()


STRIDED = torch.zeros(4, 5).t()


def test_ports_and_slots_describe_tensors():
    assert str(Port.of("a/b", torch.zeros(2, dtype=torch.int64))) == "a~1b: int64[2]"
    slot = StateSlot.of("w", lambda: torch.zeros(1, dtype=torch.bfloat16), "buffer")
    assert str(slot) == "w: bf16[1]" and not slot.mutated
