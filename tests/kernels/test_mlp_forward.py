import itertools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from graphrl.errors import SpecError
from graphrl.kernels import mlp_forward
from graphrl.kernels.mlp.op import MAX_WIDTH
from graphrl.kernels.mlp.reference import ACTIVATIONS, mlp_reference


def layers(sizes, dtype=torch.float32, device="cpu", biased=True):
    generator = torch.Generator().manual_seed(0)
    pairs = list(itertools.pairwise(sizes))
    weights = [torch.randn(b, a, generator=generator) / a**0.5 for a, b in pairs]
    biases = [torch.randn(b, generator=generator) if biased or i % 2 else None for i, (_, b) in enumerate(pairs)]
    to = {"dtype": dtype, "device": device}
    return [w.to(**to) for w in weights], [b if b is None else b.to(**to) for b in biases]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_reference_is_torch_s_own_layers(activation):
    weights, biases = layers((5, 7, 3), torch.float64, biased=False)
    x = torch.randn(2, 4, 5, dtype=torch.float64)
    hidden = ACTIVATIONS[activation](x @ weights[0].T)
    wanted = hidden @ weights[1].T + biases[1]
    found = mlp_forward(x, weights, biases, [activation, "identity"])
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)
    assert torch.equal(found, mlp_reference(x, weights, biases, [activation, "identity"]))


def test_the_operator_is_registered_well_and_has_no_gradient():
    weights, biases = layers((4, 8, 2), biased=False)
    arguments = (torch.randn(3, 4), weights, biases, ["tanh", "identity"])
    torch.library.opcheck(torch.ops.graphrl.mlp_forward.default, arguments)
    weights[0].requires_grad_()
    with pytest.raises(NotImplementedError, match="has no gradient: train through the layers"):
        mlp_forward(*arguments).sum().backward()


@pytest.mark.parametrize("mapped", ["x", "weights", "both", "weights beside no bias"])
def test_vmap_equals_a_loop(mapped):
    nets = [layers((4, 8, 2), torch.float64, biased=mapped != "weights beside no bias") for _ in range(3)]
    weights, biases = [torch.stack([n[0][i] * (k + 1) for k, n in enumerate(nets)]) for i in range(2)], nets[0][1]
    inputs = torch.randn(3, 5, 4, dtype=torch.float64)
    dims = 0 if mapped in ("x", "both") else None, [None if mapped == "x" else 0] * 2

    def run(x, weights, biases):
        return mlp_forward(x, weights, biases, ["tanh", "identity"])

    x = inputs if dims[0] == 0 else inputs[0]
    w = [weight[1] for weight in weights] if mapped == "x" else weights
    found = torch.vmap(run, (*dims, None))(x, w, biases)
    for i in range(3):
        chosen = w if mapped == "x" else [weight[i] for weight in w]
        torch.testing.assert_close(found[i], run(inputs[i] if dims[0] == 0 else x, chosen, biases))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_trace_sees_one_node(mode):
    weights, biases = layers((4, 8, 2))
    run = lambda x: mlp_forward(x, weights, biases, ["tanh", "identity"])  # noqa: E731
    program = make_fx(run, tracing_mode=mode, _allow_non_fake_inputs=True)(torch.randn(3, 4))
    calls = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert calls == ["graphrl.mlp_forward.default"]
    x = torch.randn(3 if mode != "symbolic" else 7, 4)
    assert torch.equal(program(x), run(x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w, b, a: (x, w, b, a[:1]), "2 weights, 2 biases, 1 activations"),
        (lambda x, w, b, a: (x, [], [], []), "a layer at least"),
        (lambda x, w, b, a: (x.long(), w, b, a), r"x is torch.int64 on cpu, expected float32.*x.float\(\)"),
        (lambda x, w, b, a: (x, w, b, ["tan", "identity"]), "no activation 'tan'; there are identity, tanh"),
        (lambda x, w, b, a: (x, [w[0].double(), w[1]], b, a), "weight 0 is torch.float64 on cpu, x torch.float32"),
        (lambda x, w, b, a: (x[:, 1:], w, b, a), r"layer 0 gets 3 numbers, but has weight \[8, 4\]"),
        (lambda x, w, b, a: (x, w, [b[0][1:], b[1]], a), r"layer 0 gets 4 numbers, but has weight .* bias \[7\]"),
    ],
)
def test_what_does_not_fit_is_said(change, message):
    arguments = change(torch.randn(3, 4), *layers((4, 8, 2)), ["tanh", "identity"])
    with pytest.raises(SpecError, match=message):
        mlp_forward(*arguments)


def test_a_layer_too_wide_is_refused():
    weights, biases = layers((4, MAX_WIDTH + 1, 2))
    with pytest.raises(SpecError, match="a layer is 513 wide, expected at most 512"):
        mlp_forward(torch.randn(3, 4), weights, biases, ["tanh", "identity"])
