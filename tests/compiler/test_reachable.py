import functools

import pytest
import torch
from torch import nn, optim

from graphrl.compiler.reachable import find_reachable

GLOBAL = nn.Linear(1, 1)
HELD = [nn.Linear(1, 1)]


def helper(x):
    return GLOBAL(x)


class Owner:
    def __init__(self, *parts):
        self.parts = {"parts": list(parts)}
        self.itself = self

    def step(self, batch):
        return self.parts


def found(function, kind=nn.Module):
    return [value for _, value in find_reachable(function, kind)]


def test_a_global_a_helper_names():
    assert found(lambda x: helper(x)) == [GLOBAL]


def test_a_global_named_in_an_inner_function():
    assert found(lambda x: [HELD[0](y) for y in (lambda: x)()]) == HELD


@pytest.mark.parametrize(
    "wrap",
    [
        lambda m: lambda x: m(x),
        lambda m: Owner(m).step,
        lambda m: functools.partial(lambda m, x: m(x), m),
        lambda m: functools.partial(Owner(m).step, batch=None),
        lambda m: (lambda owner: lambda x: owner.step(x))(Owner(m)),
    ],
    ids=["closure", "method", "partial", "partial of a method", "closure over an object"],
)
def test_whatever_holds_it(wrap):
    module = nn.Linear(1, 1)
    assert found(wrap(module)) == [module]


def test_other_kinds_and_each_once():
    module = nn.Linear(1, 1)
    optimizer, tensor = optim.SGD(module.parameters(), 0.1), torch.zeros(1)
    owner = Owner(module, module, optimizer, tensor)
    assert found(owner.step, optim.Optimizer) == [optimizer]
    assert found(owner.step, torch.Tensor) == [tensor]
    assert found(owner.step) == [module]


def test_a_module_as_a_step():
    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.other = [nn.Linear(1, 1)]

    step = Step()
    assert found(step) == [step, step.other[0]]


def test_names_are_those_of_the_code():
    net = nn.Linear(1, 1)
    owner = Owner(net)
    assert [name for name, _ in find_reachable(lambda x: net(x), nn.Module)] == ["net"]
    assert [name for name, _ in find_reachable(owner.step, nn.Module)] == ["parts.parts.0"]


def test_a_cell_not_yet_filled_is_passed_over():
    def step(x):
        return later(x)

    assert found(step) == []
    later = nn.Linear(1, 1)
    assert found(step) == [later]


def step(batch):
    return unwanted(batch)


unwanted = nn.Linear(1, 1)
wanted = nn.Linear(1, 1)


class Optimiser:
    def step(self):
        return None


def test_the_name_of_a_method_is_no_global_of_that_name():
    owner = Optimiser()

    def other(batch):
        owner.step()
        return wanted(batch)

    assert [module for _, module in find_reachable(other, nn.Module)] == [wanted]
    assert [module for _, module in find_reachable(step, nn.Module)] == [unwanted]
