"""An optimizer's step of many tensors as one operation, which a graph need not be taken through tensor by tensor.

torch's compiler makes a loop for each of three hundred small tensors, and takes minutes to find out which of these go
together. torch's own fused kernel walks the list in one call. So that call stands in the list of operations as it is,
and the graph is cut there, into what comes before the kernel, the kernel, and what follows; or the call is decomposed,
where it can't be cut.

The kernel writes at once to the memory that the graph would have written to in the end. So the cut is made only where
nothing that follows reads what was there before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, cast

import attrs
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from pure_loop._internal.torch_private import fused_adam, fused_adamw
from pure_loop.compile._torch import Call, Function, storage_key
from pure_loop.stages.nonfinite import find_nonfinite

__all__ = [
    *("ADAM", "NONFINITE", "TENSORS", "CutGraph", "cut", "has_kernels", "memory_of"),
    *("origin", "run_nonfinite", "serves"),
]

# A list of so many tensors is walked by the kernel. Below that loops of its own, fused with what is around them, are
# faster, and soon compiled.
TENSORS = 32

torch.library.define(
    "pure_loop::adam",
    "(Tensor[] params, Tensor[] grads, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor[] largest, Tensor[] steps, "
    "Tensor lr, int[] which, str name, float beta1, float beta2, float weight_decay, float eps, bool maximize, "
    "Tensor? live) -> Tensor[]",
)
torch.library.define("pure_loop::nonfinite", "(Tensor[] tensors, Tensor zero) -> Tensor")

# Parameters, averages, squares and largest squares after the step, one list after the other. `which` says for each
# parameter which of the steps counts for it. `live` holds beta1, beta2 and the weight decay, where one of them is a
# schedule: float64, shape (3,).
ADAM = torch.ops.pure_loop.adam.default
# Whether any element is NaN or infinite.
NONFINITE = torch.ops.pure_loop.nonfinite.default


def _like_adam(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    largest: list[Tensor],
    *_: object,
) -> list[Tensor]:
    return [torch.empty_like(item) for item in (*params, *exp_avgs, *exp_avg_sqs, *largest)]


def _like_nonfinite(tensors: list[Tensor], zero: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.bool, device=zero.device)


torch.library.register_fake("pure_loop::adam", _like_adam)
torch.library.register_fake("pure_loop::nonfinite", _like_nonfinite)


def serves(tensors: list[Tensor]) -> bool:
    """Whether the kernels take so many tensors, as they lie in memory."""
    first = tensors[0]
    return (
        None not in (fused_adam, fused_adamw)
        and len(tensors) >= TENSORS
        and first.is_floating_point()
        and all(tensor.is_cpu and tensor.dtype is first.dtype and tensor.is_contiguous() for tensor in tensors)
    )


def run_nonfinite(tensors: list[Tensor], zero: Tensor) -> Tensor:
    """Whether any element is NaN or infinite. The tensors are written to, and stay what they are."""
    return find_nonfinite(zero, tensors).bool().reshape(())


_aten = torch.ops.aten
_SAME = frozenset({_aten.clone.default, _aten.alias.default, _aten.detach.default})
# Of ADAM's arguments: those that it writes to, and the others that are tensors.
_WRITES, _READS = (0, 2, 3, 4), (1, 5, 6, 14)


def origin(value: Any) -> Any:
    """What a value is a mere copy of."""
    while isinstance(value, Node):
        if value.target in _SAME:
            value = value.args[0]
        elif _copies(value):
            value = value.args[1]
        else:
            break
    return value


def _copies(node: Node) -> bool:
    """Whether it is what its second argument is, in the place of the first."""
    if node.target is not _aten.copy.default:
        return False
    a, b = map(_value, _of(node, (0, 1)))
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def memory_of(value: object) -> object:
    """What tells two tensors' memory apart."""
    result = value.meta.get("val") if isinstance(value, Node) else None
    return storage_key(result) if isinstance(result, Tensor) else None


def has_kernels(graph: GraphModule) -> bool:
    """Whether there is a kernel that a graph may be cut at."""
    result = [node for node in graph.graph.nodes if node.target is ADAM]
    return bool(result) and all(serves([_value(item) for item in _of(node, _WRITES)]) for node in result)


Values: TypeAlias = dict[str, Tensor]


@attrs.frozen
class CutGraph:
    """A graph in two pieces, and the kernels between them.

    Attributes:
        inputs: the names of what the graph took.
        first: takes that, and gives what the kernels and the second piece take of it.
        kernels: in their order.
        second: takes what the graph took, what the first piece gave, and what the kernels found.
        needed, looked: the names of these.
        taken: the inputs that kernels take.
        written: those of them that they write to.
        places: which outputs of the second piece are written to which input.
    """

    inputs: list[str]
    first: GraphModule
    kernels: list[Node]
    second: GraphModule
    needed: list[str]
    looked: list[str]
    taken: list[int]
    written: list[int]
    places: dict[int, int]

    def described(self) -> tuple[str, ...]:
        """The kernels, for records of what was compiled."""
        return tuple(
            f"{node.args[8]} of {len(_of(node, (0,)))} tensors" for node in self.kernels if node.target is ADAM
        )

    def joined(self, first: Call, of_first: list[int], second: Call, of_second: list[int], taken: list[int]) -> Call:
        """All of it as one call.

        Args:
            first, second: the machine code of the pieces.
            of_first, of_second: which of their inputs they take.
            taken: which inputs the joined call takes.
        """
        names = [*self.inputs, *self.needed, *self.looked]
        wanted, wanted_then = [names[i] for i in of_first], [names[i] for i in of_second]
        chosen, value = [names[i] for i in taken], self.needed
        kernels = list(map(_prepared, self.kernels))

        def call(tensors: list[Tensor]) -> Sequence[Any]:
            values: Values = dict(zip(chosen, tensors, strict=True))
            tensors.clear()
            values.update(zip(value, first([values[name] for name in wanted]), strict=True))
            for name, run in kernels:
                result = run(values)
                if result is not None:
                    values[name] = result
            return second([values[name] for name in wanted_then])

        return call


def cut(graph: GraphModule, places: dict[int, int]) -> CutGraph | None:
    """Cut a functional graph at its kernels; None where that would change what it computes.

    Args:
        graph: ends with a list of outputs.
        places: which of them are written to which input.
    """
    *nodes, output = graph.graph.nodes
    inputs = [node for node in nodes if node.op == "placeholder"]
    results: Any = output.args[0]
    adams = [node for node in nodes if node.target is ADAM]
    if not adams:
        return None
    looks = [node for node in nodes if node.target is NONFINITE]
    kernels = {*adams, *looks}
    replaced = {origin(results[number]): inputs[position] for number, position in places.items()}
    following = _followers(nodes, adams)
    result: dict[Node, Node] = {}  # what a kernel makes, and the input that it writes to
    for kernel in adams:
        before = [origin(element) for element in _of(kernel, _WRITES)]
        if (
            kernel in following
            or len(kernel.users) != len(before)
            or not serves([_value(element) for element in before])
        ):
            return None
        for item in kernel.users:
            index = item.args[1]
            assert isinstance(index, int)
            if replaced.get(item) is not before[index]:
                return None
            result[item] = before[index]
    written = set(result.values())
    old_memory = set(map(memory_of, written))
    following -= {*result, *looks}
    for look in looks:
        if any(origin(element) not in result for element in look.args[0]) or look.args[1] in following:
            return None
    left = [number for number in range(len(results)) if number not in places or origin(results[number]) not in result]
    needed: dict[Node, None] = {}
    # What they copy to would have to be there for nothing: they are what a kernel has written.
    copies = {node for node in following if _copies(node) and node.args[1] in result}
    readers = [[node.args[1]] if node in copies else node.all_input_nodes for node in nodes if node in following]
    readers += [[element for element in map(results.__getitem__, left) if isinstance(element, Node)]]
    readers += [_of(kernel, _READS) for kernel in adams] + [_of(look, (1,)) for look in looks]
    for source in (element for reader in readers for element in reader):
        if source in result or source in following or source in kernels:
            continue
        if memory_of(source) in old_memory:
            return None  # it reads what was there before the kernel
        if source.op != "placeholder":
            needed[source] = None
    first, second = Graph(), Graph()
    ours = {node: first.node_copy(node) for node in inputs}
    theirs = {node: second.node_copy(node) for node in inputs}
    for node in (*needed, *looks):
        theirs[node] = second.placeholder(node.name)
        theirs[node].meta = dict(node.meta)
    theirs |= {item: theirs[old] for item, old in result.items()}
    for node in nodes:
        if node in copies:
            theirs[node] = theirs[node.args[1]]
        elif node in following:
            theirs[node] = second.node_copy(node, theirs.__getitem__)
        elif node not in ours and node not in kernels and node not in result:
            ours[node] = first.node_copy(node, ours.__getitem__)
    first.output([ours[node] for node in needed])
    second.output([theirs[results[n]] if isinstance(results[n], Node) else results[n] for n in left])
    read = {origin(node) for kernel in adams for node in _of(kernel, _WRITES)} | {
        node for kernel in kernels for node in kernel.all_input_nodes
    }
    return CutGraph(
        inputs=[node.name for node in inputs],
        first=GraphModule(graph, first),
        kernels=[*adams, *looks],
        second=GraphModule(graph, second),
        needed=[node.name for node in needed],
        looked=[node.name for node in looks],
        taken=[position for position, node in enumerate(inputs) if node in read],
        written=[position for position, node in enumerate(inputs) if node in written],
        places={index: places[number] for index, number in enumerate(left) if number in places},
    )


def _of(kernel: Node, indices: Iterable[int]) -> list[Node]:
    """The tensors of these arguments, one list after the other."""
    return [node for index in indices for node in _listed(kernel.args[index])]


def _listed(argument: Any) -> Iterator[Node]:
    if argument is not None:
        yield from argument if isinstance(argument, list | tuple) else (argument,)


def _followers(nodes: list[Node], kernels: list[Node]) -> set[Node]:
    """What depends on a kernel."""
    result: set[Node] = set()
    begun = set(kernels)
    for node in nodes:
        if any(value in begun or value in result for value in node.all_input_nodes):
            result.add(node)
    return result


def _prepared(kernel: Node) -> tuple[str, Callable[[Values], Tensor | None]]:
    """A kernel's name, and a call of it with values that are known by name."""
    if kernel.target is NONFINITE:
        # What it looks at is where the kernel before it has written.
        looked = [_written_to(item) for item in _of(kernel, (0,))]
        (zero,) = (node.name for node in _of(kernel, (1,)))
        return kernel.name, lambda values: run_nonfinite([values[name] for name in looked], values[zero])
    lists = [[(origin(item) if i in _WRITES else item).name for item in _of(kernel, (i,))] for i in range(6)]
    (lr,) = (node.name for node in _of(kernel, (6,)))
    which, name, *numbers, live = cast("tuple[Any, ...]", kernel.args[7:])
    live_name = live.name if isinstance(live, Node) else None
    step: Function | None = fused_adamw if name == "adamw" else fused_adam
    assert step is not None

    def run(values: Values) -> None:
        params, grads, exp_avgs, exp_avg_sqs, largest, steps = ([values[name] for name in names] for names in lists)
        beta1, beta2, weight_decay, eps, maximize = numbers
        if live_name is not None:
            beta1, beta2, weight_decay = values[live_name].tolist()
        rest = [exp_avgs, exp_avg_sqs, largest, [steps[i] for i in which]]
        options = {"lr": values[lr].item(), "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "eps": eps}
        step(params, [grad.contiguous() for grad in grads], *rest, **options, amsgrad=bool(largest), maximize=maximize)

    return kernel.name, run


def _written_to(value: Node) -> str:
    kernel, index = origin(value).args
    return str(origin(_of(kernel, _WRITES)[index]).name)


def _value(node: Node) -> Tensor:
    result: Tensor = node.meta["val"]
    return result
