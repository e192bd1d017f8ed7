import copy

import torch
from torch import nn

from graphrl.compiler.undo import Undo, kept_random_state


def test_every_write_is_undone_bit_for_bit():
    a, b = torch.randn(4), torch.randn(3, 3)
    alias, before = a[1:3], (a.clone(), b.clone())
    with torch.no_grad(), Undo() as undo:
        alias.mul_(2)
        a.add_(1)
        b.t().copy_(torch.ones(3, 3))
        b[0, 0] = float("nan")
        torch._foreach_mul_([a, b], 3.0)
        torch.add(a, 1, out=a)
    assert len(undo.changed()) == 2
    undo.restore()
    assert torch.equal(a, before[0]) and torch.equal(b, before[1])


def test_batch_norm_statistics_are_undone_though_its_schema_hides_the_write():
    norm = nn.BatchNorm1d(3)
    before = copy.deepcopy(norm.state_dict())
    with Undo() as undo:
        norm(torch.randn(8, 3))
    assert norm.num_batches_tracked == 1
    undo.restore()
    assert all(torch.equal(before[name], value) for name, value in norm.state_dict().items())


def test_gradients_start_empty_and_come_back():
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    p.grad = torch.full((2,), 5.0)
    kept = p.grad
    with Undo([p, q]) as undo:
        assert p.grad is None
        (p * q * 3).sum().backward()
        assert p.grad.tolist() == [3.0, 3.0]
    undo.restore()
    assert p.grad is kept and kept.tolist() == [5.0, 5.0] and q.grad is None


def test_lazy_optimiser_state_goes_back_to_its_birth():
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([p], 0.1)
    with Undo([p]) as undo:
        p.sum().backward()
        optimizer.step()
    undo.restore()
    state = optimizer.state[p]
    assert (p == 1).all() and state["step"] == 0 and (state["exp_avg"] == 0).all() and (state["exp_avg_sq"] == 0).all()


def test_random_generators_are_put_back_also_after_an_error():
    torch.manual_seed(0)
    expected = torch.randn(3)
    for guard in (Undo, kept_random_state):
        torch.manual_seed(0)
        try:
            with guard():
                torch.randn(5)
                raise ValueError
        except ValueError:
            pass
        assert torch.equal(torch.randn(3), expected)
