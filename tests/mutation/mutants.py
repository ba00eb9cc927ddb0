"""The errors that are put in: one changed operator, constant, keyword, condition or statement in a function's body.

Signatures, annotations, docstrings, decorators and the text of errors are left alone, and so is what stands outside of
functions: the runner replaces the code of functions that exist already.
"""

from __future__ import annotations

import ast
import copy
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDERS = ("numerics.py", "manifolds", "optim", "ops", "layers", "models", "theory")

_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.MatMult: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
_METHODS = {
    "amax": "amin",
    "amin": "amax",
    "maximum": "minimum",
    "minimum": "maximum",
    "max": "min",
    "min": "max",
    "sum": "mean",
    "mean": "sum",
    "sin": "cos",
    "cos": "sin",
    "sinh": "cosh",
    "cosh": "sinh",
    "exp": "expm1",
    "log": "log1p",
    "sqrt": "square",
    "rsqrt": "sqrt",
    "any": "all",
    "all": "any",
    "zeros_like": "ones_like",
    "ones_like": "zeros_like",
    "new_zeros": "new_ones",
    "new_ones": "new_zeros",
}
# On a machine with one device it does not matter where a tensor lies; `zip(strict=True)` is itself a check.
_KEPT_KEYWORDS = {"device", "non_blocking", "pin_memory", "strict"}

Change = Callable[[Any], ast.AST]


@dataclass(frozen=True)
class Mutant:
    """One changed place.

    Attributes:
        path: the file, relative to the repository.
        function: the qualified name of the outermost function around the place.
        start: the first line of that function, decorators included.
        lines: the lines that the changed piece of code spans.
        index: which change of this function it is.
        what: the change in words.
        text: the line of source where the changed piece begins.
        repeated: how many changes of the same words on the same text stand before it in this function.
    """

    path: str
    function: str
    start: int
    lines: tuple[int, int]
    index: int
    what: str
    text: str
    repeated: int

    @property
    def name(self) -> str:
        """Return what identifies the mutant as long as its line stays as it is."""
        again = f" ({self.repeated + 1})" if self.repeated else ""
        return f"{self.path} {self.function}: {self.what}{again}: {self.text}"


def _operators(node: ast.AST) -> Iterator[tuple[str, Change]]:
    """Yield the changes of an arithmetic, comparing or logical operator."""
    if isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(node.op) in _SWAPPED:
        old, new = type(node.op), _SWAPPED[type(node.op)]
        yield f"{old.__name__} -> {new.__name__}", lambda n: _with(n, op=new())
    if isinstance(node, ast.Compare):
        for at, operator in enumerate(node.ops):
            new = _SWAPPED[type(operator)]
            changed = [*node.ops[:at], new(), *node.ops[at + 1 :]]
            yield f"{type(operator).__name__} -> {new.__name__}", lambda n, changed=changed: _with(n, ops=changed)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not, ast.Invert)):
        yield f"{type(node.op).__name__} dropped", lambda n: n.operand


def _values(node: ast.AST) -> Iterator[tuple[str, Change]]:
    """Yield the changes of a constant, a call, a conditional or a slice."""
    if isinstance(node, ast.Constant):
        value = node.value
        if isinstance(value, bool):
            yield f"{value} -> {not value}", lambda n: _with(n, value=not value)
        elif isinstance(value, int):
            yield f"{value} -> {value + 1}", lambda n: _with(n, value=value + 1)
        elif isinstance(value, float):
            other = 2 * value if value else 1.0
            yield f"{value} -> {other}", lambda n: _with(n, value=other)
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
            old, new = node.func.attr, _METHODS[node.func.attr]
            yield f"{old} -> {new}", lambda n: _with(n, func=_with(n.func, attr=new))
        for at, keyword in enumerate(node.keywords):
            if keyword.arg is not None and keyword.arg not in _KEPT_KEYWORDS:
                left = [*node.keywords[:at], *node.keywords[at + 1 :]]
                yield f"{keyword.arg}= dropped", lambda n, left=left: _with(n, keywords=left)
    if isinstance(node, ast.IfExp):
        yield "branches swapped", lambda n: _with(n, body=n.orelse, orelse=n.body)


def _statements(node: ast.AST) -> Iterator[tuple[str, Change]]:
    """Yield the changes of a whole statement."""
    if isinstance(node, ast.If) and not isinstance(node.test, ast.Compare):
        yield "condition negated", lambda n: _with(n, test=ast.UnaryOp(ast.Not(), n.test))
    calls = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if calls or isinstance(node, ast.AugAssign):
        # Never executed, but still read: a function keeps the names that it closes over.
        yield "statement dropped", lambda n: ast.If(ast.Constant(value=False), [n], [])
    if isinstance(node, ast.Break):
        yield "break -> continue", lambda n: ast.Continue()


def _with(node: Any, **fields: Any) -> Any:
    """Return a copy of a node with other fields."""
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


class _Walk(ast.NodeTransformer):
    """Number the changes of one function, and make one of them when asked."""

    def __init__(self, wanted: int | None = None) -> None:
        self.wanted, self.found = wanted, list[tuple[int, int, str]]()

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, (ast.Raise, ast.Assert)) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            return node
        if isinstance(node, ast.JoinedStr):
            return node
        if isinstance(node, ast.FunctionDef):
            node.body = [self.visit(s) for s in node.body]
            return node
        if isinstance(node, ast.Lambda):
            node.body = self.visit(node.body)
            return node
        if isinstance(node, ast.AnnAssign):
            node.value = self.visit(node.value) if node.value is not None else None
            return node
        made = node
        for offered in (_operators, _values, _statements):
            for what, change in offered(node):
                if self.wanted == len(self.found):
                    made = change(node)
                line = getattr(node, "lineno", 0)
                end = line if isinstance(node, ast.If) else getattr(node, "end_lineno", line)
                self.found.append((line, end, what))
        if made is not node:
            # The numbering ends here: nothing below the changed node is looked at.
            return made
        return self.generic_visit(node)


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the outermost functions of a module and the methods of its classes, with their qualified names."""

    def inside(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for statement in body:
            if isinstance(statement, ast.FunctionDef):
                yield prefix + statement.name, statement
            elif isinstance(statement, ast.ClassDef):
                yield from inside(statement.body, f"{prefix}{statement.name}.")

    yield from inside(tree.body, "")


def start_of(function: ast.FunctionDef) -> int:
    """Return the first line of a function, decorators included, as its code object has it."""
    return min([function.lineno, *(d.lineno for d in function.decorator_list)])


def mutants_of(source: str, path: str) -> list[Mutant]:
    """Return every mutant of a source text."""
    found, lines, seen = list[Mutant](), source.splitlines(), Counter[tuple[str, str, str]]()
    for name, function in functions(ast.parse(source)):
        overloaded = any(isinstance(d, ast.Name) and d.id == "overload" for d in function.decorator_list)
        if overloaded:
            continue
        walk = _Walk()
        walk.visit(function)
        for index, (line, end, what) in enumerate(walk.found):
            text = lines[line - 1].strip()
            found.append(Mutant(path, name, start_of(function), (line, end), index, what, text, seen[name, what, text]))
            seen[name, what, text] += 1
    return found


@cache
def _source(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def code_of(mutant: Mutant, *, changed: bool = True) -> CodeType:
    """Return the code of the mutant's outermost function, with its change or, as a control, without."""
    tree = ast.parse(_source(mutant.path))
    for name, function in functions(tree):
        if (name, start_of(function)) == (mutant.function, mutant.start):
            _Walk(mutant.index if changed else None).visit(function)
    ast.fix_missing_locations(tree)
    module = compile(tree, str(ROOT / mutant.path), "exec", dont_inherit=True)
    return next(c for c in _codes(module) if (c.co_qualname, c.co_firstlineno) == (mutant.function, mutant.start))


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code objects inside of another, at any depth."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def files() -> list[str]:
    """Return the library's files that are mutated; kernels for CUDA run in an interpreter here and are left out."""
    found = list[str]()
    for name in FOLDERS:
        place = ROOT / "holonomy" / name
        paths = sorted(place.rglob("*.py")) if place.is_dir() else [place] if place.exists() else []
        found += [str(p.relative_to(ROOT)) for p in paths if "triton" not in p.name]
    return found


def all_mutants() -> list[Mutant]:
    """Return every mutant of the library, in the order of files and lines."""
    return [m for path in files() for m in mutants_of(_source(path), path)]


def lines_at(commit: str) -> set[str]:
    """Return the lines of the library at a commit, without their indentation."""
    command = ["git", "grep", "-h", "", commit, "--", "holonomy/*.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {line.strip() for line in done.stdout.splitlines()}


def on_new_lines(mutants: list[Mutant], before: set[str]) -> list[Mutant]:
    """Return the mutants on lines that stood nowhere before: one that only moved to another file is no new line."""
    return [m for m in mutants if m.text not in before]


def sample(mutants: list[Mutant], size: int, seed: int) -> list[Mutant]:
    """Return ``size`` mutants evenly spread over the list, from an offset given by the seed."""
    step = len(mutants) / min(size, len(mutants))
    offset = (seed * 0.6180339887) % 1.0
    return [mutants[int((i + offset) * step)] for i in range(min(size, len(mutants)))]
