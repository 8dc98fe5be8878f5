"""The fast text of a script: its own source, with every event that nothing observes left out.

On the way from a script through the driver to the consumer and back, an event costs calls of small Python functions,
and between two kernels each takes a microsecond or two, a hundredth of a small model's step. So a script is rewritten
for the events that are observed in a run: by the consumer (``watch``), an algorithm or a callback. Of
``state = yield Event.X, f(state)`` remains ``state = f(state)`` where X is not observed; else the State is sealed,
passed to algorithms and callbacks, and yielded, in place, without a driver. Between two observed events one draft of a
State is passed on.

The text keeps the file and the line numbers of the script, so tracebacks, debuggers and coverage show the script
itself, and an edit of a script is an edit of its fast text. A script whose source is not at hand has no fast text: the
driver runs it as it is. ``state = yield from script(...)`` becomes the text of that script, where it is one of the same
module that returns at its end only.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any
from weakref import ref

import attrs

from pure_loop.event import Event
from pure_loop.state import (
    POSITIONS,
    at_event,
    at_position,
    draft_class_of,
    fresh_draft_of,
    seal,
    set_event,
    set_position,
)

__all__ = ["Observed", "fast_text"]

_OF_A_MICROBATCH = frozenset(
    {
        *(Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.BEFORE_LOSS),
        *(Event.AFTER_LOSS, Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD),
    }
)
_BEFORE_UPDATE = _OF_A_MICROBATCH | {
    *(Event.BEFORE_DATALOADER, Event.AFTER_DATALOADER, Event.BATCH_START, Event.BEFORE_TRAIN_BATCH),
    Event.AFTER_TRAIN_BATCH,
}
# At which the consumer's frame is inspected in the first batch.
_INSPECTED = frozenset({Event.BATCH_START, Event.BEFORE_FORWARD, Event.AFTER_LOSS, Event.AFTER_BACKWARD})
# Stages that write to a draft, and functions that return a State that nothing else refers to.
_ON_DRAFTS = frozenset({"forward", "loss"})
_OF_UPDATE = frozenset({"buffers", "model"})  # its arguments; others are fields of the State after it
_FRESH = frozenset({"_load", "outside_batch", "with_fields", "replace", "backward", "sync_buffers"})


@attrs.frozen
class Observed:
    """What a run observes: the key of its fast texts.

    Attributes:
        watch: the events that the consumer is given; None: all.
        attached: the events with an algorithm or a callback.
        events: those of the run's order; None: all.
        donating: whether references are counted before memory is written to.
        checking: whether it is checked at first that the loop's body changes no State.
    """

    watch: frozenset[Event] | None
    attached: frozenset[Event]
    events: frozenset[Event] | None = None
    donating: bool = False
    checking: bool = False

    def lists(self, event: Event) -> bool:
        """Whether the run's order has this event."""
        return self.events is None or event in self.events

    def yields(self, event: Event) -> bool:
        """Whether the consumer is given this event."""
        return self.lists(event) and (self.watch is None or event in self.watch)

    def dispatches(self, event: Event) -> bool:
        """Whether an algorithm or a callback is at this event."""
        return self.lists(event) and event in self.attached

    def is_blind_to(self, events: frozenset[Event]) -> bool:
        """Whether none of these events is observed."""
        return not any(self.yields(event) or self.dispatches(event) for event in events)


def fast_text(script: Any, observed: Observed, *, outermost: bool = False) -> Callable[..., Any] | None:
    """The script rewritten for what is observed; takes the script's arguments and ``run``, its driver's record.

    None where there is no source, where the script refers to variables of a function around it, and where it yields
    otherwise than by ``state = yield Event.X, ...``.

    Args:
        script: a generator function.
        observed: what the text is for.
        outermost: whether it calls ``run.close(state)`` in the end, with its last State.
    """
    # Only functions are kept in the cache: a method would keep what it is bound to.
    return _text(script, observed, outermost, _inner_scripts(script)) if _is_script(script) else None


def _inner_scripts(script: Any) -> tuple[Any, ...]:
    """What the names stand for now that a script yields from: they are looked up each time that it runs."""
    return tuple(script.__globals__.get(name) for name in _yielded_from(script))


def _is_script(script: Any) -> bool:
    """Whether this may have a fast text."""
    return type(script) is FunctionType and not script.__closure__ and inspect.isgeneratorfunction(script)


@lru_cache(maxsize=64)
def _yielded_from(script: FunctionType) -> tuple[str, ...]:
    """The names of the functions that a script yields from."""
    function = _parsed(script)
    if function is None:
        return ()
    calls = [node.value for node in ast.walk(function) if isinstance(node, ast.YieldFrom)]
    names = [call.func.id for call in calls if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)]
    return tuple(dict.fromkeys(names))


def _parsed(script: FunctionType) -> ast.FunctionDef | None:
    """The definition of a function, with the line numbers of its file; None where its source is not at hand."""
    source = _source(script)
    function = None if source is None else ast.parse(source).body[0]
    return function if isinstance(function, ast.FunctionDef) else None


@lru_cache(maxsize=64)
def _source(script: FunctionType) -> str | None:
    """The source of a function, after as many empty lines as there are lines before it in its file."""
    try:
        lines, first = inspect.getsourcelines(script)
    except (OSError, TypeError):
        return None
    return "\n" * (first - 1) + textwrap.dedent("".join(lines))


@lru_cache(maxsize=1024)
def _text(script: Any, observed: Observed, outermost: bool, inner: tuple[Any, ...]) -> Callable[..., Any] | None:
    function = _parsed(script)
    if function is None:
        return None
    function.decorator_list = []
    function.args.kwonlyargs.append(ast.arg("run"))
    function.args.kw_defaults.append(None)
    inlined = {name: value for name, value in zip(_yielded_from(script), inner, strict=True) if _is_script(value)}
    try:
        body = _Text(observed, script, function, inlined).block(function.body)
    except _OtherFormError:
        return None
    if outermost:
        noting = [_statement("run.ended_by = error"), ast.Raise()]
        handler = ast.ExceptHandler(ast.Name("BaseException", ast.Load()), "error", noting)
        body = [_statement("run.begin()"), ast.Try(body, [handler], [], [_statement("run.close(state)")])]
    function.body = [_statement("if False: yield"), *body]
    names = {event.name: event for event in Event} | {
        "ref": ref,
        "at_event": at_event,
        "at_position": at_position,
        "fresh_draft_of": fresh_draft_of,
        "draft_class_of": draft_class_of,
        "set_attribute": object.__setattr__,
        "set_event": set_event,
        "set_position": set_position,
        "seal": seal,
    }
    # Names of the text come in as closure variables; all others are looked up in the script's module, when it runs.
    maker = ast.FunctionDef(
        name="make",
        args=ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, []),
        body=[function, ast.Return(ast.Name(function.name, ast.Load()))],
        decorator_list=[],
    )
    module = ast.Module([maker], [])
    _locate(module, function)
    scope: dict[str, Any] = {}
    exec(compile(module, script.__code__.co_filename, "exec"), script.__globals__, scope)
    text: Callable[..., Any] = scope["make"](*names.values())
    return text


class _OtherFormError(Exception):
    """An event is yielded otherwise than by ``state = yield Event.X, ...``."""


def _statement(source: str) -> ast.stmt:
    statement = ast.parse(source).body[0]
    for node in ast.walk(statement):
        for attribute in ("lineno", "col_offset", "end_lineno", "end_col_offset"):
            if hasattr(node, attribute):
                delattr(node, attribute)
    return statement


def _locate(node: Any, parent: ast.AST) -> None:
    """Give nodes that are not from the script the place of what they stand in.

    A statement that has its place is not gone through again with each block that it is in.
    """
    if hasattr(node, "is_located"):
        return
    if "lineno" in node._attributes and not hasattr(node, "lineno"):
        ast.copy_location(node, parent)
    has_place = hasattr(node, "lineno")
    place = node if has_place else parent
    for field in node._fields:
        value = getattr(node, field, None)
        for child in value if isinstance(value, list) else (value,):
            if isinstance(child, ast.AST) and not isinstance(child, ast.expr_context):
                _locate(child, place)
    if has_place and isinstance(node, ast.stmt):
        node.is_located = True  # type: ignore[attr-defined]


class _Text:
    """Rewrites the statements of a script.

    Attributes:
        is_draft: whether ``state`` is a draft here.
        is_fresh: whether ``state`` is known to be referred to by this variable alone.
        was_observed: whether ``state`` is that of an event that was observed.
    """

    def __init__(
        self, observed: Observed, script: FunctionType, function: ast.FunctionDef, inlined: dict[str, FunctionType]
    ) -> None:
        self.observed, self.file, self.inlined = observed, script.__code__.co_filename, inlined
        self.names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)} | _arguments(function)
        # Whether no State with gradients of a batch under way is observed.
        self.unseen = observed.is_blind_to(_BEFORE_UPDATE - {Event.AFTER_TRAIN_BATCH})
        self.out: list[ast.stmt] = []
        self.forget()

    def forget(self) -> None:
        self.is_draft = self.is_fresh = self.was_observed = False

    def block(self, statements: list[ast.stmt], *, known: bool = False) -> list[ast.stmt]:
        """Rewrite a block; ``known``: what holds of ``state`` before it holds where it begins."""
        outer, self.out = self.out, []
        if not known:
            self.forget()
        self.sequence(statements)
        self.freeze()
        inner, self.out = self.out, outer
        return inner or [ast.Pass()]

    def sequence(self, statements: list[ast.stmt]) -> None:
        """Rewrite statements, one after the other; what is written for one has its place in the file."""
        for statement in statements:
            start = len(self.out)
            self.statement(statement)
            for line in self.out[start:]:
                _locate(line, statement)

    def write(self, source: str, place: ast.AST | None = None) -> None:
        statement = _statement(source)
        if place is not None:
            _locate(statement, place)
        self.out.append(statement)

    def freeze(self) -> None:
        if self.is_draft:
            self.write("state.__class__ = state.record_class")
            self.is_draft = False

    def draft(self) -> None:
        if self.is_draft:
            return
        if self.is_fresh:
            self.write("set_attribute(state, '__class__', draft_class_of[state.__class__])")
            self.write("state.event = None")
        else:
            self.write("state = fresh_draft_of(state)")
        self.is_draft, self.is_fresh, self.was_observed = True, True, False

    def statement(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Assign([ast.Name("state")], ast.Yield(ast.Tuple([ast.Attribute(ast.Name("Event"), name), value]))):
                self.event(Event[name], value)
            case ast.Return(ast.Yield(ast.Tuple([ast.Attribute(ast.Name("Event"), name), value]))):
                self.event(Event[name], value)
                self.freeze()
                self.write("return state")
            case ast.Assign([ast.Name("state")], ast.YieldFrom(ast.Call() as call)):
                inner = self.inline(call)
                if inner is None:
                    self.script(statement)
                    self.forget()
                else:
                    self.sequence(inner)
            case ast.Return(ast.YieldFrom(ast.Call())):
                self.script(statement)
            case ast.Assign([ast.Name("state")], value):
                self.assign(value)
            case ast.Return(ast.Call() as call):
                self.freeze()
                if self.unseen and _called(call) == "finish_gradients":
                    call.keywords.append(ast.keyword("alone", ast.Constant(True)))
                self.out.append(statement)
            case ast.If(ast.Constant(condition)):
                self.sequence(statement.body if condition else statement.orelse)
            case ast.If():
                self.freeze()
                before = self.is_fresh, self.was_observed
                ends = [] if statement.orelse else [before]
                for field in ("body", "orelse"):
                    if getattr(statement, field):
                        self.is_fresh, self.was_observed = before
                        setattr(statement, field, self.block(getattr(statement, field), known=True))
                        if not isinstance(getattr(statement, field)[-1], ast.Break | ast.Return | ast.Raise):
                            ends.append((self.is_fresh, self.was_observed))
                self.out.append(statement)
                # What holds at the end of every branch holds after all of them.
                self.is_fresh = all(is_fresh for is_fresh, _ in ends)
                self.was_observed = all(was_observed for _, was_observed in ends)
            case ast.For() | ast.While() | ast.With() | ast.Try():
                self.freeze()
                for field in ("body", "orelse", "finalbody"):
                    if getattr(statement, field, None):
                        setattr(statement, field, self.block(getattr(statement, field)))
                self.out.append(statement)
                self.forget()
            case _:
                nodes = list(ast.walk(statement))
                if any(isinstance(node, ast.Yield) for node in nodes):
                    raise _OtherFormError
                if _use_state(nodes):
                    self.freeze()
                self.out.append(statement)
                if _assign_state(nodes):
                    self.forget()
                    self.is_fresh = _called(getattr(statement, "value", None)) in _FRESH

    def script(self, statement: Any) -> None:
        """``yield from script(...)``: its fast text, or the driver."""
        self.freeze()
        call = statement.value.value
        call.func = ast.Subscript(_expression("run.texts"), call.func, ast.Load())
        call.keywords.append(ast.keyword("run", ast.Name("run", ast.Load())))
        self.out.append(statement)

    def inline(self, call: ast.Call) -> list[ast.stmt] | None:
        """The statements of the script that is called, for the place of the call; None where that can't be.

        It can where the script stands in the same file, takes ``state`` and variables by name, and returns at its end
        only. Its other variables get names of their own; arguments that are left out are constants.
        """
        script = self.inlined.get(call.func.id) if isinstance(call.func, ast.Name) else None
        if script is None or script.__code__.co_filename != self.file or call.keywords:
            return None
        function = _parsed(script)
        if function is None or function.args.kwonlyargs or function.args.vararg or function.args.kwarg:
            return None
        *body, last = function.body
        returns = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
        if returns != [last] or not isinstance(last, ast.Return) or last.value is None:
            return None
        parameters = [argument.arg for argument in function.args.args]
        values: dict[str, ast.expr] = dict(zip(parameters, call.args, strict=False))
        defaults = function.args.defaults
        values |= dict(zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True)) | values
        stored = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and _is_store(node)}
        for name, value in values.items():
            kept = isinstance(value, ast.Name) and (name == "state") == (value.id == "state")
            if not (kept or isinstance(value, ast.Constant)) or (name in stored and name != "state"):
                return None
        if values.keys() != set(parameters):
            return None
        taken = (stored & self.names) - {"state"}
        renamed = {name: ast.Name(f"{function.name}_{name}") for name in taken} | values
        body.append(_to_state(last.value))
        return [_Renaming(renamed).visit(line) for line in body]

    def assign(self, value: ast.expr) -> None:
        """``state = value``."""
        name = _called(value)
        match value:
            case ast.Name("state"):
                return
            case ast.Call(ast.Name("with_fields"), [ast.Name("state")], keywords):
                self.draft()
                self.set_fields(keywords)
                return
            case ast.Call(ast.Attribute(ast.Name("stages"), stage)) if stage in _ON_DRAFTS:
                self.draft()
                self.out.append(ast.Expr(_renamed(value, f"{stage}_into")))
                return
            case ast.Call(ast.Attribute(ast.Name("stages"), "backward")) if self.unseen:
                self.draft()
                call = _renamed(value, "backward_into")
                call.keywords.append(ast.keyword("alone", ast.Constant(True)))
                self.out.append(ast.Expr(call))
                return
            case ast.Call(ast.Attribute(ast.Name("stages"), "finish_gradients")):
                self.freeze()
                if self.unseen:
                    value.keywords.append(ast.keyword("alone", ast.Constant(True)))
                self.out.append(_to_state(value))
                self.is_fresh = False  # it may be the State that it was given
                return
            case ast.Call(ast.Attribute(ast.Name("stages"), "update")):
                self.freeze()
                call = _renamed(value, "update_draft")
                counted = [keyword for keyword in call.keywords if keyword.arg not in _OF_UPDATE]
                call.keywords = [keyword for keyword in call.keywords if keyword.arg in _OF_UPDATE]
                self.out.append(_to_state(call))
                self.is_draft, self.is_fresh, self.was_observed = True, True, False
                self.set_fields(counted)
                return
        self.freeze()
        self.out.append(_to_state(value))
        self.forget()
        self.is_fresh = name in _FRESH

    def set_fields(self, keywords: list[ast.keyword]) -> None:
        for keyword in keywords:
            target = ast.Attribute(ast.Name("state", ast.Load()), str(keyword.arg), ast.Store())
            self.out.append(ast.Assign([target], keyword.value))

    def event(self, event: Event, value: ast.expr) -> None:
        """``state = yield event, value``."""
        self.assign(value)
        observed = self.observed
        if not observed.lists(event):
            return
        yields, dispatches, bounds = observed.yields(event), observed.dispatches(event), event in POSITIONS
        if yields or dispatches or bounds:
            self.seal(event, bounds)
        if dispatches:
            self.write(f"state = run.dispatch({event.name}, state)")
            self.forget()
            self.was_observed = True
        if yields:
            if observed.checking:
                self.write(
                    f"if {event.name} in run.unchecked:\n"
                    f"    run.before_body({event.name}, state)\n"
                    f"    yield {event.name}, state\n"
                    f"    run.after_body({event.name}, state)\n"
                    f"else:\n"
                    f"    yield {event.name}, state"
                )
            else:
                self.write(f"yield {event.name}, state")
            if observed.watch is not None:
                self.write("run.last_yielded = ref(state)")
            if event in (_INSPECTED if observed.watch is None else {Event.BATCH_END}) and observed.donating:
                self.write("if run.calibrating: run.inspect(state)")
        if yields or dispatches:
            self.is_fresh = False
        if observed.donating:
            self.count(event)

    def seal(self, event: Event, bounds: bool) -> None:
        """Give ``state`` this event."""
        name = event.name
        if not self.is_draft and not self.is_fresh:
            # As `seal` does it, without a call.
            copy = f"at_position[state.__class__](state, {name}, {name})" if bounds else None
            copy = copy or f"at_event[state.__class__](state, {name})"
            write = f"set_event(state, {name}); set_position(state, {name})" if bounds else f"set_event(state, {name})"
            if event is Event.AFTER_LOAD:  # whose position may be that of a checkpoint
                self.write(f"state = seal(state, {name})")
            elif self.was_observed:
                self.write(f"state = {copy}")
            else:
                self.write(f"if state.event is None:\n    {write}\nelse:\n    state = {copy}")
        else:
            self.draft()
            self.write(f"state.event = {name}")
            if bounds:
                self.write(f"state.position = {name}")
            self.freeze()
        self.was_observed = True

    def count(self, event: Event) -> None:
        """Count references before memory is written to or freed."""
        observed = self.observed
        if event is Event.AFTER_TRAIN_BATCH:
            self.freeze()
            self.write("if not run.measured: run.measure(state)")
            self.write("run.record_references(ref(state))")
        elif event in (Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD) and not self.unseen:
            self.freeze()
            self.write("if run.large_gradients: run.record_references(ref(state))")
        elif event is Event.BATCH_START and observed.watch is not None and observed.is_blind_to(frozenset({event})):
            unconditional = observed.is_blind_to(_BEFORE_UPDATE)
            self.write("run.free()" if unconditional else "if run.large_gradients: run.free()")


def _expression(source: str) -> ast.expr:
    statement: Any = _statement(source)
    expression: ast.expr = statement.value
    return expression


def _to_state(value: ast.expr) -> ast.stmt:
    return ast.Assign([ast.Name("state", ast.Store())], value)


def _renamed(call: Any, name: str) -> ast.Call:
    return ast.Call(ast.Attribute(call.func.value, name, ast.Load()), list(call.args), list(call.keywords))


def _called(value: Any) -> str | None:
    """The name of the function that an expression calls."""
    if not isinstance(value, ast.Call):
        return None
    return getattr(value.func, "attr", None) or getattr(value.func, "id", None)


def _is_store(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _arguments(function: ast.FunctionDef) -> set[str]:
    return {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}


class _Renaming(ast.NodeTransformer):
    """Puts names and constants in the places of the variables of a script, and settles what is compared to None."""

    def __init__(self, renamed: dict[str, ast.expr]) -> None:
        self.renamed = renamed

    def visit_Name(self, name: ast.Name) -> ast.expr:
        value = self.renamed.get(name.id)
        if isinstance(value, ast.Name):
            return ast.copy_location(ast.Name(value.id, name.ctx), name)
        return name if value is None else ast.copy_location(ast.Constant(value.value), name)  # type: ignore[attr-defined]

    def visit_Compare(self, comparison: ast.Compare) -> ast.expr:
        self.generic_visit(comparison)
        match comparison:
            case ast.Compare(ast.Constant(value), [ast.Is() | ast.IsNot() as operator], [ast.Constant(None)]):
                same = (value is None) == isinstance(operator, ast.Is)
                return ast.copy_location(ast.Constant(same), comparison)
        return comparison


def _assign_state(nodes: list[ast.AST]) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "state" and isinstance(node.ctx, ast.Store) for node in nodes)


def _use_state(nodes: list[ast.AST]) -> bool:
    """Whether ``state`` itself, and not only an attribute that is read of it, is used."""
    read = {id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr != "replace"}
    return any(isinstance(node, ast.Name) and node.id == "state" and id(node) not in read for node in nodes)
