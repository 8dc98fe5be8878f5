"""The rules of the core: where events are yielded, where anything is mutable, and where Python's frames are looked at.

Each rule has a table of what is allowed, with a reason. A test fails for what is not in its table, and for what is in
the table and no longer in the package.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from tests.architecture.source import Modules, Place, differences, modules, names_in, walk

# R1. Events of training are yielded by scripts alone, and one function drives them.

SCRIPTS = {
    "loop/batch.py": "the script of a batch's gradient",
    "loop/training.py": "the script of training",
    "loop/evaluation.py": "the scripts of evaluation and prediction",
    "loop/driver.py": "an update that writes nothing: what is counted where nothing is kept",
    "loop/order_2021.py": "the script of training in the order of older documents",
    "verify/verify.py": "the end of a batch that is computed twice",
    "compile/compiler.py": "a batch of which parts are graphs",
    "compile/member_steps.py": "a batch of all members as one graph",
    "entry/members.py": "a batch of members, one after the other",
    "testing/wrong_loops.py": "loops that the laws must refuse",
}

# Who refers to a method ``send``: (module, function, what is sent to).
SENDS = {
    ("loop/driver.py", "drive", "script"): "the driver",
    ("verify/verify.py", "Verified._noted", "script"): "a batch that is recorded; passes on, and seals nothing",
    ("entry/deterministic.py", "_Switching.send", "self._pairs"): "the stream of a run in torch's deterministic mode",
    ("entry/drive.py", "_with_memory", "script"): "a user's script, before the driver; passes on, and seals nothing",
    (
        "tools/profile_report.py",
        "Recorder.timed_script.called",
        "pairs",
    ): "a script that is timed; passes on, and seals nothing",
    ("testing/ranks/_group.py", "", "'send'"): "no script: the name of a collective",
    ("testing/ranks/processes.py", "_Rank.__init__", "self"): "no script: messages between processes",
    ("testing/ranks/processes.py", "_Team._ask", "rank"): "no script: messages between processes",
}

# Who sends to a script, and seals what it yields, or passes it to who is attached: (module, function).
DRIVERS = {
    ("loop/driver.py", "drive"): "the driver",
}

# R2. What changes is a record under way, or the workspace.

# Who sets the class of an object, or calls `set_class`: (module, function). Algorithms do, in a copy of a module.
SETS_CLASS = {
    ("_internal/records.py", "copier"): "a draft of a record becomes one",
    ("_internal/records.py", "set_class"): "for all others",
    ("stages/workspace.py", "_overwritten"): "a mapping to whose tensors a step has written refuses to be read",
    ("_internal/lazy.py", "lazily"): "a package whose modules are imported at the first access",
    ("model/model.py", "_rebuilt"): "a module that was pickled; its parameters are of a subclass",
    ("model/tree.py", "own_classes"): "a copy of a module: parametrized layers",
    ("tools/profile.py", "_time"): "the stages of a run that is profiled",
}

# What mappings carry besides their items: (module, class), and each slot with a reason.
SLOTS = {
    ("frozendict.py", "FrozenDict"): {
        "__weakref__": "who owns a mapping is forgotten with it",
        "field": "which field of a State it is, for the error about a name that is not there",
        "frozen": "of leaves of autograd: those that need no gradient",
        "holder": "of leaves of autograd: the module instance that a graph goes through",
        "lent": "whether code outside of the loop has read the mapping",
        "readers": "who is reading it now in other threads",
        "origin": "of leaves of autograd, which have to be mappings as any other to a pytree: the parameters",
    },
    ("frozendict.py", "Overwritten"): {},
    ("compile/trees.py", "LazyField"): {},
    ("distributed/parameters.py", "LazyLeaves"): {
        "_make": "from a name to the tensor that is shown",
        "_after": "the same after the backward",
        "buffers": "those that the forward went through",
        "index": "the number of the microbatch",
        "last": "whether no other microbatch follows",
        "seen": "the tensors that were accessed",
    },
}

_CACHE = "a cache: a tensor takes longer to make than to look up"
_STREAMS = "how this process and the other ranks have met"
# Variables of modules that functions of the module change, or set: (module, variable). Functions that remember what
# they gave, by functools.cache, say so where they are defined.
MUTABLE = {
    ("stages/nonfinite.py", "_ones"): _CACHE,
    ("random/numpy_state.py", "_spare"): "a cache: bit generators that are lent",
    ("stages/ownership.py", "Ownership"): "what is counted of a State that nothing keeps, on this interpreter",
    ("_internal/frames.py", "_plans"): "a cache: what code does with what it is given",
    ("_internal/frames.py", "_LOOKED_THROUGH"): "code of ours that passes on what it is given",
    ("entry/record.py", "_names"): "names of runs that began in the last second, so that no two are equal",
    ("checkpoint/digests.py", "_known"): "a cache: digests of frozen tensors",
    ("_internal/processes.py", "_computing"): "streams that are open, and which data this rank has in them",
    ("distributed/meshes.py", "_meshes"): "a cache: meshes of the default process group",
    ("testing/ranks/processes.py", "_shared"): "a cache: processes that serve as ranks",
    ("_internal/torch_private.py", "missing"): "names that this torch lacks, of those looked up so far",
    ("compile/_torch.py", "missing"): "names that this torch lacks, of those looked up so far",
    ("_internal/registry.py", "_by_class"): "classes that checkpoints may hold",
    ("_internal/registry.py", "_by_name"): "classes that checkpoints may hold",
    ("_internal/registry.py", "_roots"): "classes that checkpoints may hold",
    ("entry/hypothesis.py", "_told"): "classes that Hypothesis was told about",
    ("progress/display.py", "_hinted"): "whether the hint was shown in this process",
    ("_internal/processes.py", "_generation"): "how often this process was forked",
    ("_internal/processes.py", "_forgetting"): "who is told of a fork",
    ("_internal/owned_files.py", "_held"): "the locks that this process holds",
    ("_internal/owned_files.py", "_turn"): "the lock of its threads, a new one in a fork",
    ("data/tokens.py", "_registered"): "classes of streams that were registered with their way to resume",
    ("data/passes.py", "_iterators"): "iterators whose workers are of this process",
    ("data/passes.py", "_inherited"): "iterators whose workers are of its parent",
    ("loop/stream.py", "_open"): "streams that have not ended",
    ("loop/stream.py", "_waiting"): "streams that nothing has iterated over",
    ("algorithms/alibi.py", "_active"): "the mode of a thread",
    ("compile/compilations.py", "_listening"): "who is told of what is compiled",
    ("checkpoint/signals.py", "_DEFERRING"): "who defers signals of this process",
    ("checkpoint/signals.py", "_LISTENING"): "who is told of signals of this process",
    ("checkpoint/signals.py", "_child_handler"): "the handler of SIGCHLD that was there before",
    ("distributed/_rendezvous.py", "_fell"): _STREAMS,
    ("distributed/_rendezvous.py", "_group"): _STREAMS,
    ("distributed/_rendezvous.py", "_left"): _STREAMS,
    ("distributed/_rendezvous.py", "_opened"): _STREAMS,
    ("distributed/_rendezvous.py", "_unread"): _STREAMS,
    ("_internal/tree_ops.py", "_meetings"): _STREAMS,
}

# R3. Frames, counts of references and bytecode are looked at in one module; the memory of a process in none.

# The one file whose business frames are, and what else reads bytecode: (module, name).
FRAMES = {
    **{("_internal/frames.py", name): "the functions that others call" for name in ("_getframe", "f_locals", "dis")},
    ("_internal/frames.py", "getrefcount"): "whether a State is kept",
    ("data/changes.py", "dis"): "which variables the functions of a user's dataset change",
}
CTYPES = {
    "_internal/torch_private.py": "the bytes of a tensor without numpy",
}

# R1


def _is_event(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("Event", "pl.Event")


def yields_events(modules: Modules) -> set[str]:
    """The modules in which an event that is named is yielded."""
    return {
        module
        for module, tree in modules.items()
        for _, node in walk(tree)
        if isinstance(node, ast.Yield) and node.value is not None and any(map(_is_event, ast.walk(node.value)))
    }


def sends(modules: Modules) -> set[Place]:
    """Who refers to a method ``send``, whether it is called there or kept for later."""
    found: set[Place] = set()
    for module, tree in modules.items():
        for name, node in walk(tree):
            if isinstance(node, ast.Attribute) and node.attr == "send":
                found.add((module, name, ast.unparse(node.value)))
            elif isinstance(node, ast.Call) and any(_is_constant(each, "send") for each in node.args):
                found.add((module, name, ast.unparse(node.args[0])))
    return found


def _is_constant(node: ast.AST, value: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == value


_SEALS = {"seal", "at_event", "at_position", "check_returned", "apply", "dispatch"}


def drives(modules: Modules) -> set[Place]:
    """The functions that send to something, and seal a State or pass it on to who is attached."""
    sending = {place[:2] for place in sends(modules)}
    sealing = set()
    for module, tree in modules.items():
        for name, node in walk(tree):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
                if called in _SEALS:
                    sealing.add((module, name))
    return sending & sealing


def test_events_are_yielded_by_scripts_alone() -> None:
    assert differences(yields_events(modules()), SCRIPTS) == []


def test_one_function_drives_scripts() -> None:
    assert differences(sends(modules()), SENDS) == []
    assert differences(drives(modules()), DRIVERS) == []


# R2


def sets_class(modules: Modules) -> set[Place]:
    """Who assigns to ``__class__``, also by a function that is given its name, and in the text of code."""
    found: set[Place] = set()
    for module, tree in modules.items():
        for name, node in walk(tree):
            stored = isinstance(node, ast.Attribute) and node.attr == "__class__" and isinstance(node.ctx, ast.Store)
            named = isinstance(node, ast.Call) and any(_is_constant(each, "__class__") for each in node.args[1:])
            text = isinstance(node, ast.Constant) and isinstance(node.value, str) and _assigns_class(node.value)
            called = isinstance(node, ast.Call) and ast.unparse(node.func) == "set_class"
            called = called and not module.startswith("algorithms/")
            if stored or called or (named and not _only_reads(node)) or text:
                found.add((module, name))
    return found


def _only_reads(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("getattr", "hasattr")


def _assigns_class(text: str) -> bool:
    _, found, after = text.partition("__class__")
    after = after.lstrip("'\" ")
    return bool(found) and (after.startswith(",") or (after.startswith("=") and not after.startswith("==")))


def slots_of_mappings(modules: Modules) -> dict[Place, frozenset[str]]:
    """The slots of FrozenDict and of the classes that derive from it."""
    found: dict[Place, frozenset[str]] = {}
    mappings = {"FrozenDict"}
    classes = [(module, name, node) for module, tree in modules.items() for name, node in _classes(tree)]
    for _ in range(3):  # as deep as classes derive from each other
        for module, name, node in classes:
            bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
            if node.name == "FrozenDict" or not mappings.isdisjoint(bases):
                mappings.add(node.name)
                slots: set[str] = set()
                for each in node.body:
                    if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "__slots__":
                        slots |= {str(item.value) for item in ast.walk(each.value) if isinstance(item, ast.Constant)}
                found[module, f"{name}.{node.name}".lstrip(".")] = frozenset(slots)
    return found


def _classes(tree: ast.Module) -> Iterator[tuple[str, ast.ClassDef]]:
    return ((name, node) for name, node in walk(tree) if isinstance(node, ast.ClassDef))


_CHANGES = {
    *("append", "appendleft", "extend", "extendleft", "insert", "remove", "pop", "popleft", "popitem", "clear", "sort"),
    *("add", "discard", "update", "setdefault", "difference_update", "intersection_update", "reverse", "__setitem__"),
}


def _names_of(targets: Collection[ast.expr]) -> set[str]:
    """The variables that are assigned by these targets."""
    return {
        node.id
        for target in targets
        for node in ast.walk(target)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _assigned(body: Collection[ast.stmt]) -> set[str]:
    """The variables that the statements of a module assign, in branches too."""
    found: set[str] = set()
    for statement in body:
        if isinstance(statement, ast.Assign):
            found |= _names_of(statement.targets)
        elif isinstance(statement, ast.AnnAssign):
            found |= _names_of([statement.target])
        elif isinstance(statement, ast.If | ast.Try | ast.With):
            for field in ("body", "orelse", "finalbody"):
                found |= _assigned(getattr(statement, field, []))
    return found


def mutable(modules: Modules) -> set[Place]:
    """The variables of modules that a function declares as global, or whose value a function of the module changes."""
    found: set[Place] = set()
    for module, tree in modules.items():
        variables = _assigned(tree.body)
        classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        for function in (node for _, node in walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            declared = {name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names}
            own = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
            own |= {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and _stores(node)}
            seen = (variables | classes) - (own - declared)
            changed = {name for node in ast.walk(function) for name in _changed(node) if name in seen}
            found |= {(module, name) for name in declared | changed}
    return found


def _stores(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def _changed(node: ast.AST) -> Iterator[str]:
    """The variable whose value a node changes: an item, an attribute, or by a method."""
    changed: ast.AST | None = None
    if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
        changed = node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
        changed = node.func.value
    if isinstance(changed, ast.Name):
        yield changed.id


def test_the_class_of_an_object_is_set_where_records_are_made() -> None:
    assert differences(sets_class(modules()), SETS_CLASS) == []


def test_mappings_carry_nothing_hidden() -> None:
    assert slots_of_mappings(modules()) == {place: frozenset(slots) for place, slots in SLOTS.items()}


def test_modules_have_no_state() -> None:
    assert differences(mutable(modules()), MUTABLE) == []


# R3

LOOKS = frozenset({"_getframe", "getrefcount", "f_locals", "currentframe", "dis", "opcode", "co_code"})


def looks(modules: Modules) -> set[Place]:
    """Where frames, counts of references or bytecode are looked at: (module, name)."""
    return names_in(modules, LOOKS)


def reads_addresses(modules: Modules) -> set[str]:
    """The modules that read memory by its address."""
    return {module for module, _ in names_in(modules, {"ctypes"})}


def test_one_module_looks_at_frames_counts_and_bytecode() -> None:
    assert differences(looks(modules()), FRAMES) == []


def test_no_module_reads_memory_by_its_address() -> None:
    assert differences(reads_addresses(modules()), CTYPES) == []
