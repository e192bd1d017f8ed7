"""Other libraries' modules and losses, untouched: compiled, they are what they are in eager."""

import pytest
import torch

pytest.importorskip("torchrl")

from graphrl.bench.foreign import (
    FOREIGN_GRAPHS,
    FOREIGN_LOSSES,
    graph_error,
    graph_example,
    loss_error,
    loss_example,
    loss_step,
)
from graphrl.compiler.compiled import compile
from graphrl.compiler.update import compile_update
from graphrl.errors import TraceError

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

REFUSED = {"KLPENPPOLoss": "ppo.py"}
"""Losses that branch on values, and the file the error names."""


@pytest.fixture(autouse=True)
def unchecked():
    """TorchRL's distributions do not survive torch's argument checks; it switches them off when imported."""
    torch.distributions.Distribution.set_default_validate_args(False)


@pytest.mark.parametrize("name", FOREIGN_GRAPHS)
def test_a_module_compiled_equals_itself(name):
    pytest.importorskip("stable_baselines3")
    assert graph_error(FOREIGN_GRAPHS[name], name, "eager") < 1e-12


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_branch_inside_a_library_gets_a_program_for_each_way_it_goes(backend):
    module = FOREIGN_GRAPHS["GRUModule"]()  # skips its reset where no row starts anew
    fast = compile(module, backend=backend)
    batch = graph_example("GRUModule")
    with torch.no_grad():
        for starts in (batch["is_init"], torch.zeros_like(batch["is_init"])) * 3:
            batch["is_init"] = starts
            found, wanted = fast(batch.clone()), module(batch.clone())
            for key in module.out_keys:
                torch.testing.assert_close(found[key], wanted[key], rtol=1e-5, atol=1e-6)
    assert fast.retraces == ["a library's code took another branch"]
    assert any("a branch of the library's" in line for line in fast.entries()[0].program.assumptions)


@pytest.mark.parametrize("name", [n for n in FOREIGN_LOSSES if n not in REFUSED])
def test_ten_updates_of_a_loss_equal_eager(name):
    assert loss_error(FOREIGN_LOSSES[name], name, "eager") < 1e-10


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_branches_on_values_is_refused_at_its_line(name):
    with pytest.raises(TraceError, match=REFUSED[name]):
        compile_update(loss_step(FOREIGN_LOSSES[name]()), loss_example(name))


@pytest.mark.slow
def test_updates_of_sac_through_inductor_equal_eager():
    assert loss_error(FOREIGN_LOSSES["SACLoss"], "SACLoss", "inductor") < 1e-10


def test_priorities_that_a_loss_writes_into_its_batch_are_returned():
    loss = FOREIGN_LOSSES["DQNLoss"]()
    step = loss_step(loss)

    def with_priorities(batch):
        metrics = step(batch)
        return {**metrics, "priority": batch["td_error"]}

    update = compile_update(with_priorities, loss_example("DQNLoss"), backend="eager")
    wanted = loss_example("DQNLoss")
    with torch.no_grad():
        loss(wanted)
    torch.testing.assert_close(update(loss_example("DQNLoss"))["priority"], wanted["td_error"])
