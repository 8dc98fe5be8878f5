"""Each rule of this folder finds what breaks it, and not what only looks like it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection
from typing import Any

import pytest

from tests.architecture import test_knowledge as knowledge
from tests.architecture import test_rules as rules
from tests.architecture.source import Modules, differences

Rows = list[tuple[str, bool]]

# In a module that no rule allows: a source, and whether the rule finds something in it.
ROWS: dict[Callable[[Modules], Collection[Any]], Rows] = {
    rules.yields_events: [
        ("def script(state):\n    state = yield Event.BATCH_START, state", True),
        ("def script(state):\n    return (yield pl.Event.BATCH_START, state)", True),
        ("def run(self):\n    yield Event.BATCH_END if self.last else Event.EPOCH_END, self.state", True),
        (
            '"""state = yield Event.INIT, state"""\ndef f():\n    yield event, state\n    take(Event.INIT)\n    yield',
            False,
        ),
    ],
    rules.sends: [
        ("script.send(state)", True),
        ("advance = script.send", True),
        ("getattr(script, 'send')(state)", True),
        ("sent(state)", False),
    ],
    rules.drives: [
        ("def go(script):\n    return seal(script.send(state), event)", True),
        ("def go(script):\n    return keep(script.send(state), event)", False),
    ],
    rules.sets_class: [
        ("state.__class__ = Draft", True),
        ("state.__class__, other = Draft, 1", True),
        ("set_class(state, Draft)", True),
        ("setattr(state, '__class__', Draft)", True),
        ("object.__setattr__(state, '__class__', Draft)", True),
        ("write('state.__class__ = Draft')", True),
        ("write(\"set_attribute(state, '__class__', Draft)\")", True),
        ("state.__class__ is Draft", False),
        ("getattr(state, '__class__')", False),
        ("write('state.__class__ == Draft')", False),
    ],
    rules.slots_of_mappings: [
        ("class Leaves(FrozenDict[str, Tensor]):\n    __slots__ = (*('a', 'b'), 'hidden')", True),
        ("class Leaves(dict):\n    __slots__ = ('hidden',)", False),
    ],
    rules.mutable: [
        ("X = {}\ndef function(key):\n    X[key] = 1", True),
        ("X: dict[str, int] = {}\ndef function(key):\n    del X[key]", True),
        ("X = set()\nclass Class:\n    def method(self):\n        X.add(self)", True),
        ("X = []\ndef function():\n    X[0] += 1", True),
        ("X = local()\ndef function():\n    X.value = 1", True),
        ("class X:\n    known = None\ndef function():\n    X.known = 1", True),
        ("X = 1\ndef function():\n    global X\n    X = 2", True),
        ("if there:\n    X = {}\ndef function():\n    return lambda key: X.setdefault(key, 1)", True),
        ("X = {}\ndef function(X):\n    X[1] = 1", False),
        ("X = {}\ndef function():\n    X = {}\n    X[1] = 1", False),
        ("X = {}\nX[1] = 1\ndef function():\n    return X[1], X.get(2)", False),
    ],
    rules.looks: [
        ("from sys import _getframe", True),
        ("import sys\nsys._getframe(1)", True),
        ("getattr(sys, 'getrefcount', None)", True),
        ("frame.f_locals['x']", True),
        ("inspect.currentframe()", True),
        ("import dis", True),
        ("from opcode import opmap", True),
        ("function.__code__.co_code", True),
        (
            '"""Not by sys._getframe."""\nfrom tensor import distribute\nfrom .dis import f\nsay("f_locals of it")',
            False,
        ),
    ],
    rules.reads_addresses: [
        ("import ctypes", True),
        ("from ctypes import addressof", True),
        ("def f():\n    import ctypes.util", True),
    ],
    knowledge.asks_for_ranks: [
        ("stages.engine.ranks > 1", True),
        ("self._engine.ranks", True),
        ("type(engine) is Engine", True),
        ("isinstance(stages.engine, Engine)", True),
        ("stages.engine.exchanges", False),
    ],
    knowledge.imports_distributed: [
        ("import torch.distributed as dist", True),
        ("from torch.distributed import ReduceOp", True),
        ("def log():\n    from torch import distributed", True),
    ],
    knowledge.looks_at_shards: [
        ("isinstance(tensor, DTensor)", True),
        ("tensor.to_local()", True),
        ("hasattr(tensor, 'to_local')", True),
        ("tensor.placements", True),
    ],
    knowledge.imports_compiling: [
        ("from pure_loop.compile import interpreted", True),
        ("def f():\n    import pure_loop.compile.tracing", True),
        ("from pure_loop import compile", True),
        ("load('pure_loop.compile._torch')", True),
        ("if TYPE_CHECKING:\n    from pure_loop.compile.compiler import Compiler", True),
    ],
    knowledge.asks_whether_traced: [
        ("from pure_loop.random.seeds import tracer", True),
        ("torch.compiler.is_compiling()", True),
        ("hasattr(tensor, 'fake_mode')", True),
        ("getattr(now, 'ask', None)", True),
    ],
    knowledge.imports_beyond: [
        ("from pure_loop.distributed.parallel import rank", True),
        ("if TYPE_CHECKING:\n    from pure_loop.loop.training import Fit", True),
        ("def f():\n    from pure_loop import compile", True),
    ],
}

# Where a rule allows it.
HOME = {
    knowledge.imports_distributed: "distributed/shard.py",
    knowledge.looks_at_shards: "distributed/shard.py",
    knowledge.imports_compiling: "compile/tracing.py",
    knowledge.asks_whether_traced: "compile/tracing.py",
    knowledge.imports_beyond: "tools/profile.py",
}


@pytest.mark.parametrize("find", ROWS, ids=lambda find: find.__name__)
def test_a_rule_finds_what_breaks_it(find: Callable[[Modules], Collection[Any]]) -> None:
    module = "algorithms/wrong.py" if find is knowledge.imports_beyond else "wrong.py"
    assert [source for source, wrong in ROWS[find] if bool(find({module: ast.parse(source)})) != wrong] == []
    if find in HOME:
        assert not any(find({HOME[find]: ast.parse(source)}) for source, _ in ROWS[find])


def test_what_is_new_and_what_is_gone_is_named() -> None:
    assert differences({("a", "b")}, {("a", "c"): "a reason"}) == ["new: ('a', 'b')", "gone: ('a', 'c')"]
    assert rules.sends({"m.py": ast.parse("class Run:\n    def go(self):\n        script.send(1)")}) == {
        ("m.py", "Run.go", "script")
    }
