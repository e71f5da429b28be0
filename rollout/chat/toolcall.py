"""Tool calls in the text of one assistant turn, in the Qwen3 (Hermes) markup: `<tool_call>` JSON `</tool_call>`.

Invariants: whatever the text, `parse_calls` returns, in time that grows with its length (nothing is scanned once a
call); calls and errors keep their order, so that each gets its own answer in that order; nothing inside thinking is a
call; what cannot be read with certainty is an error that the model is shown, never a guess that runs. Tags are read
where they structure the text, not inside a JSON string: code may print `</think>` or `</tool_call>`.

Left out: other dialects (their markup inside the tags is an error) and a limit on the number of calls, which
`rollout.max_new_tokens` bounds. Standard library only.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


class CallErrorCode(StrEnum):
    """Why a call was not run. Closed; the step metrics count all of them as `bad_call`."""

    MALFORMED_JSON = "malformed_json"  # not exactly one JSON value between the tags
    NOT_AN_OBJECT = "not_an_object"  # JSON, but no object
    MISSING_NAME = "missing_name"  # no "name", or none that is a non-empty string
    UNKNOWN_TOOL = "unknown_tool"
    MISSING_ARGUMENTS = "missing_arguments"  # no "arguments" key
    BAD_ARGUMENTS = "bad_arguments"  # arguments do not fit the tool's schema
    UNCLOSED = "unclosed"  # the end tag never came


@dataclass(frozen=True, slots=True)
class Call:
    """One call that may run: a known tool, arguments that fit its schema."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CallError:
    """One call that must not run; `str()` of it is the text that the model is shown in its place."""

    code: CallErrorCode
    message: str

    def __str__(self) -> str:
        return f"{self.code.value}: {self.message}"


@dataclass(frozen=True, slots=True)
class Parsed:
    """Calls and errors of one turn in the order in which they were written; each needs one result."""

    items: tuple[Call | CallError, ...]

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(item for item in self.items if isinstance(item, Call))

    @property
    def errors(self) -> tuple[CallError, ...]:
        return tuple(item for item in self.items if isinstance(item, CallError))


class ToolSchemas:
    """What a call is checked against: each tool's name, required fields and the JSON type of each field.

    tools: function schemas in the OpenAI form, as the chat template takes them.
    named: whether a call's JSON holds the tool's name (Hermes) or its arguments alone (harmony), for the hint
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]], named: bool = True):
        self._parameters = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        self.names = tuple(self._parameters)
        self._named = named
        self.hint = self.hint_of(self.names[0]) if self.names else "; this turn may call no tool"

    def hint_of(self, name: str) -> str:
        """How a call of a known tool is written."""
        arguments = dict.fromkeys(self._parameters[name].get("required", ()), "...")
        return f"; write {json.dumps({'name': name, 'arguments': arguments} if self._named else arguments)}"

    def example(self, name: str) -> dict[str, Any]:
        """Arguments that fit a known tool's schema."""
        fields = self._parameters[name].get("properties", {})
        return {field: _example(fields.get(field, {})) for field in self._parameters[name].get("required", ())}

    def only_field(self, name: str) -> str | None:
        """The one string that a known tool takes, or None where it takes more or something else."""
        fields = self._parameters[name].get("properties", {})
        return next((f for f, field in fields.items() if len(fields) == 1 and field.get("type") == "string"), None)

    def bad_argument(self, name: str, arguments: dict[str, Any]) -> str | None:
        """What is wrong with the arguments of a known tool, or None."""
        parameters = self._parameters[name]
        for field in parameters.get("required", ()):
            if field not in arguments:
                return f'"{field}" is required'
        for field, value in arguments.items():
            problem = _misfit(value, parameters.get("properties", {}).get(field, {}))
            if problem:
                return f'"{_short(field)}" must be {problem}'
        if _holds_lone_surrogate(arguments):
            return "half of a surrogate pair is no character"
        return None


_JSON_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict,
}  # fmt: skip


def _misfit(value: Any, field: Any) -> str | None:
    """What a value must be by the type and the choices of its field; None where it is. Deeper schemas: the tool's."""
    if not isinstance(field, dict) or (value is None and field.get("nullable")):
        return None
    wanted = field.get("type")
    names = [wanted] if isinstance(wanted, str) else [name for name in wanted or () if isinstance(name, str)]
    if names and not any(_has_type(value, name) for name in names):
        return f"of type {' or '.join(names)}"
    choices = field.get("enum")
    if isinstance(choices, list) and value not in choices:
        return f"one of {json.dumps(choices)}"
    return None


def _has_type(value: Any, wanted: str) -> bool:
    if wanted == "null":
        return value is None
    expected = _JSON_TYPES.get(wanted, object)
    return isinstance(value, expected) and (wanted == "boolean" or expected is object or not isinstance(value, bool))


def _example(field: Any) -> Any:
    """A value of a field's type."""
    field = field if isinstance(field, dict) else {}
    wanted = field.get("type", "string")
    first = wanted if isinstance(wanted, str) else next(iter(wanted), "string")
    made: dict[str, Any] = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}, "null": None}
    return field["enum"][0] if field.get("enum") else made.get(first, "probe")


def _holds_lone_surrogate(value: Any) -> bool:
    """Whether some string inside a JSON value cannot be encoded: neither the tool nor a log could take it."""
    pending = [value]  # a list, since what the decoder's C stack could nest might not fit Python's
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending += [*item, *item.values()]
        elif isinstance(item, list):
            pending += item
        elif isinstance(item, str) and _SURROGATE.search(item):
            return True
    return False


_SURROGATE = re.compile("[\ud800-\udfff]")
# strict=False: a raw line break or tab inside a string stands for itself, so code written with real lines still runs.
_JSON = json.JSONDecoder(strict=False)
_TAG = re.compile(f"{CALL_OPEN}|{THINK_OPEN}|{THINK_CLOSE}")
_BLANKS = re.compile(r"\s*")


class _Lineless(str):
    """A text whose JSON errors do not count the lines before them, which every broken call would do from the start."""

    def count(self, *_: Any) -> int:
        return 0

    def rfind(self, *_: Any) -> int:
        return -1


def parse_calls(text: str, schemas: ToolSchemas) -> Parsed:
    """The calls of one turn, with those that cannot be read as errors in their place.

    An end of thinking without a beginning closes thinking that the prompt opened: all before it was thinking. A
    beginning without an end makes the rest thinking.
    """
    items: list[Call | CallError] = []
    text = _Lineless(text)
    closes = [match.start() for match in re.finditer(CALL_CLOSE, text)]
    position = 0
    while tag := _TAG.search(text, position):
        position = tag.end()
        if tag[0] == THINK_OPEN:
            end = text.find(THINK_CLOSE, position)
            if end < 0:
                break
            position = end + len(THINK_CLOSE)
        elif tag[0] == THINK_CLOSE:
            items.clear()
        else:
            item, position = _read_block(text, position, closes, schemas)
            if item is not None:
                items.append(item)
    return Parsed(tuple(items))


def _read_block(
    text: str, start: int, closes: Sequence[int], schemas: ToolSchemas
) -> tuple[Call | CallError | None, int]:
    """Reads the call whose begin tag ends at `start`, and returns it with the index where the text goes on.

    closes: where end tags begin
    None in place of the item: the begin tag was only mentioned, in thinking that ends at that index.
    """
    value, end, problem = decode_json(text, start)
    search_from = end if isinstance(value, dict) else start  # only an object may hold an end tag, in its strings
    following = bisect_left(closes, search_from)
    close = closes[following] if following < len(closes) else -1
    if close < 0 or end != close:
        stop = close if close >= 0 else len(text)
        mark = _end_of_thinking(text, start, search_from, stop)
        if mark >= 0:
            return None, mark
        if close < 0:
            return CallError(CallErrorCode.UNCLOSED, f"the call has no end tag, so it was not run{schemas.hint}"), stop
        message = f"{problem or 'text after the JSON value'}{schemas.hint}"
        return CallError(CallErrorCode.MALFORMED_JSON, message), close + len(CALL_CLOSE)
    return _check(value, schemas), close + len(CALL_CLOSE)


def decode_json(text: str, start: int) -> tuple[Any, int, str | None]:
    """One JSON value and the index after it and its blanks; or None, -1 and the problem. Raw line breaks may stand."""
    begin = _skip_blanks(text, start)
    try:
        value, end = _JSON.raw_decode(text, begin)
    except RecursionError:
        return None, -1, "nested too deeply"
    except json.JSONDecodeError as error:
        return None, -1, f"{error.msg} at character {error.pos - start + 1}"
    except ValueError:  # an integer past Python's limit of digits
        return None, -1, "a number is too long"
    return value, _skip_blanks(text, end), None


def _skip_blanks(text: str, position: int) -> int:
    match = _BLANKS.match(text, position)
    assert match is not None  # it matches the empty string
    return match.end()


def _end_of_thinking(text: str, start: int, search_from: int, stop: int) -> int:
    """Where thinking ends inside a block that cannot be read, or -1.

    An end-of-thinking tag there is text of the call (code that prints it, then cut or garbled) unless the block does
    not even begin as an object, or a new call begins between that tag and the end.
    """
    mark = text.find(THINK_CLOSE, search_from, stop)
    if mark < 0:
        return -1
    begins_as_object = text.startswith("{", _skip_blanks(text, start))
    return -1 if begins_as_object and text.find(CALL_OPEN, mark, stop) < 0 else mark


def _check(value: Any, schemas: ToolSchemas) -> Call | CallError:
    """One decoded JSON value against the known tools."""
    if not isinstance(value, dict):
        return CallError(CallErrorCode.NOT_AN_OBJECT, f"a call is a JSON object{schemas.hint}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return CallError(CallErrorCode.MISSING_NAME, f'"name" must be the name of a tool{schemas.hint}')
    if name not in schemas.names:
        known = ", ".join(schemas.names) or "none"
        return CallError(CallErrorCode.UNKNOWN_TOOL, f'there is no tool "{_short(name)}"; known: {known}')
    if "arguments" not in value:
        return CallError(CallErrorCode.MISSING_ARGUMENTS, f'"arguments" is missing{schemas.hint_of(name)}')
    arguments = value["arguments"]
    if isinstance(arguments, str):
        arguments, end, _ = decode_json(
            arguments, 0
        )  # some models send the object as a string: read it, but only once
        if end != len(value["arguments"]):
            arguments = None
    if not isinstance(arguments, dict):
        return CallError(CallErrorCode.BAD_ARGUMENTS, f'"arguments" must be a JSON object{schemas.hint_of(name)}')
    return check_arguments(name, arguments, schemas)


def check_arguments(name: str, arguments: dict[str, Any], schemas: ToolSchemas) -> Call | CallError:
    """The call of a known tool, or what is wrong with its arguments."""
    problem = schemas.bad_argument(name, arguments)
    if problem is not None:
        return CallError(CallErrorCode.BAD_ARGUMENTS, problem + schemas.hint_of(name))
    return Call(name, arguments)


def _short(name: str) -> str:
    return name if len(name) <= 40 else name[:40] + "..."
