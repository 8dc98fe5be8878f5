"""Which graphs can be recorded: those of one device, whose operations CUDA records.

What is known to fail isn't tried, because torch's allocator goes on as if it recorded after a recording has failed.
"""

from __future__ import annotations

import optree
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pure_loop.compile.private import private_to_torch

__all__ = ["device_of_recording"]

with private_to_torch():
    from torch._inductor.utils import is_cudagraph_unsafe_fx_node


def device_of_recording(graph: GraphModule) -> tuple[torch.device | None, str | None]:
    """The device on which all of a graph runs, if it can be recorded there; or why it can't, where it is on a GPU."""
    devices: set[torch.device] = set()
    constants: set[Node] = set()
    unsafe: Node | None = None
    for node in graph.graph.nodes:
        tensors = [each for each in optree.tree_leaves(node.meta.get("val")) if isinstance(each, Tensor)]
        if _is_constant(node, tensors, constants):
            constants.add(node)
            continue
        devices.update(each.device for each in tensors)
        if unsafe is None and node.op == "call_function" and is_cudagraph_unsafe_fx_node(node):
            unsafe = node
    if not any(device.type == "cuda" for device in devices):
        return (devices.pop() if len(devices) == 1 else None), None
    if len(devices) > 1:
        return None, f"it has tensors on {' and '.join(sorted(map(str, devices)))}"
    if unsafe is not None:
        return None, f"CUDA can't record {unsafe.target}"
    return devices.pop(), None


def _is_constant(node: Node, tensors: list[Tensor], constants: set[Node]) -> bool:
    """Whether it is a number on the host, written in Python, that kernels of any device have in their code."""
    if not tensors or any(each.ndim or not each.is_cpu for each in tensors):
        return False
    return node.op == "get_attr" or (
        node.op == "call_function" and bool(node.all_input_nodes) and constants.issuperset(node.all_input_nodes)
    )
