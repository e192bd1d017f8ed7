"""A program as JSON, and back: operation names, arguments, shapes. No Python code and no pickle is in it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from graphrl.compiler.program import Port, Program, StateSlot
from graphrl.errors import BundleError
from graphrl.keys import decode_key, encode_key

__all__ = ["program_from_json", "program_to_json"]


def program_to_json(program: Program) -> dict[str, Any]:
    """Everything needed to rebuild ``program``, its state tensors apart."""
    nodes = []
    for node in program.graph_module.graph.nodes:
        if node.op in ("call_function", "output"):
            target = "output" if node.op == "output" else _target_name(node.target)
            nodes.append({"name": node.name, "op": target, "args": _encode(node.args), "kwargs": _encode(node.kwargs),
                          "shape": _shape(node.meta.get("val")), "dtype": _dtypes(node.meta.get("val"))})  # fmt: skip
        elif node.op != "placeholder":
            raise BundleError(f"node {node.name!r} is a {node.op}: only ATen operations can be written to a bundle")
    return {
        "name": program.name,
        "inputs": [_port(p) for p in program.inputs],
        "outputs": [_port(p) for p in program.outputs],
        "state": [
            {"name": s.name, "shape": list(s.shape), "dtype": _dtype_name(s.dtype), "kind": s.kind}
            for s in program.state
        ],
        "placeholders": [n.name for n in program.placeholders()],
        "nodes": nodes,
    }


def program_from_json(data: Mapping[str, Any], state: Mapping[str, Tensor]) -> Program:
    """The program that ``data`` describes, around the given state tensors. Only ``aten`` operations are looked up."""
    graph = fx.Graph()
    values: dict[str, fx.Node] = {name: graph.placeholder(name) for name in data["placeholders"]}
    for entry in data["nodes"]:
        args = _decode(entry["args"], values)
        kwargs = {name: _decode(value, values) for name, value in entry["kwargs"].items()}  # one may be called "dtype"
        if entry["op"] == "output":
            graph.output(*args)
        else:
            values[entry["name"]] = graph.create_node(
                "call_function", _target(entry["op"]), tuple(args), kwargs, name=entry["name"]
            )
    ports = [tuple(Port(decode_key(p["key"]), tuple(p["shape"]), _dtype(p["dtype"]), torch.device("cpu"))
                   for p in data[side]) for side in ("inputs", "outputs")]  # fmt: skip
    slots = tuple(StateSlot.of(s["name"], (lambda t: lambda: t)(state[s["name"]]), s["kind"]) for s in data["state"])
    module = fx.GraphModule(torch.nn.Module(), graph)
    program = Program(module, ports[0], ports[1], slots, name=data["name"])
    _propagate(program)
    return program


def _propagate(program: Program) -> None:
    """Fill in the shape of every node."""
    mode = FakeTensorMode()
    sources: list[Any] = [*program.inputs, *program.state]
    with mode:
        fakes = [torch.empty(p.shape, dtype=p.dtype) for p in sources]

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if n.op != "output":
                n.meta["val"] = result
            return result

    with mode:
        Recorder(program.graph_module).run(*fakes)


def _port(port: Port) -> dict[str, Any]:
    return {"key": encode_key(port.key), "shape": list(port.shape), "dtype": _dtype_name(port.dtype)}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise BundleError(f"graph.json names dtype {name!r}, which does not exist")
    return found


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return list(value.shape)
    return [_shape(v) for v in value] if isinstance(value, (tuple, list)) else None


def _dtypes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _dtype_name(value.dtype)
    return [_dtypes(v) for v in value] if isinstance(value, (tuple, list)) else None


def _target_name(target: Any) -> str:
    if target is operator.getitem:
        return "getitem"
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
        return str(target)
    raise BundleError(f"operation {target} is not an ATen operation: it cannot be written to a bundle")


def _target(name: str) -> Any:
    if name == "getitem":
        return operator.getitem
    parts = name.split(".")
    if len(parts) == 3 and parts[0] == "aten" and hasattr(torch.ops.aten, parts[1]):
        packet = getattr(torch.ops.aten, parts[1])
        if parts[2] in packet.overloads():
            return getattr(packet, parts[2])
    raise BundleError(f"graph.json names operation {name!r}, which torch {torch.__version__} does not have")


def _encode(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, (tuple, list)):
        return [_encode(v) for v in value]
    if isinstance(value, dict):
        return {k: _encode(v) for k, v in value.items()}
    if isinstance(value, torch.dtype):
        return {"dtype": _dtype_name(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, (torch.layout, torch.memory_format)):
        return {"torch": str(value).removeprefix("torch.")}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise BundleError(f"an operation has the argument {value!r}, which cannot be written to a bundle")


def _decode(value: Any, nodes: Mapping[str, fx.Node]) -> Any:
    if isinstance(value, list):
        return [_decode(v, nodes) for v in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"node"}:
        return nodes[value["node"]]
    if set(value) == {"dtype"}:
        return _dtype(value["dtype"])
    if set(value) == {"device"}:
        return torch.device(value["device"])
    if set(value) == {"torch"}:
        found = getattr(torch, value["torch"], None)
        if not isinstance(found, (torch.layout, torch.memory_format)):
            raise BundleError(f"graph.json names torch.{value['torch']}, which is no layout or memory format")
        return found
    return {k: _decode(v, nodes) for k, v in value.items()}
