"""The fast text of a script: its own source, with every event that nothing observes left out.

On the way from a script through the driver to the consumer and back, an event costs calls of small Python functions,
and between two kernels each takes a microsecond or two, a hundredth of a small model's step. So a script is rewritten
for the events that are observed in a run: by the consumer (``watch``), an algorithm or a callback. Of
``state = yield Event.X, f(state)`` remains ``state = f(state)`` where X is not observed; else the State is sealed,
attended to and yielded, in place, without a driver. Between two observed events one draft of a State is passed on.

The text keeps the file and the line numbers of the script, so tracebacks, debuggers and coverage show the script
itself, and an edit of a script is an edit of its fast text. A script whose source is not at hand has no fast text: the
driver runs it as it is.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any
from weakref import ref

import attrs

from pure_loop.event import Event
from pure_loop.state import POSITIONS, at_event, draft_class_of, fresh_draft_of, seal

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
_FRESH = frozenset({"_load", "outside_batch", "holding", "replace", "backward", "finish_gradients"})


@attrs.frozen
class Observed:
    """What a run observes: the key of its fast texts.

    Attributes:
        watch: the events that the consumer is given; None: all.
        attached: the events with an algorithm or a callback.
        events: those of the run's order; None: all.
        donating: whether references are counted before memory is written to.
    """

    watch: frozenset[Event] | None
    attached: frozenset[Event]
    events: frozenset[Event] | None = None
    donating: bool = False

    def lists(self, event: Event) -> bool:
        """Whether the run's order has this event."""
        return self.events is None or event in self.events

    def yields(self, event: Event) -> bool:
        """Whether the consumer is given this event."""
        return self.lists(event) and (self.watch is None or event in self.watch)

    def attends(self, event: Event) -> bool:
        """Whether an algorithm or a callback is at this event."""
        return self.lists(event) and event in self.attached

    def is_blind_to(self, events: frozenset[Event]) -> bool:
        """Whether none of these events is observed."""
        return not any(self.yields(event) or self.attends(event) for event in events)


@lru_cache(maxsize=256)
def fast_text(script: Any, observed: Observed, *, outermost: bool = False) -> Callable[..., Any] | None:
    """The script rewritten for what is observed; takes the script's arguments and ``run``, its driver's record.

    None where there is no source, where the script refers to variables of a function around it, and where it yields
    otherwise than by ``state = yield Event.X, ...``.

    Args:
        script: a generator function.
        observed: what the text is for.
        outermost: whether it notes its last State in ``run.last``.
    """
    if type(script) is not FunctionType or script.__closure__ or not inspect.isgeneratorfunction(script):
        return None
    try:
        lines, first = inspect.getsourcelines(script)
    except (OSError, TypeError):
        return None
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef):
        return None
    function.decorator_list = []
    function.args.kwonlyargs.append(ast.arg("run"))
    function.args.kw_defaults.append(None)
    try:
        body = _Text(observed).block(function.body)
    except _OtherFormError:
        return None
    if outermost:
        body = [ast.Try(body, [], [], [_statement("run.last = state")])]
    function.body = [_statement("if False: yield"), *body]
    names = {event.name: event for event in Event} | {
        "getrefcount": sys.getrefcount,
        "ref": ref,
        "at_event": at_event,
        "fresh_draft_of": fresh_draft_of,
        "draft_class_of": draft_class_of,
        "set_attribute": object.__setattr__,
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


def _locate(node: ast.AST, parent: ast.AST) -> None:
    """Give nodes that are not from the script the place of what they stand in."""
    if "lineno" in node._attributes and not hasattr(node, "lineno"):
        ast.copy_location(node, parent)
    place = node if hasattr(node, "lineno") else parent
    for child in ast.iter_child_nodes(node):
        _locate(child, place)


class _Text:
    """Rewrites the statements of a script.

    Attributes:
        is_draft: whether ``state`` is a draft here.
        is_fresh: whether ``state`` is known to be referred to by this variable alone.
        was_observed: whether ``state`` is that of an event that was observed.
    """

    def __init__(self, observed: Observed) -> None:
        self.observed = observed
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
        for statement in statements:
            start = len(self.out)
            self.statement(statement)
            for line in self.out[start:]:
                _locate(line, statement)
        self.freeze()
        inner, self.out = self.out, outer
        return inner or [ast.Pass()]

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
            case ast.Assign([ast.Name("state")], ast.YieldFrom(ast.Call())):
                self.script(statement)
                self.forget()
            case ast.Return(ast.YieldFrom(ast.Call())):
                self.script(statement)
            case ast.Assign([ast.Name("state")], value):
                self.assign(value)
            case ast.Return(ast.Call() as call):
                self.freeze()
                if self.unseen and _called(call) == "finish_gradients":
                    call.keywords.append(ast.keyword("alone", ast.Constant(True)))
                self.out.append(statement)
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
                if any(isinstance(node, ast.Yield) for node in ast.walk(statement)):
                    raise _OtherFormError
                if _uses_state(statement):
                    self.freeze()
                self.out.append(statement)
                if _assigns_state(statement):
                    self.forget()
                    self.is_fresh = _called(getattr(statement, "value", None)) in _FRESH

    def script(self, statement: Any) -> None:
        """``yield from script(...)``: its fast text, or the driver."""
        self.freeze()
        call = statement.value.value
        call.func = ast.Subscript(_expression("run.texts"), call.func, ast.Load())
        call.keywords.append(ast.keyword("run", ast.Name("run", ast.Load())))
        self.out.append(statement)

    def assign(self, value: ast.expr) -> None:
        """``state = value``."""
        name = _called(value)
        match value:
            case ast.Name("state"):
                return
            case ast.Call(ast.Name("holding"), [ast.Name("state")], keywords):
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
        yields, attends, bounds = observed.yields(event), observed.attends(event), event in POSITIONS
        if bounds and not self.is_fresh:
            self.write(f"state = seal(state, {event.name})")
            self.was_observed = True
        elif yields or attends or bounds:
            self.seal(event, bounds)
        if attends:
            self.write(f"state = run.attend({event.name}, state)")
            self.forget()
            self.was_observed = True
        if yields:
            self.write(f"yield {event.name}, state")
            if observed.watch is not None:
                self.write("run.shown = ref(state)")
            if event in (_INSPECTED if observed.watch is None else {Event.BATCH_END}) and observed.donating:
                self.write("if run.unsure: run.inspect(state)")
        if yields or attends:
            self.is_fresh = False
        if observed.donating:
            self.count(event)

    def seal(self, event: Event, bounds: bool) -> None:
        """Give ``state`` this event."""
        if not self.is_draft and not self.is_fresh:
            make = f"at_event[state.__class__](state, {event.name})" if self.was_observed else None
            self.write(f"state = {make or f'seal(state, {event.name})'}")
        else:
            self.draft()
            self.write(f"state.event = {event.name}")
            if bounds:
                self.write(f"state.position = {event.name}")
            self.freeze()
        self.was_observed = True

    def count(self, event: Event) -> None:
        """Count references before memory is written to or freed."""
        observed = self.observed
        if event is Event.AFTER_TRAIN_BATCH:
            self.freeze()
            self.write("if not run.measured: run.measure(state)")
            self.write("run.look(getrefcount(state) - 2, state)")
        elif event in (Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD) and not self.unseen:
            self.freeze()
            self.write("if run.large: run.look(getrefcount(state) - 2, state)")
        elif event is Event.BATCH_START and observed.watch is not None and observed.is_blind_to(frozenset({event})):
            unconditional = observed.is_blind_to(_BEFORE_UPDATE)
            self.write("run.free()" if unconditional else "if run.large: run.free()")


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


def _assigns_state(statement: ast.stmt) -> bool:
    return any(
        isinstance(node, ast.Name) and node.id == "state" and isinstance(node.ctx, ast.Store)
        for node in ast.walk(statement)
    )


def _uses_state(statement: ast.stmt) -> bool:
    """Whether ``state`` itself, and not only an attribute that is read of it, is used."""
    read = {
        id(node.value) for node in ast.walk(statement) if isinstance(node, ast.Attribute) and node.attr != "replace"
    }
    return any(
        isinstance(node, ast.Name) and node.id == "state" and id(node) not in read for node in ast.walk(statement)
    )
