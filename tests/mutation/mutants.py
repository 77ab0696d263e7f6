"""Mutants of a module: its syntax tree with one small change each, as a programmer's slip makes."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

OPPOSITES = (
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
    (ast.Add, ast.Sub),
    (ast.LShift, ast.RShift),
    (ast.BitAnd, ast.BitOr),
    (ast.And, ast.Or),
)
SWAPS: dict[type, type] = {one: other for pair in OPPOSITES for one, other in (pair, pair[::-1])}
SWAPS |= {ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv}
# Messages and types change nothing that a step computes.
LEFT_OUT = (ast.Raise, ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom)
LOGS = {"debug", "info", "warning", "warn", "exception"}


@dataclass(frozen=True)
class Mutant:
    """Describe one change; `apply` makes it in the tree that it was found in."""

    line: int
    before: str
    after: str
    apply: Callable[[], None]


def mutants(tree: ast.Module) -> list[Mutant]:
    """Return every mutant of a module, in the order of the tree."""
    return list(_below(tree))


def mutated(source: str, index: int) -> ast.Module:
    """Return the tree of a module's mutant number `index`."""
    tree = ast.parse(source)
    mutants(tree)[index].apply()
    return ast.fix_missing_locations(tree)


def _below(parent: ast.AST) -> Iterator[Mutant]:
    for field, value in ast.iter_fields(parent):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for place, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(node, ast.AST) or _is_left_out(node):
                continue
            for new in _changed(node):
                ast.copy_location(new, node)
                yield Mutant(
                    getattr(node, "lineno", 0),
                    ast.unparse(node),
                    ast.unparse(new) or "(nothing)",
                    lambda field=field, place=place, new=new: _put(parent, field, place, new),
                )
            yield from _below(node)


def _put(parent: ast.AST, field: str, place: int | None, new: ast.AST) -> None:
    if place is None:
        setattr(parent, field, new)
    else:
        getattr(parent, field)[place] = new


def _is_left_out(node: ast.AST) -> bool:
    if isinstance(node, LEFT_OUT):
        return True
    if isinstance(node, ast.Expr):  # docstrings, logs
        call = node.value
        if isinstance(call, ast.Constant):
            return True
        return isinstance(call, ast.Call) and getattr(call.func, "attr", "") in LOGS
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _changed(node: ast.AST) -> Iterator[ast.AST]:
    new: ast.AST = copy.deepcopy(node)
    if isinstance(new, ast.Compare) and type(new.ops[0]) in SWAPS:
        new.ops[0] = SWAPS[type(new.ops[0])]()
        yield new
    elif isinstance(new, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(new.op) in SWAPS:
        # Types are written "int | None", too.
        if not (isinstance(new.op, ast.BitOr) and "None" in ast.unparse(new)):
            new.op = SWAPS[type(new.op)]()
            yield new
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, (ast.Not, ast.USub)):
        yield new.operand
    elif isinstance(new, ast.Constant):
        if isinstance(new.value, bool):
            yield ast.Constant(not new.value)
        elif isinstance(new.value, (int, float)):
            yield ast.Constant(new.value + 1)
    elif isinstance(new, (ast.If, ast.While, ast.IfExp)):
        if not isinstance(new.test, (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Constant)):
            new.test = ast.UnaryOp(ast.Not(), new.test)
            yield new
    elif isinstance(new, ast.Expr) and isinstance(new.value, ast.Call):
        yield ast.Pass()
    elif isinstance(new, ast.Continue):
        yield ast.Break()
