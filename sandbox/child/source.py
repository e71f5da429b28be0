"""From the text of a tool call to code objects: fences, byte-order mark, syntax tree, last expression."""

from __future__ import annotations

import _ast
import types
from typing import cast


def unwrap(text: str) -> str:
    """Removes a byte-order mark, and a Markdown fence that is opened on the first line and closed on the last."""
    text = text.removeprefix("\ufeff")
    opening, _, rest = text.strip().partition("\n")
    body, newline, closing = rest.rpartition("\n")
    for mark in "`~":
        fence = mark * (len(opening) - len(opening.lstrip(mark)))
        info = opening[len(fence) :]
        if len(fence) >= 3 and mark not in info and closing.startswith(fence) and not closing.strip(mark + " "):
            return body + newline
    return text


def parse(
    text: str, file: str, show_last: bool, tree: bool
) -> tuple[types.CodeType | _ast.Module, _ast.Expression | None]:
    """(program, last expression or None); the program stays a tree where someone looks at it, else it is code.

    Raises what Python's own compiler raises.
    """
    if not (show_last or tree):
        return compile(text, file, "exec", dont_inherit=True), None
    module = cast(_ast.Module, compile(text, file, "exec", _ast.PyCF_ONLY_AST, dont_inherit=True))
    end = module.body[-1] if show_last and module.body else None
    if not isinstance(end, _ast.Expr):
        return module, None
    del module.body[-1]
    return module, _ast.Expression(end.value)


def finish(program: types.CodeType | _ast.Module | _ast.Expression, file: str, mode: str) -> types.CodeType:
    if isinstance(program, types.CodeType):
        return program
    return compile(program, file, mode, dont_inherit=True)
