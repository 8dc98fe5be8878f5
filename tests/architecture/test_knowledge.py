"""What a room may know of others: of ranks, of shards, of compiling, and a method of the loop.

Each rule has a table of what is allowed, with a reason. A test fails for what is not in its table, and for what is in
the table and no longer in the package.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.architecture.source import Modules, Place, differences, modules, names_in, walk

# R4. Engines are asked what a computation needs, and not how many ranks they are of, or of which class.

# Where a call of the user's is read, and where engines are.
ASKS_FOR_RANKS = ("distributed/", "entry/")


def asks_for_ranks(modules: Modules) -> set[Place]:
    """Where an engine is asked for the number of its ranks, or for its class: (module, function)."""
    found: set[Place] = set()
    for module, tree in modules.items():
        for name, node in walk(tree):
            of_ranks = isinstance(node, ast.Attribute) and node.attr in ("ranks", "single")
            called = isinstance(node, ast.Call) and ast.unparse(node.func) in ("type", "isinstance")
            asked = ast.unparse(node.value) if of_ranks else ast.unparse(node.args[0]) if called else ""
            if asked.rpartition(".")[2] in ("engine", "_engine"):
                found.add((module, name))
    return found


def test_engines_are_asked() -> None:
    outside = {module: tree for module, tree in modules().items() if not module.startswith(ASKS_FOR_RANKS)}
    assert asks_for_ranks(outside) == set()


_TESTING = "simulated ranks, and programs for them"
# Where torch.distributed is imported besides the engines of several ranks.
IMPORTS_DISTRIBUTED = {
    "_internal/torch_private.py": "names of torch that are private",
    "_internal/tree_ops.py": "operations on tensors that may be sharded",
    "checkpoint/coordination.py": "ranks agree on a checkpoint in a process group of its own",
    "checkpoint/sharded.py": "torch's planners of checkpoints in shards",
    "testing/ranks/_collectives.py": _TESTING,
    "testing/ranks/_group.py": _TESTING,
}
# Where the class of sharded tensors is named, or their shards are looked at.
SHARDED = {
    "_internal/torch_private.py": "names of torch that are private",
    "_internal/tree_ops.py": "operations on tensors that may be sharded",
}
_OF_SHARDS = frozenset({"DTensor", "to_local", "_local_tensor", "placements", "device_mesh"})


def imports_distributed(modules: Modules) -> set[str]:
    """The modules outside ``distributed/`` and ``entry/`` that import torch.distributed, or a module in it."""
    found = set()
    for module, tree in modules.items():
        for _, node in walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            if any(f"{name}.".startswith("torch.distributed.") for name in names):
                found.add(module)
    return {module for module in found if not module.startswith(ASKS_FOR_RANKS)}


def looks_at_shards(modules: Modules) -> set[str]:
    """The modules outside ``distributed/`` that name the class of sharded tensors, or what it has besides tensors."""
    found = {
        module
        for module, tree in modules.items()
        for _, node in walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in _OF_SHARDS)
        or (isinstance(node, ast.Name) and node.id in _OF_SHARDS)
        or (isinstance(node, ast.Constant) and node.value in _OF_SHARDS)
    }
    return {module for module in found if not module.startswith("distributed/")}


def test_ranks_talk_in_one_room() -> None:
    assert differences(imports_distributed(modules()), IMPORTS_DISTRIBUTED) == []


def test_shards_are_known_to_tree_ops() -> None:
    assert differences(looks_at_shards(modules()), SHARDED) == []


# R5. Compiling is imported by its door, and a step doesn't ask whether it is made into a graph: what that needs, the
# compiler hands in as an object that answers.

DOOR = "entry/compiling.py"
# Where such an object may be met, and a tensor without numbers: (module, name).
ANSWERS = {
    ("random/seeds.py", "tracer"): "makes seeds and generators of the numbers of the step",
    ("time.py", "ask"): "a timestamp of the step answers whether something is due",
    ("time.py", "decide"): "a count that is a number of the step has no range to be checked",
    ("ranges/strengths.py", "number_of"): "a timestamp of the step gives the value of a strength",
    ("schedules/_base.py", "number_of"): "a timestamp of the step gives the value of a schedule",
    ("optim/optimizer.py", "rate"): "a timestamp of the step gives the learning rate",
    ("optim/optimizer.py", "as_input"): "a timestamp of the step gives the value of a hyperparameter",
    ("_internal/weights.py", "fake_mode"): "whether a tensor has numbers",
}


# What is asked for wherever it occurs, and what only where an object may not have it.
_ASKS = {"tracer", "fake_mode", "FakeTensor", "FakeTensorMode", "is_compiling", "is_fake", "is_tracing"}
_ANSWERS = {name for _, name in ANSWERS} - _ASKS


def imports_compiling(modules: Modules) -> set[str]:
    """The modules outside of ``compile/`` that import from it, for types, inside of functions and by name, too."""
    return {
        module
        for module, tree in modules.items()
        for _, node in walk(tree)
        if not module.startswith("compile/") and any(map(_is_compiling, _modules_named(node)))
    }


def _is_compiling(name: str) -> bool:
    return f"{name}.".startswith("pure_loop.compile.")


def _modules_named(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names=aliases):
            yield from (alias.name for alias in aliases)
        case ast.ImportFrom(module=module, names=aliases):
            yield from (f"{module}.{alias.name}" for alias in aliases)
        case ast.Constant(value=str(text)):
            yield text


def asks_whether_traced(modules: Modules) -> set[Place]:
    """Where a step asks whether it is made into a graph."""
    outside = {name: tree for name, tree in modules.items() if not name.startswith(("compile/", "entry/"))}
    return names_in(outside, _ASKS) | {
        (module, each.value)
        for module, tree in outside.items()
        for _, node in walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr")
        for each in node.args[1:]
        if isinstance(each, ast.Constant) and each.value in _ANSWERS
    }


def test_compiling_has_one_door() -> None:
    assert imports_compiling(modules()) == {DOOR}


def test_no_step_asks_whether_it_is_traced() -> None:
    assert differences(asks_whether_traced(modules()), ANSWERS) == []


# R6. A method knows values, stages and operations on trees; how a run is driven, compiled or distributed it does not.

BEYOND_METHODS = {"compile", "distributed", "entry", "loop"}
# What files of methods import of these folders, for type checkers too.
METHODS_IMPORT = {("loop.batch", "LoopStages"): "the type of the second argument of a handler"}


def imports_beyond(modules: Modules) -> set[Place]:
    """What algorithms import of the folders that methods do not know: (module, name)."""
    return {
        (node.module.removeprefix("pure_loop."), alias.name)
        for module, tree in modules.items()
        if module.startswith("algorithms/")
        for _, node in walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("pure_loop")
        for alias in node.names
        if not BEYOND_METHODS.isdisjoint([*node.module.split(".")[1:2], alias.name])
    }


def test_algorithms_know_values_stages_and_trees() -> None:
    assert differences(imports_beyond(modules()), METHODS_IMPORT) == []
