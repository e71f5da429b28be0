"""The teaching filter: refuses imports outside an allowlist and a few escape patterns, on the syntax tree.

It gives the model a fast, clear answer. It is no boundary: Python has many ways round it, and the kernel layers are
what contains a program.
"""

from __future__ import annotations

import _ast
from collections.abc import Iterator

_ALLOWED_WORDS = """
    __future__ abc array base64 bisect calendar cmath collections contextlib copy csv cvxpy dataclasses
    datetime decimal difflib enum fractions functools gmpy2 graphlib hashlib heapq html io itertools json
    keyword math matplotlib more_itertools mpmath networkx numbers numpy operator ortools pandas pprint pulp
    queue random re scipy secrets shapely sklearn sortedcontainers statistics statsmodels string struct sympy
    sys textwrap time timeit traceback types typing unicodedata uuid warnings z3 zlib
"""
ALLOWED = frozenset(_ALLOWED_WORDS.split())
_NAMES = frozenset({"__import__", "__builtins__", "__loader__", "__spec__", "open"})
_ATTRIBUTES = frozenset(
    {"__subclasses__", "__globals__", "__builtins__", "__loader__", "__code__", "tb_frame", "f_back", "f_globals"}
)
# Source without any of these (and pure ASCII: Python folds look-alike letters in names) needs no walk.
_TRIGGERS = ("import", "__", "open", "tb_frame", "f_back", "f_globals")


def may_refuse(text: str) -> bool:
    """Whether the tree has to be looked at; a program without any trigger word is spared the cost of one."""
    return not text.isascii() or any(word in text for word in _TRIGGERS)


def refusal(*trees: object) -> str:
    """Why the program is refused, in words for the model; empty when it is not."""
    for tree in trees:
        for node in _walk(tree) if isinstance(tree, _ast.AST) else ():
            reason = _reason(node)
            if reason:
                return reason
    return ""


def _walk(tree: _ast.AST) -> Iterator[_ast.AST]:
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                todo.extend(item for item in value if isinstance(item, _ast.AST))
            elif isinstance(value, _ast.AST):
                todo.append(value)


def _reason(node: _ast.AST) -> str:
    if isinstance(node, _ast.Import):
        return next((_import(alias.name) for alias in node.names if _import(alias.name)), "")
    if isinstance(node, _ast.ImportFrom):
        return _import(node.module or "") if node.level == 0 else ""
    if isinstance(node, _ast.Name) and node.id in _NAMES:
        return f"use of '{node.id}' is not allowed"
    if isinstance(node, _ast.Attribute) and node.attr in _ATTRIBUTES:
        return f"use of the attribute '{node.attr}' is not allowed"
    return ""


def _import(name: str) -> str:
    if name.partition(".")[0] in ALLOWED:
        return ""
    return f"import of '{name}' is not allowed (allowed: {', '.join(sorted(ALLOWED))})"
