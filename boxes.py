"""Boxed answers: where the last one stands, its one spelling, and when two of them are equal. Pure, stdlib only.

Numbers are compared exactly, all else as cleaned strings; nothing is evaluated. Every step is linear in the text but
the product of two fractions, which is a fast multiplication, so hostile text costs no time.
"""

from __future__ import annotations

import re
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal

_MESSAGE_END = re.compile(r"<\|im_end\|>|<\|endoftext\|>|<\|im_start\|>")
_ASSISTANT = "<|im_start|>assistant"


def last_message(response: str) -> str:
    """The last assistant message of a transcript that begins inside an assistant message."""
    message = response.rpartition(_ASSISTANT)[2]
    end = _MESSAGE_END.search(message)
    return message[: end.start()] if end else message


def after_thinking(message: str) -> str:
    """What is said outside thinking; an end without a beginning closes thinking that the prompt opened."""
    return message.rpartition("</think>")[2].partition("<think>")[0]


_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is matched as a pair, so it does not count


def last_box(text: str) -> int | None:
    """Where the content of the last box begins."""
    begin = None
    for match in _BOX.finditer(text):
        begin = match.end()
    return begin


def closing_brace(text: str, begin: int) -> int | None:
    """Index of the brace that closes the group whose content begins at `begin`."""
    depth = 1
    for match in _BRACE.finditer(text, begin):
        if match[0] == "{":
            depth += 1
        elif match[0] == "}":
            depth -= 1
            if depth == 0:
                return match.start()
    return None


# Spacing that LaTeX sets narrower than a blank. A line break (two backslashes) is matched first, and kept.
_SPACING = re.compile(r"\\\\|\\[,!;:]|~")
_WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{|\\.|[{}]", re.DOTALL)
_EDGE = "$" + "".join(char for char in map(chr, range(0x3001)) if char.isspace())
_PEELS = 4  # layers of dollars, periods and braces around one answer; deeper ones are no answer


def clean(text: str) -> str:
    """One spelling for what a box or a reference may hold: see the comments, in order."""
    text = text.replace("\u2212", "-").replace("{,}", ",").replace("\\$", "$")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = _SPACING.sub(lambda match: match[0] if match[0] == "\\\\" else "", text)
    return " ".join(_peel(_unwrap(text)).split())


def _unwrap(text: str) -> str:
    """Drops `\\text{...}` and its like, keeping what they hold."""
    parts: list[str] = []
    is_wrapper: list[bool] = []  # one entry per open group
    position = 0
    for match in _WRAPPER.finditer(text):
        token = match[0]
        parts.append(text[position : match.start()])
        position = match.end()
        if token.endswith("{") and token != "\\{":
            is_wrapper.append(token != "{")
            dropped = is_wrapper[-1]
        else:
            dropped = token == "}" and bool(is_wrapper) and is_wrapper.pop()
        if not dropped:
            parts.append(token)
    return "".join(parts) + text[position:]


def _peel(text: str) -> str:
    """Drops blanks and dollars at both ends, braces around the whole, and one trailing period."""
    period_left = True
    for _ in range(_PEELS):
        inner = text.strip(_EDGE)
        if period_left and inner.endswith("."):
            inner, period_left = inner[:-1].strip(_EDGE), False
        if inner.startswith("{") and closing_brace(inner, 1) == len(inner) - 1:
            inner = inner[1:-1]
        if inner == text:
            break
        text = inner
    return text


_DIGITS = r"(?:(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_GROUP = rf"(?:\{{\s*([+-]?{_DIGITS})\s*\}}|([0-9]))"
_NUMBER = re.compile(rf"([+-]?)\s*(?:({_DIGITS})(?:\s*/\s*([+-]?{_DIGITS}))?|\\frac\s*{_GROUP}\s*{_GROUP})")
_LOOSE_BLANK = re.compile(r" (?![0-9A-Za-z])|(?<![0-9A-Za-z]) ")
_EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)


def equal(one: str, other: str) -> bool:
    """As numbers where both are, exactly; else as strings, in which blanks count only between letters or digits."""
    first, second = _number(one), _number(other)
    if first is None and second is None:
        return _LOOSE_BLANK.sub("", one) == _LOOSE_BLANK.sub("", other)
    if first is None or second is None:
        return False
    return _EXACT.multiply(first[0], second[1]) == _EXACT.multiply(second[0], first[1])


def _number(text: str) -> tuple[Decimal, Decimal] | None:
    """Numerator and denominator of an integer, decimal or fraction; None for anything else.

    Decimal, not int or Fraction: both read digits in quadratic time, and int refuses more than 4,300 of them.
    """
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    sign, plain, below, *groups = match.groups()
    top, bottom = (plain, below or "1") if plain else (groups[0] or groups[1], groups[2] or groups[3])
    numerator, denominator = (Decimal(part.replace(",", "")) for part in (top, bottom))
    if denominator == 0:
        return None
    return (_EXACT.minus(numerator) if sign == "-" else numerator), denominator


def final_answer(response: str) -> str | None:
    """The cleaned content of the last box outside thinking, of the last assistant message; None without one."""
    said = after_thinking(last_message(response))
    begin = last_box(said)
    end = None if begin is None else closing_brace(said, begin)
    if begin is None or end is None or "<tool_call>" in said:
        return None
    return clean(said[begin:end]) or None
