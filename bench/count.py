"""How many lines of code the core has: ``python -m bench.count`` lists them by file.

A line of code has a token on it that is no comment and no part of a docstring. So empty lines don't count, and a string
of several lines that is no docstring does.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from pathlib import Path

__all__ = ["CORE", "LINES", "count", "lines_of"]

# At most so many. A State says what has happened (70 lines), a script has a step of a part of a model (40), and a graph
# that leads where gradients are lost is refused with the layer, or the batch, that it leads to (25). Where the data
# stands is a value, like the batch (11).
LINES = 5_215

PACKAGE = Path(__file__).parent.parent / "pure_loop"
# Files and folders; one that is not there has no lines.
CORE = (
    *("loop", "stages", "state.py", "frozendict.py"),
    *(f"_internal/{name}.py" for name in ("records", "autograd", "bits", "cloning", "frames")),
    *(f"optim/{name}.py" for name in ("kernels", "_rules", "adam", "sgd", "lamb", "lion", "muon")),
    *(f"optim/{name}.py" for name in ("optimizer", "partition", "master_weights")),
    "model/instance.py",
)

_NO_CODE = frozenset(
    {
        *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
        *(tokenize.ENCODING, tokenize.ENDMARKER),
    }
)


def lines_of(source: str) -> int:
    """How many lines of code a source has."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def count(package: Path = PACKAGE) -> dict[str, int]:
    """The lines of code of each file of the core, by its path in the package."""
    files: list[Path] = []
    for name in CORE:
        path = package / name
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.exists() else []
    return {path.relative_to(package).as_posix(): lines_of(path.read_text()) for path in files}


def main(arguments: list[str] | None = None) -> int:
    """Print the lines by file; 1 where there are more than the limit and ``--check`` is given."""
    parser = argparse.ArgumentParser(prog="python -m bench.count", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help=f"exit with 1 above {LINES:,} lines")
    options = parser.parse_args(arguments)
    found = count()
    for name, lines in found.items():
        print(f"{lines:6,}  {name}")
    total = sum(found.values())
    print(f"{total:6,}  lines of code in {len(found)} files")
    if total > LINES:
        print(f"above the limit: {total:,} lines of code, the limit is {LINES:,}")
    return int(total > LINES and options.check)


if __name__ == "__main__":
    raise SystemExit(main())
