import pytest
import torch
from tensordict import TensorDict

from graphrl.errors import SpecError
from graphrl.specs import Binary, Bounded, Categorical, Composite, MultiCategorical, OneHot, Unbounded

INF = float("inf")
LEAVES = [
    Unbounded((3, 2)),
    Unbounded(4, dtype=torch.int64),
    Unbounded(4, dtype=torch.uint8),
    Unbounded(4, dtype=torch.bool),
    Bounded(-1.0, 2.0, (3, 2)),
    Bounded(torch.tensor([-1.0, -INF, 0.0, -INF]), torch.tensor([1.0, 5.0, INF, INF])),
    Bounded(0, 255, (2, 2), dtype=torch.uint8),
    Bounded(-(2**62), 2**62, 3, dtype=torch.int64),
    Categorical(5, (3,)),
    Categorical(2, (3, 1), dtype=torch.bool),
    MultiCategorical([2, 5], (3, 2)),
    OneHot(4, (3, 4)),
    Binary(4),
]


@pytest.mark.parametrize("spec", LEAVES, ids=repr)
def test_random_values_conform_and_copies_are_equal(spec):
    drawn = spec.rand((50,))
    assert drawn.shape == (50, *spec.shape) and drawn.dtype == spec.dtype
    assert spec.is_in(drawn)
    spec.assert_is_in(drawn)
    assert torch.equal(spec.project(drawn), drawn)
    assert spec.zero((2,)).shape == (2, *spec.shape) and not spec.zero().any()
    assert spec.to("cpu") == spec and spec.expand(*spec.shape) == spec
    wider = spec.expand(6, *spec.shape)
    assert wider != spec and wider.is_in(wider.rand())


def test_random_values_reach_both_ends():
    torch.manual_seed(0)
    assert set(Bounded(-1, 1, 1, dtype=torch.int64).rand((100,)).flatten().tolist()) == {-1, 0, 1}
    assert set(Categorical(3).rand((100,)).tolist()) == {0, 1, 2}
    uniform = Bounded(-1.0, 3.0).rand((20000,))
    assert uniform.mean() == pytest.approx(1.0, abs=0.05) and uniform.min() < -0.99 and uniform.max() > 2.99


@pytest.mark.parametrize(
    ("spec", "value", "message"),
    [
        (Bounded(-1.0, 1.0, 2), torch.tensor([0.0, 2.0]), r"'action' holds 2.0 at \[1\], outside \[-1, 1\]"),
        (Bounded(-1.0, 1.0, 2), torch.tensor([float("nan"), 0.0]), "'action' holds nan"),
        (Bounded(-1.0, 1.0, 2), torch.zeros(3), r"'action' has shape \[3\], expected \[2\]"),
        (Bounded(-1.0, 1.0, 2), torch.zeros(2, dtype=torch.float64), "is torch.float64, expected torch.float32"),
        (Bounded(-1.0, 1.0, 2), [0.0, 0.0], "is a list, expected a torch.float32 tensor"),
        (Unbounded(2), torch.zeros(2, device="meta"), "is on meta, expected cpu"),
        (Categorical(3), torch.tensor(3), "holds 3, outside 0 .. 2"),
        (MultiCategorical([2, 5]), torch.tensor([2, 0]), "holds 2"),
        (OneHot(3), torch.tensor([True, True, False]), "is not one-hot"),
        (OneHot(3, dtype=torch.int64), torch.tensor([0, 1, 2]), "is not one-hot"),
        (Binary(2), torch.tensor([0, 2], dtype=torch.int8), "neither 0 nor 1"),
    ],
)
def test_a_value_that_does_not_conform_is_named(spec, value, message):
    assert not spec.is_in(value)
    with pytest.raises(SpecError, match=message):
        spec.assert_is_in(value, "action")


def test_project_gives_the_nearest_value():
    assert Bounded(-1.0, 1.0, 2).project(torch.tensor([3.0, -0.5])).tolist() == [1.0, -0.5]
    assert Categorical(3).project(torch.tensor([-1, 7])).tolist() == [0, 2]
    assert MultiCategorical([2, 5]).project(torch.tensor([4, 4])).tolist() == [1, 4]
    assert OneHot(3, dtype=torch.int64).project(torch.tensor([0, 5, 1])).tolist() == [0, 1, 0]


def test_encode_and_one_hot_conversion():
    index = Categorical(3, (2,))
    value = index.encode([2, 0])
    hot = index.to_one_hot(value)
    assert index.to_one_hot_spec().is_in(hot) and hot.int().tolist() == [[0, 0, 1], [1, 0, 0]]
    assert torch.equal(index.to_one_hot_spec().to_categorical(hot), value)
    assert index.to_one_hot_spec().to_categorical_spec() == index
    with pytest.raises(SpecError, match="outside 0 .. 2"):
        index.encode([3, 0])


def test_specs_differ_in_every_attribute():
    base = Bounded(-1.0, 1.0, 2)
    for other in (Bounded(-1.0, 2.0, 2), Bounded(-1.0, 1.0, 3), base.to(torch.float64), Unbounded(2), "spec"):
        assert base != other
    assert Categorical(3) != Categorical(4)
    assert base.to("meta").device.type == "meta" and base.to(torch.float64).low.dtype == torch.float64


def test_bounds_that_make_no_sense_are_refused():
    with pytest.raises(SpecError, match="lower bound exceeds"):
        Bounded(1.0, -1.0)
    with pytest.raises(SpecError, match="do not broadcast"):
        Bounded(torch.zeros(3), torch.ones(3), 2)
    with pytest.raises(SpecError, match="must end in"):
        OneHot(3, (2,))
    with pytest.raises(SpecError, match="leading dims only"):
        Unbounded(2).expand(3)


def composite() -> Composite:
    fields = {"observation": Unbounded((3, 4)), ("agents", "pixels"): Bounded(0, 255, (3, 2, 2), dtype=torch.uint8)}
    return Composite(fields, batch_size=[3])


def test_composite_gives_a_fake_batch():
    spec = composite()
    zero = spec.zero()
    assert isinstance(zero, TensorDict) and zero.batch_size == torch.Size([3])
    assert zero["agents", "pixels"].dtype == torch.uint8 and zero["agents"].batch_size == torch.Size([3])
    assert spec.rand((5,)).batch_size == torch.Size([5, 3])
    assert spec.is_in(spec.rand()) and spec.is_in(spec.rand((5,)))
    assert set(spec.project(spec.rand()).keys(True, True)) == set(zero.keys(True, True))


def test_composite_is_addressed_like_a_tensordict():
    spec = composite()
    assert list(spec.keys(True, True)) == ["observation", ("agents", "pixels")]
    assert list(spec.keys()) == ["observation", "agents"] == list(spec) and len(spec) == 2
    assert ("agents", "pixels") in spec and "pixels" not in spec
    assert spec["agents"]["pixels"] is spec["agents", "pixels"]
    assert spec == composite() == Composite(dict(reversed(list(composite().items()))), shape=[3])
    assert spec.expand(7, 3)["agents", "pixels"].shape == (7, 3, 2, 2)
    assert spec.to("meta")["observation"].device.type == "meta"
    assert spec != Composite({"observation": Unbounded((3, 4))}, [3])
    assert "pixels: Bounded(low=0, high=255, shape=[3, 2, 2]" in repr(spec)
    assert spec.encode({"observation": torch.zeros(3, 4), "agents": {"pixels": torch.zeros(3, 2, 2)}}).shape == (3,)


def test_composite_errors_name_the_key():
    spec = composite()
    with pytest.raises(SpecError, match="Did you mean 'observation'"):
        spec["observatoin"]
    with pytest.raises(SpecError, match=r"expected to start with \[3\]"):
        spec["action"] = Unbounded(2)
    with pytest.raises(SpecError, match="is a Unbounded leaf"):
        spec["observation", "inner"] = Unbounded((3, 1))
    bad = spec.zero().exclude("observation")
    with pytest.raises(SpecError, match="'root' lacks 'observation'"):
        spec.assert_is_in(bad, "root")
    bad = spec.zero().set(("agents", "pixels"), torch.zeros(3, 2, 2))
    with pytest.raises(SpecError, match="at 'agents': at 'pixels': is torch.float32"):
        spec.assert_is_in(bad)
    assert not spec.is_in(torch.zeros(3))
