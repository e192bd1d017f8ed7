"""The keyed graph: modules and functions in order, connected by the names of what they read and write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    dispatch,
)
from torch import nn

from graphrl.errors import GraphError, GraphRLError, did_you_mean
from graphrl.keys import DISCARD, Key, encode_key, normalize_key, normalize_keys
from graphrl.node_messages import describe, missing_key, node_error

__all__ = ["KeyVersion", "KeyedGraph"]


@dataclass(frozen=True)
class KeyVersion:
    """One assignment of a key: version 0 is the batch's own value, version ``n`` the ``n``-th value a node wrote."""

    key: Key
    version: int


class KeyedGraph(TensorDictModuleBase):
    """An ordered graph of keyed nodes over a TensorDict. It is itself a node: it runs eagerly, nests and compiles.

    A node is a ``tensordict.nn`` module, another :class:`KeyedGraph`, any module with ``in_keys`` and ``out_keys``,
    or a tuple ``(callable, in_keys, out_keys)``. Nodes run in the order given. A key may be read, overwritten and
    read again; each write starts a new version of it.

        graph = KeyedGraph(
            TensorDictModule(nn.Linear(3, 4), in_keys=["input"], out_keys=["hidden"]),
            (torch.relu, ["hidden"], ["hidden"]),
        )
        td = graph(TensorDict(input=torch.randn(5, 3), batch_size=[5]))   # writes td["hidden"]: [5, 4]
        hidden = graph(torch.randn(5, 3))                                 # plain tensors, in_keys order

    ``in_keys``: what the batch must hold. ``out_keys``: what the call writes, every written key unless chosen.
    With a loss among the nodes the call returns the loss's keys, and those computed from them, in a new TensorDict of
    batch size [] and leaves the batch as it is: ``KeyedGraph(GAE(critic), PPOLoss(actor, critic))``.
    Gradients flow as they do in the nodes. Raises :class:`GraphError` for a malformed node, a key written twice
    with no reader between, or a chosen out_key nobody writes; :class:`KeyMissingError` when a batch lacks a key.
    """

    returns_new = False
    """Whether a call returns a new TensorDict of batch size [] and edits no batch, as a loss does."""

    def __init__(self, *nodes: Any, out_keys: Iterable[Key] | None = None) -> None:
        super().__init__()
        self.nodes = nn.ModuleDict({str(i): _as_node(node, i) for i, node in enumerate(nodes)})
        self._connect(out_keys)

    def _connect(self, out_keys: Iterable[Key] | None) -> None:
        """Resolve key versions; set ``in_keys`` and ``out_keys``."""
        self.returns_new = type(self).returns_new or any(getattr(n, "returns_new", False) for n in self.nodes.values())
        flow = _Dataflow(self.nodes.values())
        chosen = self._default_out_keys(flow) if out_keys is None else normalize_keys(out_keys)
        for key in chosen:
            if key not in flow.written:
                raise GraphError(
                    f"out_keys has {key!r}, which no node writes; nodes write {flow.written}."
                    + did_you_mean(key, flow.written)
                )
        self.in_keys = flow.read
        self.out_keys = list(chosen)
        self._hidden = [key for key in flow.written if key not in self.out_keys]
        if out_keys is None:
            flow.refuse_lost_writes(self)

    def _default_out_keys(self, flow: _Dataflow) -> list[Key]:
        """Every written key; where a node is a loss, its keys and those computed from them."""
        if not self.returns_new:
            return flow.written
        found: dict[Key, None] = {}
        for node in self.nodes.values():
            if getattr(node, "returns_new", False) or any(key in found for key in normalize_keys(node.in_keys)):
                found |= dict.fromkeys(_written(node))
        return list(found)

    # ---- running

    @dispatch(auto_batch_size=False)
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Run every node on ``tensordict``, write ``out_keys`` into it, and return it; a new one for a loss."""
        self._check_present(tensordict)
        scratch = tensordict.copy() if self._hidden or self.returns_new else tensordict
        terms: dict[Key, Any] = {}
        for name, node in self.nodes.items():
            try:
                if self.returns_new:
                    self._run_apart(node, scratch, terms)
                elif (result := node(scratch)) is not scratch:  # inplace=False: it returns a batch of its own
                    scratch.update(result.select(*_written(node), strict=False))
            except GraphRLError:
                raise
            except (RuntimeError, TypeError, ValueError, IndexError, KeyError) as error:
                raise node_error(self, name, node, _joined(scratch, terms) if terms else scratch, error) from error
        if self.returns_new:
            return _joined(scratch, terms, self.out_keys)
        if scratch is not tensordict:
            for key in self.out_keys:
                tensordict.set(key, scratch.get(key))
        return tensordict

    def _run_apart(self, node: Any, batch: TensorDictBase, terms: dict[Key, Any]) -> None:
        """Run a node; losses, and nodes that read what losses wrote, write to ``terms``, the others to ``batch``."""
        reads = normalize_keys(node.in_keys)
        of_terms = any(key in terms for key in reads)
        result = node(_joined(batch, terms, reads) if of_terms else batch)
        if of_terms or getattr(node, "returns_new", False):
            terms.update({key: result.get(key) for key in _written(node)})
            return
        if result is not batch:
            batch.update(result.select(*_written(node), strict=False))
        for key in _written(node):  # the newer version is the one in the batch
            terms.pop(key, None)

    def _check_present(self, tensordict: TensorDictBase) -> None:
        for key in self.in_keys:
            if tensordict.get(key, None) is None:
                raise missing_key(self, key, tensordict)

    def get_dist(self, tensordict: TensorDictBase) -> torch.distributions.Distribution:
        """The action distribution of the last probabilistic node, from the batch; the batch is left as it was."""
        self._check_present(tensordict)
        nodes: list[Any] = list(self.nodes.values())
        last = max((i for i, node in enumerate(nodes) if _has_distribution(node)), default=None)
        if last is None:
            names = ", ".join(f"{name} ({describe(node)})" for name, node in self.nodes.items())
            raise GraphError(f"no node of this graph has a distribution; its nodes are {names}")
        scratch = tensordict.copy()
        for node in nodes[:last]:
            node(scratch)
        return nodes[last].get_dist(scratch)

    # ---- saving: a module at two nodes has one entry per tensor, under the first of its names

    def state_dict(self, *args: Any, prefix: str = "", **options: Any) -> Any:
        """Parameters and buffers by name; those of a module used at several nodes once, under its first name."""
        state = super().state_dict(*args, prefix=prefix, **options)
        for first, *others in _twins(self):
            for name in others:
                for key in [key for key in state if key.startswith(f"{prefix}{name}.")]:
                    if f"{prefix}{first}{key.removeprefix(prefix + name)}" in state:
                        del state[key]
        return state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for names in [*_twins(self), *self.__dict__.get("_origin_twins", [])]:
            known = next((n for n in names if any(key.startswith(f"{prefix}{n}.") for key in state_dict)), None)
            for key in [key for key in state_dict if key.startswith(f"{prefix}{known}.")]:
                for name in names:
                    state_dict.setdefault(f"{prefix}{name}{key.removeprefix(f'{prefix}{known}')}", state_dict[key])
        super()._load_from_state_dict(state_dict, prefix, *args)

    # ---- looking

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, index: int) -> TensorDictModuleBase:
        return list(self.nodes.values())[index]

    def __iter__(self) -> Iterator[TensorDictModuleBase]:
        return iter(self.nodes.values())

    def flat_nodes(self) -> list[TensorDictModuleBase]:
        """The nodes with nested graphs opened, in the order they run."""
        return [leaf for node in self.nodes.values() for leaf in _open(node)]

    def node_of(self, key: Key) -> TensorDictModuleBase | None:
        """The node that writes the last version of ``key``, or ``None`` when the batch provides it."""
        key = normalize_key(key)
        writers = [node for node in self.flat_nodes() if key in normalize_keys(node.out_keys)]
        return writers[-1] if writers else None

    def versions(self) -> list[tuple[list[KeyVersion], list[KeyVersion]]]:
        """For each flat node, the key versions it reads and those it writes (single assignment)."""
        return _Dataflow(self.flat_nodes()).versions

    def to_mermaid(self) -> str:
        """The graph as Mermaid text: boxes are nodes, arrows carry the key that flows."""
        lines = ["flowchart LR"]
        source: dict[KeyVersion, str] = {}
        for i, (node, (reads, writes)) in enumerate(zip(self.flat_nodes(), self.versions(), strict=True)):
            lines.append(f'    n{i}["{describe(node)}"]')
            for kv in reads:
                if kv not in source:
                    source[kv] = f"in{len(source)}"
                    lines.append(f'    {source[kv]}(["{encode_key(kv.key)}"])')
                lines.append(f'    {source[kv]} -- "{encode_key(kv.key)}" --> n{i}')
            source.update({kv: f"n{i}" for kv in writes})
        last = {kv.key: node for kv, node in source.items()}
        for j, key in enumerate(self.out_keys):
            lines.append(f'    {last[key]} -- "{encode_key(key)}" --> out{j}(["{encode_key(key)}"])')
        return "\n".join(lines)

    # ---- deriving: each returns a new graph over the same modules and leaves this one as it is

    def select(self, out_keys: object = None, in_keys: object = None) -> KeyedGraph:
        """A new graph with just the nodes needed to compute ``out_keys`` from ``in_keys``.

        ``in_keys``: keys the batch will provide; a producer of one of them is left out. Default: this graph's own.
        ``out_keys``: keys to write; others stay hidden. Default: all that can be computed from ``in_keys``.
        Nested graphs are cut too. Modules, and so weights, are shared. State-dict names stay as they are here.
        Raises :class:`GraphError` for an unknown key, or where ``in_keys`` do not suffice.
        """
        given = None if in_keys is None else normalize_keys(in_keys)
        flat, versions = self.flat_nodes(), self.versions()
        runs = [True] * len(flat) if given is None else _computable(versions, given, self)
        wanted = None if out_keys is None else normalize_keys(out_keys)
        if wanted is None:
            live = runs
            if not any(live):
                raise GraphError(f"no node can run from in_keys {given}; this graph reads {self.in_keys}")
        else:
            live = _live(versions, runs, wanted, self, given)
        keep = {id(node) for node, alive in zip(flat, live, strict=True) if alive}
        if wanted is None and given is None:
            wanted = list(self.out_keys)
        graph = _graph_of(_pruned(self.nodes.items(), keep), self)
        if wanted is None:  # what this graph shows and the nodes left can write
            written = _Dataflow(graph).written
            wanted = [key for key in self.out_keys if key in written]
            if not wanted:
                raise GraphError(f"no out_key of {self.out_keys} can be computed from in_keys {given}")
        graph._connect(wanted)
        return graph

    def rename(self, mapping: Mapping[Key, Key] | None = None, **names: Key) -> KeyedGraph:
        """A new graph that reads and writes under other names: ``graph.rename(observation="obs")``.

        ``mapping`` takes nested keys: ``graph.rename({"observation": ("agents", "observation")})``.
        Raises :class:`GraphError` for a key this graph does not have, or a new name already taken.
        """
        given: dict[Key, Key] = {**(mapping or {}), **names}  # type: ignore[dict-item]
        pairs = {normalize_key(a): normalize_key(b) for a, b in given.items()}
        known = [*self.in_keys, *(k for k in self.out_keys if k not in self.in_keys)]
        for old in pairs:
            if old not in known:
                raise GraphError(f"rename: no key {old!r} in this graph; it has {known}.{did_you_mean(old, known)}")
        renamed = [pairs.get(k, k) for k in known]
        if len(set(renamed)) != len(renamed):
            twice = next(k for k in renamed if renamed.count(k) > 1)
            raise GraphError(f"rename: two keys would be called {twice!r}; choose a name this graph does not use")
        return KeyedGraph(_Renamed(self, pairs))


class _Renamed(TensorDictModuleBase):
    """A graph seen through other key names."""

    def __init__(self, graph: KeyedGraph, mapping: dict[Key, Key]) -> None:
        super().__init__()
        self.graph = graph
        self.mapping = mapping
        self.in_keys = [mapping.get(k, k) for k in graph.in_keys]
        self.out_keys = [mapping.get(k, k) for k in graph.out_keys]
        self.returns_new = graph.returns_new

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        inner = tensordict.empty()
        for inside, outside in zip(self.graph.in_keys, self.in_keys, strict=True):
            inner.set(inside, tensordict.get(outside))
        result = self.graph(inner)
        written = TensorDict({}, batch_size=[]) if self.returns_new else tensordict
        for inside, outside in zip(self.graph.out_keys, self.out_keys, strict=True):
            written.set(outside, result.get(inside))
        return written

    def get_dist(self, tensordict: TensorDictBase) -> torch.distributions.Distribution:
        inner = tensordict.empty()
        for inside, outside in zip(self.graph.in_keys, self.in_keys, strict=True):
            inner.set(inside, tensordict.get(outside))
        return self.graph.get_dist(inner)


def _written(node: Any) -> list[Key]:
    return [key for key in normalize_keys(node.out_keys) if key != DISCARD]


def _joined(batch: TensorDictBase, terms: Mapping[Key, Any], keys: Iterable[Key] | None = None) -> TensorDict:
    """The entries called ``keys`` (default: all) at no batch size; those of ``terms`` come first."""
    joined = TensorDict({}, batch_size=[])
    for key in [*batch.keys(True, True), *terms] if keys is None else keys:
        joined.set(key, terms[key] if key in terms else batch.get(key))
    return joined


class _Dataflow:
    """Key versions along a list of nodes: what is read from outside, what is written, and which write feeds whom."""

    def __init__(self, nodes: Iterable[TensorDictModuleBase]) -> None:
        self.read: list[Key] = []
        self.written: list[Key] = []
        self.versions: list[tuple[list[KeyVersion], list[KeyVersion]]] = []
        current: dict[Key, int] = {}
        for node in nodes:
            reads = []
            for key in normalize_keys(node.in_keys):
                path = key if isinstance(key, tuple) else (key,)
                filled = [k for k in current if isinstance(k, tuple) and k != key and k[: len(path)] == path]
                if filled and key not in current:  # a nested batch that earlier nodes wrote, entry by entry
                    reads += [KeyVersion(k, current[k]) for k in filled]
                    continue
                if key not in current:
                    current[key] = 0
                    self.read.append(key)
                reads.append(KeyVersion(key, current[key]))
            writes = []
            for key in normalize_keys(node.out_keys):
                if key == DISCARD:
                    continue
                current[key] = current.get(key, 0) + 1
                writes.append(KeyVersion(key, current[key]))
                if key not in self.written:
                    self.written.append(key)
            self.versions.append((reads, writes))

    def refuse_lost_writes(self, graph: KeyedGraph) -> None:
        used = {kv for reads, _ in self.versions for kv in reads}
        last = {kv.key: kv for _, writes in self.versions for kv in writes}
        for i, (_, writes) in enumerate(self.versions):
            for kv in writes:
                if kv not in used and last[kv.key] != kv:
                    again = next(
                        j for j in range(i + 1, len(self.versions)) if any(w.key == kv.key for w in self.versions[j][1])
                    )
                    raise GraphError(
                        f"nodes {i} ({describe(graph[i])}) and {again} ({describe(graph[again])}) both write "
                        f"{kv.key!r} and nobody reads the first value: give one of them another out_key, "
                        f"or '{DISCARD}' to throw its value away"
                    )


def _has_distribution(node: nn.Module) -> bool:
    if isinstance(node, KeyedGraph):
        return any(_has_distribution(inner) for inner in node.nodes.values())
    inner = getattr(node, "graph", None)  # a renamed or compiled graph has what the graph behind it has
    return _has_distribution(inner) if isinstance(inner, nn.Module) else hasattr(node, "get_dist")


def _as_node(node: Any, index: int) -> TensorDictModuleBase:
    if isinstance(node, TensorDictModuleBase):
        keys = normalize_keys(node.out_keys)
    elif isinstance(node, tuple):
        if len(node) != 3 or not callable(node[0]):
            raise GraphError(f"node {index} is {node!r}: expected a tuple (callable, in_keys, out_keys)")
        fn, reads, writes = node
        keys = normalize_keys(writes)
        node = TensorDictModule(fn, in_keys=normalize_keys(reads), out_keys=keys)
    elif callable(node) and hasattr(node, "in_keys") and hasattr(node, "out_keys"):
        keys = normalize_keys(node.out_keys)
        node = TensorDictModule(node, in_keys=normalize_keys(node.in_keys), out_keys=keys)
    else:
        raise GraphError(
            f"node {index} is a {type(node).__name__} without keys: expected a tensordict.nn module, a KeyedGraph, "
            "or a tuple (callable, in_keys, out_keys), such as (torch.relu, ['hidden'], ['hidden'])"
        )
    named = [k for k in keys if k != DISCARD]
    for key in named:
        if named.count(key) > 1:
            raise GraphError(f"node {index} ({describe(node)}) writes {key!r} twice: give each output its own key")
    return node


def _open(node: nn.Module) -> list[TensorDictModuleBase]:
    """A node's leaves: keyed sequences opened, everything else itself."""
    if isinstance(node, KeyedGraph) and not node._hidden and not node.returns_new:
        return node.flat_nodes()
    if isinstance(node, (TensorDictSequential, ProbabilisticTensorDictSequential)) and _runs_plainly(node):
        return [leaf for child in node.module for leaf in _open(child)]
    return [node]


def _runs_plainly(node: TensorDictSequential) -> bool:
    """Whether a tensordict sequence is no more than its children in order (nothing selected, nothing optional)."""
    if getattr(node, "partial_tolerant", False) or type(node).forward not in (
        TensorDictSequential.forward,
        ProbabilisticTensorDictSequential.forward,
    ):
        return False
    written: list[Key] = []
    for child in node.module:
        written += [k for k in normalize_keys(child.out_keys) if k not in written and k != DISCARD]
    return set(written) == set(normalize_keys(node.out_keys))


def _pruned(items: Iterable[tuple[str, nn.Module]], keep: set[int]) -> dict[str, nn.Module]:
    """``items`` with only the leaves in ``keep``, names unchanged; a nested graph that loses leaves is rebuilt."""
    out: dict[str, nn.Module] = {}
    for name, node in items:
        alive = [id(leaf) in keep for leaf in _open(node)]
        if all(alive):
            out[name] = node
        elif any(alive):
            graph = _graph_of(_pruned(_place(node).named_children(), keep), node)
            graph._connect(_Dataflow(graph).written)
            out[name] = graph
    return out


def _place(node: nn.Module) -> nn.Module:
    """The container that holds a sequence's children."""
    return node.get_submodule("nodes" if "nodes" in node._modules else "module")


def _graph_of(nodes: dict[str, nn.Module], origin: nn.Module) -> KeyedGraph:
    """A graph of ``nodes``, held under the name under which ``origin`` holds them, so that state-dict names stay."""
    graph = KeyedGraph.__new__(KeyedGraph)
    TensorDictModuleBase.__init__(graph)
    name = next(name for name, child in origin.named_children() if child is _place(origin))
    graph._modules[name] = graph.__dict__["nodes"] = nn.ModuleDict(nodes)
    graph._modules[name].training = graph.training = origin.training
    graph.__dict__["_origin_twins"] = _twins(origin)  # a name that was cut away may be the one in a checkpoint
    return graph


def _twins(module: nn.Module) -> list[list[str]]:
    """The names of each module that stands at several places, in the order they are met."""
    names: dict[nn.Module, list[str]] = {}
    for name, child in module.named_modules(remove_duplicate=False):
        names.setdefault(child, []).append(name)
    return [found for found in names.values() if len(found) > 1]


Versions = list[tuple[list[KeyVersion], list[KeyVersion]]]


def _computable(versions: Versions, given: list[Key], graph: KeyedGraph) -> list[bool]:
    """Which nodes can run when the batch provides ``given`` and nothing else; producers of a given key are skipped."""
    known = {kv.key for reads, writes in versions for kv in (*reads, *writes)}
    for key in given:
        if key not in known:
            raise GraphError(
                f"select: in_keys has {key!r}, which no node reads; keys are {sorted(map(str, known))}."
                + did_you_mean(key, known)
            )
    cut = {kv for reads, _ in versions for kv in reads if kv.key in given}
    cut = {kv for kv in cut if kv.version == min(c.version for c in cut if c.key == kv.key)}
    available = set(cut)
    for key in given:  # a given key that is also produced: its first read version is the given one
        available.add(KeyVersion(key, 0))
        produced = [kv for _, writes in versions for kv in writes if kv.key == key]
        if produced and KeyVersion(key, 0) not in {kv for reads, _ in versions for kv in reads}:
            available.add(produced[0])
            cut.add(produced[0])
    runs = []
    for reads, writes in versions:
        runs.append(all(kv in available for kv in reads) and not any(kv in cut for kv in writes))
        if runs[-1]:
            available.update(writes)
    return runs


def _live(
    versions: Versions, runs: list[bool], wanted: list[Key], graph: KeyedGraph, given: list[Key] | None
) -> list[bool]:
    """Which of the nodes that can run are needed for the last version of each wanted key."""
    last = {kv.key: kv for _, writes in versions for kv in writes}
    for key in wanted:
        if key not in last:
            raise GraphError(f"select: no node writes {key!r}; nodes write {list(last)}." + did_you_mean(key, last))
    needed = {last[key] for key in wanted}
    live = [False] * len(versions)
    provided = set(given) if given is not None else None
    for i in reversed(range(len(versions))):
        reads, writes = versions[i]
        if not any(kv in needed for kv in writes):
            continue
        if not runs[i]:
            if provided is not None and all(kv.key in provided for kv in writes if kv in needed):
                continue
            lacking = [kv.key for kv in reads if provided is None or kv.key not in provided]
            raise GraphError(
                f"select: {[kv.key for kv in writes if kv in needed]} cannot be computed from in_keys {given}: "
                f"node {i} also reads {lacking}; add it to in_keys"
            )
        live[i] = True
        needed.update(reads)
    return live
