"""From a tool call's text to code."""

import pytest

from sandbox.child import program


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("print(1)", "print(1)"),
        ("```python\nprint(6*7)\n```", "print(6*7)\n"),
        ("  ```py\r\nprint(6*7)\r\n```  \r\n", "print(6*7)\r\n"),
        ("```\nprint(1)\n```", "print(1)\n"),
        ("\ufeffprint(1)", "print(1)"),
        ("\ufeff```python\nprint(1)\n```", "print(1)\n"),
        ('```python\ns = "```python\\nx\\n```"\nprint(s)\n```', 's = "```python\\nx\\n```"\nprint(s)\n'),
        ("```python\n```", ""),
        ("````python\ns = 1\n```\n````", "s = 1\n```\n"),
        ("~~~\nprint(1)\n~~~", "print(1)\n"),
        ("```Python 3\nprint(1)\n````", "print(1)\n"),
    ],
)
def test_a_fence_round_all_the_code_goes(text, code):
    assert program.unwrap(text) == code


@pytest.mark.parametrize(
    "text", ["```python\nprint(1)\n", "```python\na\n```\nthen\n```python\nb", "x = '''\n```\n'''"]
)
def test_anything_else_is_left_as_it_is(text):
    assert program.unwrap(text) == text


def test_only_a_last_expression_is_split_off():
    assert program.parse("x = 1\nx", "<python>", True, False)[1] is not None
    for code in ("x = 1", "", "if 1:\n    2", "def f():\n    1"):
        assert program.parse(code, "<python>", True, False)[1] is None
    assert program.parse("x = 1\nx", "<python>", False, False)[1] is None


def test_what_does_not_compile_raises_pythons_own_error():
    with pytest.raises(SyntaxError) as caught:
        program.parse("x = = 2", "<python>", False, True)
    assert caught.value.filename == "<python>" and caught.value.lineno == 1
