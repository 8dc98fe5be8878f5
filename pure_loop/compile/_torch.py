"""The private names of torch that compiling uses, and what serves where a release of torch lacks one.

No other module of this folder names one. Each is looked up once, when something is first compiled. Where it is missing,
a public way does the same, mostly slower, and :data:`missing` and the log ``pure_loop.compile`` say what is lost. So no
release that moves a private name keeps ``compile=True`` from working.

A graph is compiled by torch's inductor, which is entered without ``torch.compile``: that would trace the graph again,
check guards at each call, and let autograd see it. Where inductor's entry, or anything that belongs to it, is missing
or takes other arguments, ``torch.compile(graph, fullgraph=True)`` takes its place.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.multiprocessing import reductions

from pure_loop.errors import CompileError

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch by torch
        from torch.fx.experimental.proxy_tensor import get_proxy_mode as get_proxy_mode
        from torch.fx.experimental.proxy_tensor import make_fx as make_fx
except ImportError as error:  # documented, so that there is no other way
    raise CompileError(
        f"this version of torch ({torch.__version__}) can't write down what Python does: {error}. Leave compile out, "
        "or install a version of torch that pure_loop was tested with."
    ) from error

# What calls a graph: takes a list of tensors, and empties it.
Call: TypeAlias = Callable[[list[Tensor]], Sequence[Tensor]]
# A function of torch's, with any arguments, and those that are given by name.
Function: TypeAlias = Callable[..., Any]
Options: TypeAlias = dict[str, Any]
# Operations of torch's dispatcher, which are of a private class, and what to do instead of each.
Decompositions: TypeAlias = dict[Any, Function]

_SLOWER = "graphs are compiled by torch.compile: a call takes some ten microseconds more, and has memory of its own"
_BY_MEMBER = "some operations of ensembles (batch norm) run member by member"
_MIN_CUT = "torch._functorch.partitioners:min_cut_rematerialization_partition"
NAMES: Mapping[str, str] = {
    "torch._inductor.compile_fx:compile_fx_inner": _SLOWER,
    "torch._inductor.fx_passes.joint_graph:joint_graph_passes": _SLOWER,
    "torch._inductor.utils:BoxedBool": _SLOWER,
    "torch._inductor.decomposition:select_decomp_table": _SLOWER,
    "torch._inductor.config:patch": _SLOWER,
    "torch._inductor.utils:is_cudagraph_unsafe_fx_node": "no graph is a CUDA graph: kernels are launched one by one",
    _MIN_CUT: "a forward keeps more for its backward, where an event between the two is observed",
    "torch._dispatch.python:enable_python_dispatcher": "some operations are traced as torch's own kernels",
    "torch:ops.aten.add.Tensor._schema": "what an operation writes to is known by its name alone",
    "torch:UntypedStorage._cdata": "nothing",
    "torch._C:_dispatch_has_kernel_for_dispatch_key": _BY_MEMBER,
    "torch._decomp:decomposition_table": _BY_MEMBER,
    "torch._C._functorch:_set_vmap_fallback_warning_enabled": "torch warns of operations that run member by member",
}
"""Where each name is, ``module:attribute``, and what is lost without it."""

missing: dict[str, str] = {}
"""The private names that this torch lacks, of those looked up so far, each with what is lost."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Around imports of torch, which warns of its own use of what is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _attribute(path: str) -> Any:
    module, _, name = path.partition(":")
    with _quiet():
        return attrgetter(name)(import_module(module))


@cache
def _find(path: str) -> Any:
    """The attribute; None, noted in :data:`missing`, where there is none."""
    try:
        return _attribute(path)
    except (ImportError, AttributeError):
        _note(path, NAMES[path])
        return None


def _note(what: str, lost: str) -> None:
    name = what.replace(":", ".")
    if name not in missing:
        missing[name] = lost
        logging.getLogger("pure_loop.compile").warning("torch %s has no %s: %s", torch.__version__, name, lost)


def look_up_all() -> Mapping[str, str]:
    """:data:`missing` for all names; imports torch's compiler, which takes seconds."""
    for path in NAMES:
        _find(path)
    _has_inductor()
    return missing


# Tracing.


@cache
def _fake() -> Tensor:
    """A tensor without numbers, of which its class and that of its mode are known."""
    value: list[Tensor] = []

    def body(tensor: Tensor) -> Tensor:
        value.append(tensor)
        return tensor

    make_fx(body, tracing_mode="fake")(torch.empty(0))
    return value[0]


def mode_of(fake: Any) -> AbstractContextManager[object]:
    """The mode in which a tensor without numbers was made."""
    mode: AbstractContextManager[object] = fake.fake_mode
    return mode


def fake_mode() -> AbstractContextManager[object]:
    """A mode, inside which tensors have no numbers."""
    make: Function = type(mode_of(_fake()))
    mode: AbstractContextManager[object] = make(allow_non_fake_inputs=True)
    return mode


def fake_tensor_class() -> type[Tensor]:
    """The class of tensors without numbers."""
    return type(_fake())


def python_dispatcher() -> AbstractContextManager[object]:
    """A context in which operations that torch also has in Python are traced as that."""
    enable: Function = _find("torch._dispatch.python:enable_python_dispatcher") or nullcontext
    context: AbstractContextManager[object] = enable()
    return context


@attrs.frozen
class Schema:
    """What an operation does to its arguments.

    Attributes:
        names: of the arguments.
        writes: the places of those that it writes to.
        is_view: whether it gives a part of its first argument.
    """

    names: tuple[str, ...]
    writes: frozenset[int]
    is_view: bool


@cache
def schema_of(target: Any) -> Schema | None:
    """What an operation of torch's dispatcher does; None: it is none."""
    if not isinstance(target, type(torch.ops.aten.add.Tensor)):
        return None
    if _find("torch:ops.aten.add.Tensor._schema") is None:
        return _schema_by_name(target)
    arguments = target._schema.arguments
    aliased = [argument.alias_info for argument in arguments]
    return Schema(
        tuple(argument.name for argument in arguments),
        frozenset(place for place, alias in enumerate(aliased) if alias is not None and alias.is_write),
        bool(aliased) and aliased[0] is not None,
    )


_VIEWS = frozenset(
    {"_reshape_alias", "alias", "as_strided", "detach", "diagonal", "expand", "permute", "select", "slice"}
)
_VIEWS |= {"split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view"}
_VIEWS |= {"chunk", "imag", "movedim", "narrow", "real", "swapaxes", "swapdims", "tensor_split", "view_as"}
_VIEWS |= {"view_as_complex", "view_as_real"}


def _schema_by_name(target: Any) -> Schema:
    """By torch's conventions: what ends in ``_`` writes to its first argument; ``out`` is given by name."""
    name = target.name().partition("::")[2].partition(".")[0]
    writes = name.endswith("_") and not name.endswith("__")
    names: tuple[str, ...] = ("self",)
    if "scaled_dot_product" in name:
        masks = 0 if "flash" in name else 2 if "efficient" in name or "cudnn" in name else 1
        names = ("query", "key", "value", *("attn_mask", "compute_log_sumexp")[:masks], "dropout_p")
    return Schema(names, frozenset({0} if writes else ()), writes or name in _VIEWS)


def storage_key(tensor: Tensor) -> object:
    """What tells the memory of two tensors, fake ones too, apart, for as long as both are there."""
    storage = tensor.untyped_storage()
    if _find("torch:UntypedStorage._cdata") is not None:
        return storage._cdata
    reference: Function = reductions.StorageWeakRef
    return reference(storage)


def decompositions() -> Decompositions:
    """Operations as others that the compiler takes; ``torch.compile`` has them by itself."""
    select = _find("torch._inductor.decomposition:select_decomp_table") if _has_inductor() else None
    return {} if select is None else dict(select())


# Members.


def unmapped(targets: Iterable[object], wrongly: Collection[object] = ()) -> Decompositions:
    """What to do instead of those of these operations that ``torch.vmap`` maps by a loop over members, or wrongly."""
    has_kernel: Function | None = _find("torch._C:_dispatch_has_kernel_for_dispatch_key")
    table: Decompositions | None = _find("torch._decomp:decomposition_table")
    if has_kernel is None or table is None:
        return {}
    operator_class: Any = type(torch.ops.aten.add.Tensor)
    return {
        target: table[target]
        for target in targets
        if isinstance(target, operator_class)
        and target in table
        # The further results of others (attention, a margin loss), decomposed, are not what their backwards take.
        and (len(target._schema.returns) == 1 or "batch_norm" in target.name())
        and (
            target in wrongly
            or not any(has_kernel(target.name(), key) for key in ("FuncTorchBatched", "CompositeImplicitAutograd"))
        )
    }


@contextmanager
def errors_not_logged() -> Iterator[None]:
    """Inside, an operation on fake tensors that fails is raised, and torch doesn't log its traceback besides."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def mapping_in_silence() -> Iterator[None]:
    """Inside, operations that ``torch.vmap`` maps by a loop are mapped so without a warning."""
    set_warning: Function = _find("torch._C._functorch:_set_vmap_fallback_warning_enabled") or (lambda enabled: None)
    set_warning(False)
    try:
        yield
    finally:
        set_warning(True)


# Lowering.

_SETTINGS: Options = {
    # What the asserts look at is in the key by which a graph was chosen.
    "size_asserts": False,
    # It makes an input of `zeros + input`, whichever code writes to that input later.
    "joint_graph_constant_folding": False,
}
# Nodes of a graph. The C++ wrapper is entered at less cost than the Python one; of a large graph it is one file, on
# which a C++ compiler takes many minutes, and the cost of entering is nothing beside what the graph does.
CPP_WRAPPER_UP_TO = 2000
# In the meta of a graph: it is one of several members.
OF_MEMBERS = "of_members"


@cache
def _has_inductor() -> bool:
    """Whether inductor is there with all that is passed to it."""
    if any(_find(path) is None for path in NAMES if NAMES[path] is _SLOWER):
        return False
    config = import_module("torch._inductor.config")
    absent = [key for key in _SETTINGS if not hasattr(config, key)]
    for key in absent:
        _note(f"torch._inductor.config:{key}", _SLOWER)
    return not absent


def lower(
    graph: GraphModule, examples: list[Tensor], backward: bool | None = None, results: int | None = None
) -> tuple[Call, Sequence[Any] | None]:
    """Machine code of a graph, and the strides of what it gives where they are known.

    Args:
        graph: without operations that write, but for ``copy_`` to its inputs at its end.
        examples: tensors like its inputs, without numbers.
        backward: whether it is the second half of a graph that was cut; None: it is a whole one.
        results: how many of the first outputs lie in memory as the trace says; others as suits the compiler. None: all.

    Raises:
        CompileError: there is no C++ compiler.
    """
    if _has_inductor():
        original = _copied(graph)  # inductor writes to its argument
        try:
            _fix_strides(graph, results)
            result = _by_inductor(graph, examples, backward)
        except (TypeError, AttributeError, ImportError) as error:
            _note(f"torch._inductor.compile_fx:compile_fx_inner as it was ({error})", _SLOWER)
            graph = original
        except Exception as error:
            if not _is_fault_of_fusion(error):
                raise
            logging.getLogger("pure_loop.compile").info("torch's inductor can't fuse a graph that writes: %r", error)
            graph = original
        else:
            return getattr(result, "current_callable", None) or result, getattr(result, "output_strides", None)
    return _ByTorchCompile(graph), None


def _is_fault_of_fusion(error: BaseException) -> bool:
    """Whether inductor (torch 2.13) looked for a read of what is only written after it, where it fuses outer loops."""
    return type(error).__name__ == "InductorError" and isinstance(error.__cause__ or error.__context__, KeyError)


def _fix_strides(graph: GraphModule, count: int | None) -> None:
    """Say in inductor's words which outputs keep their strides: it lays images out with their channels last."""
    output = graph.graph.output_node()
    outputs: Any = output.args[0]
    values = [item.meta["val"] if isinstance(item, Node) else None for item in outputs]
    output.meta["original_output_strides"] = [value.stride() if isinstance(value, Tensor) else None for value in values]
    output.meta["user_visible_output_idxs"] = [
        place for place, value in enumerate(values[:count]) if isinstance(value, Tensor)
    ]


def _by_inductor(graph: GraphModule, examples: list[Tensor], backward: bool | None) -> Any:
    devices = [example.device for example in examples if example.device.type == "cuda"]
    in_cpp = not devices and len(graph.graph.nodes) <= CPP_WRAPPER_UP_TO
    patch = _find("torch._inductor.config:patch")
    # What torch replays itself is overwritten by the next step: see `replay`.
    no = _find("torch._inductor.utils:BoxedBool")(False)
    compile_inner = _find("torch._inductor.compile_fx:compile_fx_inner")
    options = {} if backward is None else {"is_backward": backward}
    # Images of members are convolved in groups; with channels last, what is around these is not vectorised.
    layouts = {"layout_optimization": False} if OF_MEMBERS in graph.meta and not devices else {}
    # On a GPU it multiplies random matrices, to find out how.
    rng = torch.random.fork_rng(sorted(set(devices), key=str)) if devices else nullcontext()
    with _naming_a_missing_compiler(), patch({**_SETTINGS, **layouts}), rng:
        _find("torch._inductor.fx_passes.joint_graph:joint_graph_passes")(graph)
        return compile_inner(graph, examples, is_inference=False, cpp_wrapper=in_cpp, cudagraphs=no, **options)


@contextmanager
def _naming_a_missing_compiler() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and type(cause).__name__ != "InvalidCxxCompiler":
            cause = cause.__cause__
        if cause is None and "InvalidCxxCompiler" not in str(error):
            raise
        raise CompileError(
            "compile= needs a C++ compiler, and torch found none: install g++ (or say which one with the environment "
            "variable CXX), or leave compile out."
        ) from error


def _copied(graph: GraphModule) -> GraphModule:
    copy = Graph()
    copy.output(copy.graph_copy(graph.graph, {}))
    return GraphModule(graph, copy)


class _ByTorchCompile:
    """A graph, compiled by ``torch.compile`` when it is first called.

    That has rules of its own about memory that is written to. So it is given a graph without writes, and what the graph
    would have written is written here.
    """

    def __init__(self, graph: GraphModule) -> None:
        pure, self._written = _without_writes(graph)
        self._compiled = False
        self._run: Callable[..., Sequence[Tensor]] = torch.compile(pure, fullgraph=True, dynamic=False)

    def __call__(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        # Of torch's own class and without autograd, whatever they are: else it would compile for each kind.
        argument = [tensor.detach() for tensor in tensors]
        tensors.clear()
        with torch.no_grad(), _naming_a_missing_compiler(), nullcontext() if self._compiled else _quiet():
            results = self._run(*argument)
        self._compiled = True
        # A compiler may give an input for what is equal to it.
        inputs = {tensor.untyped_storage().data_ptr() for tensor in argument} - {0}
        apart = [
            result.clone() if isinstance(result, Tensor) and result.untyped_storage().data_ptr() in inputs else result
            for result in results
        ]
        count = len(apart) - len(self._written)
        for place, value in zip(self._written, apart[count:], strict=True):
            argument[place].copy_(value)
        return apart[:count]


def _without_writes(graph: GraphModule) -> tuple[GraphModule, list[int]]:
    """The graph with what it writes to its inputs after its outputs; and to which inputs that is."""
    *nodes, output = graph.graph.nodes
    inputs = [node for node in nodes if node.op == "placeholder"]
    writes = [node for node in nodes if node.target is torch.ops.aten.copy_.default and node.args[0] in inputs]
    pure, copies = Graph(), dict[Node, Node]()
    for node in nodes:
        if node not in writes:
            copies[node] = pure.node_copy(node, copies.__getitem__)
    outputs = [*output.args[0], *[node.args[1] for node in writes]]
    pure.output([copies[item] if isinstance(item, Node) else item for item in outputs])
    return GraphModule(graph, pure), [inputs.index(node.args[0]) for node in writes]


def partition(joint: GraphModule, results: int) -> tuple[GraphModule, GraphModule] | None:
    """Cut a graph of forward and backward in two, such that little is kept; None: this torch has no way to.

    Args:
        joint: its inputs are called ``primals_0`` and so on, and after them ``tangents_0`` and so on; it gives the
            results, and after them the gradients.
        results: how many there are.

    Returns:
        The forward, which gives the results, and after them what is kept for the backward; and the backward, with
        inputs that are called as what is kept is.
    """
    min_cut: Function | None = _find(_MIN_CUT)
    if min_cut is not None:
        try:
            halves: tuple[GraphModule, GraphModule] = min_cut(_copied(joint), None, num_fwd_outputs=results)
        except TypeError as error:
            _note(f"{_MIN_CUT} as it was ({error})", NAMES[_MIN_CUT])
        else:
            return halves
    return None


# Recording on a GPU.


def prevents_recording(node: Node) -> bool | None:
    """Whether CUDA can't record an operation of a graph; None: this torch doesn't say."""
    is_unsafe = _find("torch._inductor.utils:is_cudagraph_unsafe_fx_node")
    return None if is_unsafe is None else bool(is_unsafe(node))


# In a torch for CUDA: stops memory of a device from going to a pool.
end_allocating_to_pool: Callable[[int, Any], None] | None = getattr(torch._C, "_cuda_endAllocateToPool", None)
