"""What every loss is built from: terms, keys that can be set, and the graph that returns a new TensorDict."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from graphrl.errors import GraphError, SpecError, did_you_mean
from graphrl.graph import KeyedGraph
from graphrl.keys import Key, next_key, normalize_key, normalize_keys

__all__ = ["LossGraph", "LossTerm", "SettableKeys", "next_key", "require_same_shape", "value_key_of"]


def require_same_shape(**tensors: Tensor) -> None:
    """Raise :class:`SpecError`, naming each tensor and its shape, unless all shapes are equal: nothing is broadcast."""
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        found = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise SpecError(f"{found}: these must have one shape, and are not broadcast; reshape one where it is made")


def value_key_of(critic: Any) -> Key:
    """The key a critic writes its value under: its ``state_value``, nested or not, or its only output."""
    keys = normalize_keys(critic.out_keys)
    named = [key for key in keys if key == "state_value" or key[-1] == "state_value"]
    if len(named) == 1 or len(keys) == 1:
        return (named or keys)[0]
    raise GraphError(f"the critic writes {keys}: expected one of them to be called 'state_value'")


class LossTerm(TensorDictModule):
    """A pure function of tensors as a node: ``LossTerm(clipped_surrogate, in_keys, out_keys, clip_epsilon=0.2)``.

    A float or tensor option becomes a buffer of the term, and a parameter stays one: ``term.clip_epsilon.fill_(0.1)``
    takes effect in eager and in compiled programs, and the state dict holds it from the start. A float is kept in
    float64 and read in the dtype of the first floating input. Other options are passed on as they are.
    """

    in_keys: list[Key]
    out_keys: list[Key]

    def __init__(self, function: Callable[..., Any], in_keys: Any, out_keys: Any, **options: Any) -> None:
        super().__init__(function, in_keys=normalize_keys(in_keys), out_keys=normalize_keys(out_keys))
        self._first = (self.in_keys, self.out_keys)
        self._fixed: dict[str, Any] = {}
        self._live: list[str] = []
        for name, value in options.items():
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            elif isinstance(value, (float, Tensor)):
                self.register_buffer(
                    name, value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
                )
            else:
                self._fixed[name] = value
                continue
            self._live.append(name)

    def compute(self, tensors: Sequence[Tensor], **more: Any) -> tuple[Tensor, ...]:
        """The function's outputs, in ``out_keys`` order; ``more``: arguments beside the options."""
        dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.get_default_dtype())
        live = {name: getattr(self, name).to(dtype) for name in self._live}
        try:
            result = self.module(*tensors, **live, **self._fixed, **more)
        except SpecError as error:
            arguments = inspect.signature(self.module).parameters
            reads = ", ".join(f"{arg}={key!r}" for arg, key in zip(arguments, self.in_keys, strict=False))
            raise SpecError(f"loss term {self.name}({reads}): {error}") from error
        return result if isinstance(result, tuple) else (result,)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the function's outputs into ``tensordict``, as any node does."""
        outputs = self.compute([tensordict.get(key) for key in self.in_keys])
        for key, value in zip(self.out_keys, outputs, strict=True):
            tensordict.set(key, value)
        return tensordict

    def replace_keys(self, mapping: Mapping[Key, Key]) -> None:
        """Read and write under other keys from now on; ``mapping``: from the keys it was made with."""
        self.in_keys, self.out_keys = ([mapping.get(key, key) for key in normalize_keys(keys)] for keys in self._first)

    def option(self, name: str) -> Tensor:
        """The live buffer or parameter behind an option."""
        value = getattr(self, name)
        if not isinstance(value, Tensor):
            raise GraphError(f"{name!r} is {value!r}, not a live option of {self.name}; those are {self._live}")
        return value

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.module, "__name__", type(self.module).__name__)


class SettableKeys(KeyedGraph):
    """A keyed graph whose data keys are settable by role, as in TorchRL: ``loss.set_keys(advantage="adv")``."""

    tensor_keys: dict[str, Key]

    def term(self, name: str) -> LossTerm:
        """The term called ``name``. Raises :class:`GraphError` for another kind of node, or none."""
        node = self.nodes[name] if name in self.nodes else None
        if not isinstance(node, LossTerm):
            known = list(self.nodes)
            raise GraphError(f"no loss term {name!r} here; nodes are {known}.{did_you_mean(name, known)}")
        return node

    def set_keys(self, **keys: Key) -> None:
        """Change the key of each named role, in place. Raises :class:`GraphError` for a role that does not exist."""
        known = list(self.tensor_keys)
        for role in keys:
            if role not in known:
                raise GraphError(f"set_keys: no role {role!r}; roles are {known}.{did_you_mean(role, known)}")
        if "value" in keys and normalize_key(keys["value"]) != self.tensor_keys["value"]:
            raise GraphError(
                f"set_keys: the critic writes its value as {self.tensor_keys['value']!r}; to change it, build the "
                f"critic with value_key={keys['value']!r}"
            )
        first = self.__dict__.setdefault("_first_keys", self.tensor_keys)  # two roles may share a key, and part again
        before = {self._place(role, self.tensor_keys[role]): role for role in known}
        self.tensor_keys = {**self.tensor_keys, **{role: normalize_key(key) for role, key in keys.items()}}
        now = {role: self._place(role, key) for role, key in self.tensor_keys.items()}
        mapping = {self._place(role, key): now[role] for role, key in first.items()}
        for name, node in self.nodes.items():
            if callable(getattr(node, "replace_keys", None)):
                own: Any = copy(node)  # a graph that shares the node keeps its keys
                own._modules = dict(own._modules)
                own.replace_keys(mapping)
                self.nodes[name] = own
        self._connect([now[before[key]] if key in before else key for key in self.out_keys])

    def _place(self, role: str, key: Key) -> Key:
        """Where a role's key is read from."""
        return key

    def _name_nodes(self, names: Iterable[str]) -> None:
        """Names for numbers in the state dict and in messages."""
        named = dict(zip(names, self.nodes.values(), strict=True))
        for name in named:
            if not name or "." in name or hasattr(nn.ModuleDict, name):
                raise GraphError(
                    f"a node cannot be called {name!r}: expected a name without dots that nn.ModuleDict lacks"
                )
        self.nodes = nn.ModuleDict(named)


class LossGraph(SettableKeys):
    """A loss as a keyed graph: it reads a batch and returns its scalars in a new TensorDict.

        loss = LossGraph({"critic": critic, "error": (value_error, ["state_value", "value_target"], ["loss_critic"])})
        loss(batch)["loss_critic"].backward()
        loss_critic = loss(observation=observation, value_target=target)

    ``nodes``: name -> model, or tuple (function, in_keys, out_keys). Models see the batch at its batch size; what
    they write is seen by later nodes only, so the batch is never edited. ``out_keys``: default, all that functions
    write. The call returns a TensorDict of batch size [] with ``out_keys``; minimise the sum of the ``loss_*`` ones.
    Gradient flows to the models' parameters as the functions say. Raises as :class:`KeyedGraph` does.
    """

    returns_new = True

    def __init__(
        self,
        nodes: Mapping[str, Any],
        *,
        out_keys: Iterable[Key] | None = None,
        tensor_keys: Mapping[str, Key] | None = None,
    ) -> None:
        made = {name: LossTerm(*node) if isinstance(node, tuple) else node for name, node in nodes.items()}
        if out_keys is None:
            terms = [n for n in made.values() if isinstance(n, LossTerm) or getattr(n, "returns_new", False)]
            out_keys = dict.fromkeys(key for node in terms for key in normalize_keys(node.out_keys))
        super().__init__(*made.values(), out_keys=out_keys)
        self._name_nodes(made)
        self.tensor_keys = dict(tensor_keys or {})

    def _run_apart(self, node: Any, batch: TensorDictBase, terms: dict[Key, Any]) -> None:
        """Run one node: a function writes to ``terms``, whatever its shapes; a model writes to ``batch``."""
        if isinstance(node, LossTerm):
            outputs = node.compute([terms[key] if key in terms else batch.get(key) for key in node.in_keys])
            terms.update(zip(node.out_keys, outputs, strict=True))
        else:
            super()._run_apart(node, batch, terms)

    def select(self, out_keys: object = None, in_keys: object = None) -> LossGraph:
        """A new loss with just the nodes needed for ``out_keys``; weights are shared. As :meth:`KeyedGraph.select`."""
        cut = super().select(out_keys, in_keys)
        keys = cut.out_keys if out_keys is not None else [key for key in cut.out_keys if key in self.out_keys]
        loss = LossGraph(dict(cut.nodes.items()), out_keys=keys, tensor_keys=self.tensor_keys)
        loss.__dict__["_first_keys"] = self.__dict__.get("_first_keys", self.tensor_keys)
        return loss.train(self.training)

    def rename(self, mapping: Mapping[Key, Key] | None = None, **names: Key) -> LossGraph:
        """A new loss that reads and writes under other names. As :meth:`KeyedGraph.rename`."""
        view = super().rename(mapping, **names)[0]
        return LossGraph({"loss": LossTerm(self, view.in_keys, view.out_keys)})
