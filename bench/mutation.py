"""Small mistakes in a source: what a tired programmer might have written instead.

Each mutant replaces one place: a comparison by its neighbour or its opposite, ``and`` by ``or``, a constant by the next
one, ``not x`` by ``x``, a condition by its opposite, a statement by nothing, two arguments by each other, a sum by a
difference, or what is returned by None. Docstrings, annotations, decorators, imports, texts, what is for type checkers
alone and the arguments of errors are left as they are.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

import attrs

__all__ = ["Mutant", "mutants_of"]


@attrs.frozen
class Mutant:
    """One mistake.

    Attributes:
        line: where it is, from 1.
        kind: what kind of mistake.
        before, after: the place, as it was and as it is.
        begin, end: the place, in bytes of the file.
    """

    line: int
    kind: str
    before: str
    after: str
    begin: int
    end: int

    def of(self, source: str) -> str | None:
        """The source with the mistake; None where it is no program then."""
        text = source.encode()
        changed = (text[: self.begin] + self.after.encode() + text[self.end :]).decode()
        try:
            compile(changed, "mutant", "exec")
        except SyntaxError:
            return None
        return changed


_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}
_REMOVED = (ast.Expr, ast.Assign, ast.AugAssign, ast.Delete, ast.Continue, ast.Break)


def mutants_of(source: str) -> list[Mutant]:
    """All mutants of a source, in the order of their places."""
    tree = ast.parse(source)
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    text = source.encode()
    found = []
    for node, kind, after in _changes(tree):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        found.append(Mutant(node.lineno, kind, text[begin:end].decode(), after, begin, end))
    return sorted(found, key=lambda each: (each.begin, each.kind, each.after))


def _changes(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    """The nodes to replace, with what kind of mistake it is, and the text in their place."""
    for node in _code(tree):
        if isinstance(node, ast.stmt):
            yield from _of_statement(node)
        elif isinstance(node, ast.expr):
            for kind, new in _of_expression(node):
                yield node, kind, f"({ast.unparse(new)})"


def _of_statement(node: ast.stmt) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    if isinstance(node, _REMOVED) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield)):
        yield node, "removed statement", "pass"
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield node, "returns None", "return None"
    elif isinstance(node, ast.If | ast.While):
        yield node.test, "opposite condition", f"(not ({ast.unparse(node.test)}))"


def _of_expression(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    new = copy.deepcopy(node)
    if isinstance(new, ast.Compare) and len(new.ops) == 1:
        operator = new.ops[0]
        for other in _COMPARISONS[type(operator)]:
            new.ops = [other()]
            yield "comparison", copy.deepcopy(new)
    elif isinstance(new, ast.BoolOp):
        new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
        yield "and or", new
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not):
        yield "not", new.operand
    elif isinstance(new, ast.IfExp):
        new.body, new.orelse = new.orelse, new.body
        yield "swapped branches", new
    elif isinstance(new, ast.BinOp) and type(new.op) in _OPERATORS:
        new.op = _OPERATORS[type(new.op)]()
        yield "arithmetic", new
    elif isinstance(new, ast.Constant) and isinstance(new.value, bool):
        yield "constant", ast.Constant(not new.value)
    elif isinstance(new, ast.Constant) and isinstance(new.value, int):
        yield "off by one", ast.Constant(new.value + 1)
    elif isinstance(new, ast.Constant) and isinstance(new.value, float):
        yield "constant", ast.Constant(new.value * 2 + 1)
    elif isinstance(new, ast.Call) and len(new.args) > 1 and not any(isinstance(a, ast.Starred) for a in new.args[:2]):
        new.args[0], new.args[1] = new.args[1], new.args[0]
        yield "swapped arguments", new


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that are code: without what no test is to notice."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Raise | ast.Assert | ast.JoinedStr | ast.AnnAssign):
        return
    if isinstance(node, ast.Assign) and "__all__" in ast.unparse(node.targets[0]):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    yield node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        defaults = [each for each in [*node.args.defaults, *node.args.kw_defaults] if each is not None]
        for child in [*defaults, *node.body]:
            yield from _code(child)
        return
    if isinstance(node, ast.ClassDef):
        for child in node.body:
            yield from _code(child)
        return
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("cast", "TypeVar"):
        return
    for child in ast.iter_child_nodes(node):
        yield from _code(child)
