"""The small programs every generated backend must compute, through the graph of the numpy runtime."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from c_cases import cases
from tensordict import TensorDict

from graphrl.compiler.bundle import runtime
from graphrl.compiler.bundle.files import dump_json
from graphrl.compiler.bundle.graph_json import program_from_json, program_to_json
from graphrl.compiler.passes.pipeline import run_passes
from graphrl.compiler.trace import trace
from graphrl.graph import KeyedGraph


@pytest.mark.parametrize("positive", [False, True])
def test_small_programs_of_every_kind_run_and_come_back(positive: bool) -> None:
    chosen = [c for c in cases() if c.positive == positive]
    graph = KeyedGraph(*((c.fn, ["x0", "x1"][: c.inputs], [c.name]) for c in chosen))
    values = max(chosen, key=lambda c: c.inputs).values()
    with torch.no_grad():
        program = run_passes(trace(graph, TensorDict(dict(zip(("x0", "x1"), values, strict=True)), batch_size=[3])))
    graph_data = json.loads(dump_json(program_to_json(program)))
    runnable = runtime._Graph(graph_data, {s.name: s.read().detach().numpy() for s in program.state})
    inputs = [dict(zip(("x0", "x1"), values, strict=True))[k] for k in program.in_keys]
    found = dict(zip(program.out_keys, runnable.run([t.numpy() for t in inputs]), strict=True))
    for case, wanted in zip(program.out_keys, program.run(*inputs), strict=True):
        tolerance = next(c.tolerance for c in chosen if c.name == case)
        assert str(wanted.dtype).endswith(found[case].dtype.name), case
        np.testing.assert_allclose(
            found[case], wanted.detach().numpy(), rtol=tolerance, atol=tolerance, err_msg=str(case)
        )
    rebuilt = program_from_json(graph_data, program.state_values())
    assert all(map(torch.equal, rebuilt.run(*inputs), program.run(*inputs)))
