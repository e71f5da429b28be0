"""The teaching filter."""

import pytest

from sandbox.child import imports, program


def _refusal(code: str) -> str:
    refusal = imports.refusal(*program.parse(code, "<python>", False, True))
    assert imports.may_refuse(code) or not refusal  # the short cut changes no answer
    return refusal


@pytest.mark.parametrize(
    "code",
    [
        "from math import sqrt\nfrom collections import Counter, defaultdict as dd\nimport numpy.linalg as la",
        "import numpy as np, sympy\nfrom scipy.optimize import brentq",
        "from __future__ import annotations\nimport sys\nsys.setrecursionlimit(9999)",
        "class A:\n    def __init__(self): self.x = type(self).__name__\nisinstance(A(), A)",
        "print('import os')  # import os",
        "x = eval('1+1')\nimport_os = 3",
        "def f():\n    import itertools\n    return lambda: itertools",
    ],
)
def test_ordinary_programs_pass(code):
    assert _refusal(code) == ""


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import os", "os"),
        ("import math, subprocess", "subprocess"),
        ("from os.path import join", "os.path"),
        ("def f():\n    if 1:\n        import socket as math", "socket"),
        ("__import__('os')", "__import__"),
        ("x = __builtins__", "__builtins__"),
        ("().__class__.__base__.__subclasses__()", "__subclasses__"),
        ("f.__globals__['os']", "__globals__"),
        ("try:\n    1/0\nexcept Exception as e:\n    e.__traceback__.tb_frame", "tb_frame"),
        ("open('x')", "open"),
        ("ｏｐｅｎ('x')", "open"),
    ],
)
def test_a_refusal_names_what_is_not_allowed(code, name):
    assert f"'{name}'" in _refusal(code)


def test_a_refused_import_lists_what_is_allowed():
    assert "allowed: " in _refusal("import os") and "numpy" in _refusal("import os")


def test_a_deep_program_does_not_overflow_the_walk():
    assert _refusal("import math\nx = " + "-" * 80 + "1\ny = " + "[" * 80 + "]" * 80) == ""
