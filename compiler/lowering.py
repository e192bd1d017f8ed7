"""From a raw ``make_fx`` trace to a program's normal form: lifted state, explicit writes, core ATen operations.

torch's private tracing calls live here and in ``trace.py``. Checked with torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._decomp import core_aten_decompositions
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from graphrl.compiler.program import Fixed, StateSlot
from graphrl.compiler.reachable import loose_tensors, modules_of
from graphrl.compiler.shapes import on_fakes

__all__ = ["fake_like", "foreach_decompositions", "graph_slots", "lift_state", "module_slots", "normalize"]


def module_slots(modules: Iterable[tuple[str, nn.Module]]) -> dict[int, StateSlot]:
    """State slots of every parameter and buffer below the named modules, by ``id`` of the tensor they hold now.

    A tensor shared by two modules gets one slot, under the first name met.
    """
    slots: dict[int, StateSlot] = {}
    for prefix, root in modules:
        for path, module in root.named_modules():
            for kind, store in (("parameter", module._parameters), ("buffer", module._buffers)):
                for name, tensor in store.items():
                    if tensor is not None and id(tensor) not in slots:
                        full = ".".join(part for part in (prefix, path, name) if part)
                        slots[id(tensor)] = StateSlot.of(full, _reader(store, name), kind)
    return slots


def graph_slots(graph: nn.Module) -> dict[int, StateSlot]:
    """State slots of all that a graph reads, what its functions close over included."""
    known = module_slots(modules_of(graph))
    for i, (name, tensor) in enumerate(loose_tensors(graph)):
        known[id(tensor)] = StateSlot.of(f"loose.{i}.{name}", Fixed(tensor), "parameter")
    return known


def _reader(store: dict[str, Any], name: str) -> Callable[[], Tensor]:
    return lambda: store[name]


def lift_state(traced: fx.GraphModule, known: dict[int, StateSlot]) -> tuple[fx.GraphModule, list[StateSlot]]:
    """Turn every tensor the trace captured into a placeholder behind the inputs; return them as state slots, in order.

    A captured tensor that is in no module is a constant where it is a literal of the user's code. A closed-over
    tensor stays live, like a buffer: whoever holds it may write it.
    """
    graph = traced.graph
    last = [n for n in graph.nodes if n.op == "placeholder"]
    anchor = last[-1] if last else None
    lifted: dict[int, fx.Node] = {}
    slots: list[StateSlot] = []
    same_memory = {_memory(slot.read()): key for key, slot in known.items()}
    for node in list(graph.nodes):
        if node.op == "get_attr":
            tensor = getattr(traced, node.target)
            # p.data and p.detach() are other objects over the memory of p: the same state
            place = id(tensor) if id(tensor) in known else same_memory.get(_memory(tensor), id(tensor))
            if place not in lifted:
                slot = known.get(place)
                if slot is None:
                    name, kind = ("constant", "constant") if _is_literal(node) else ("captured", "buffer")
                    slot = StateSlot.of(f"{name}_{len(slots)}", Fixed(tensor), kind)
                with graph.inserting_after(anchor) if anchor else graph.inserting_before(next(iter(graph.nodes))):
                    anchor = graph.placeholder(f"state_{len(slots)}")
                lifted[place] = anchor
                slots.append(slot)
            node.replace_all_uses_with(lifted[place])
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if "_record_function" in str(node.target):  # optimisers mark their step for the profiler
            graph.erase_node(node)
        elif node.target is torch.ops.aten.native_batch_norm.default and node.args[3] is not None and node.args[5]:
            node.target = torch.ops.aten._native_batch_norm_legit.default  # the same, but it declares its writes
    graph.lint()
    return fx.GraphModule(traced, graph), slots


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """What two names of the same numbers have in common; an empty tensor has none with another."""
    place = tensor.data_ptr() if tensor.numel() else id(tensor)
    return place, tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _is_literal(node: fx.Node) -> bool:
    """Whether a captured tensor was made by the traced code itself, as ``torch.tensor(2.0)`` is."""
    fresh = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
    return all(user.target in fresh for user in node.users)


def fake_like(tensors: Sequence[Tensor], mode: FakeTensorMode) -> list[Tensor]:
    """Fake tensors with the shapes, strides, dtypes and devices of real ones; those that are fake already stay."""
    return [t if isinstance(t, FakeTensor) else mode.from_tensor(t.detach(), static_shapes=True) for t in tensors]


_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def normalize(
    traced: fx.GraphModule,
    tensors: Sequence[Tensor],
    extra: dict[Any, Any] | None = None,
    mode: FakeTensorMode | None = None,
) -> fx.GraphModule:
    """Core ATen, no in-place operation but one final ``copy_`` for each placeholder that was written.

    ``mode``: that of the fake tensors among ``tensors``.
    """
    table = {**core_aten_decompositions(), **foreach_decompositions(), **(extra or {})}
    if any(node.target is _ATTENTION_BACKWARD for node in traced.graph.nodes):
        table.pop(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, None)  # it lacks what that reads
    table.pop(torch.ops.aten.bernoulli.default, None)  # it draws float32 whatever the dtype, and so not as eager does
    mode = mode or FakeTensorMode()
    fakes = fake_like(tensors, mode)
    functional = torch.func.functionalize(traced, remove="mutations")
    with on_fakes(mode), torch.no_grad():
        return make_fx(functional, decomposition_table=table, tracing_mode="real")(*fakes)


def mark_mutated(graph: fx.Graph, first_state: int, slots: Sequence[StateSlot]) -> tuple[StateSlot, ...]:
    """``slots`` with ``mutated`` set for those the graph copies into."""
    written = {n.args[0] for n in graph.nodes if n.target is torch.ops.aten.copy_.default}
    places = [n for n in graph.nodes if n.op == "placeholder"][first_state:]
    return tuple(replace(s, mutated=p in written) for s, p in zip(slots, places, strict=False))


def foreach_decompositions() -> dict[Any, Callable[..., Any]]:
    """One operation per tensor for the ``_foreach_*`` calls that optimisers and gradient clipping make."""
    names = (
        "abs add addcdiv addcmul clamp_max clamp_min div exp lerp log maximum minimum mul neg pow reciprocal sign sqrt "
        "sub zero norm"
    )
    table = {}
    for name in names.split():
        packet = getattr(torch.ops.aten, f"_foreach_{name}", None)
        if packet is None:
            continue
        for overload in packet.overloads():
            if not overload.endswith("out"):
                table[getattr(packet, overload)] = _one_by_one(name)
    return table


def _one_by_one(name: str) -> Callable[..., list[Tensor]]:
    single = {"norm": torch.linalg.vector_norm, "zero": torch.zeros_like}.get(name) or getattr(torch, name)

    def run(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
        def pick(value: Any, i: int) -> Any:
            return value[i] if isinstance(value, (list, tuple)) else value

        kwargs.pop("dtype", None) if kwargs.get("dtype") is None else None
        if name in ("addcmul", "addcdiv") and len(args) == 3:  # the scalar is keyword-only in the single form
            kwargs["value"] = args[2]
            args = args[:2]
        return [
            single(t, *(pick(a, i) for a in args), **{k: pick(v, i) for k, v in kwargs.items()})
            for i, t in enumerate(tensors)
        ]

    return run
