"""Which graphs can be recorded: those of one device, whose operations CUDA records.

What is known to fail isn't tried, because torch's allocator stays in its recording state after a recording has failed.
"""

from __future__ import annotations

import optree
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pure_loop.compile._torch import prevents_recording

__all__ = ["device_of_recording"]


def device_of_recording(graph: GraphModule) -> tuple[torch.device | None, str | None]:
    """The device on which all of a graph runs, if it can be recorded there; or why it can't, where it is on a GPU."""
    devices: set[torch.device] = set()
    constants: set[Node] = set()
    unsafe: Node | None = None
    is_known = True
    for node in graph.graph.nodes:
        tensors = [leaf for leaf in optree.tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
        if _is_constant(node, tensors, constants):
            constants.add(node)
            continue
        devices.update(tensor.device for tensor in tensors)
        if unsafe is None and node.op == "call_function":
            prevents = prevents_recording(node)
            is_known = is_known and prevents is not None
            unsafe = node if prevents else None
    if not any(device.type == "cuda" for device in devices):
        return (devices.pop() if len(devices) == 1 else None), None
    if len(devices) > 1:
        return None, f"it has tensors on {' and '.join(sorted(map(str, devices)))}"
    if unsafe is not None:
        return None, f"CUDA can't record {unsafe.target}"
    if not is_known:
        return None, "this version of torch doesn't say which operations CUDA can record"
    return devices.pop(), None


def _is_constant(node: Node, tensors: list[Tensor], constants: set[Node]) -> bool:
    """Whether it is a number on the host, written in Python, that kernels of any device have in their code."""
    if not tensors or any(tensor.ndim or not tensor.is_cpu for tensor in tensors):
        return False
    return node.op == "get_attr" or (
        node.op == "call_function" and bool(node.all_input_nodes) and constants.issuperset(node.all_input_nodes)
    )
