"""From the bytes and status of one answer to the text that the model is shown.

The text is stdout, then stderr, then one line about how the call was ended. Terminal sequences are removed, other
control characters are shown as escapes, so that any text can be encoded. Chat markup is left as it is: whoever
tokenizes tool text must do so as plain text.
"""

from __future__ import annotations

import itertools
import re
from typing import Any, NamedTuple

from sandbox.layers import limits

# Terminal sequences: CSI, OSC, and those of two bytes.
_TERMINAL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Shown(NamedTuple):
    text: str  # for the model
    stdout: str
    stderr: str
    truncated: bool  # something the program wrote is missing in text


def render(answer: dict[str, Any], pieces: list[bytes], max_chars: int) -> Shown:
    """The texts of one answer; `pieces` are head and tail of stdout, then of stderr."""
    out = _segments(pieces[0], answer["cut"][0], pieces[1])
    err = _segments(pieces[2], answer["cut"][1], pieces[3])
    joint: list[str | int] = ["\n"] if _wants_newline(out) and err else []
    text, truncated = shorten(out + joint + err, max_chars)
    note = _note(answer)
    text = text.rstrip("\n")
    text = f"{text}\n{note}" if text and note else text or note or "(no output)"
    return Shown("" if answer["status"] == "infra" else text, _whole(out), _whole(err), truncated)


def shorten(segments: list[str | int], max_chars: int) -> tuple[str, bool]:
    """(text, whether it was cut); an integer segment counts characters that are already gone."""
    total = sum(segment if isinstance(segment, int) else len(segment) for segment in segments)
    if total <= max_chars and not any(isinstance(segment, int) for segment in segments):
        return "".join(str(segment) for segment in segments), False
    half = max_chars // 2
    head = "".join(_before_gap(segments))[:half]
    tail = "".join(_before_gap(segments[::-1])[::-1])[-half:]
    return f"{head}\n... [{total - len(head) - len(tail)} characters cut] ...\n{tail}", True


def _before_gap(segments: list[str | int]) -> list[str]:
    return [str(segment) for segment in itertools.takewhile(lambda one: not isinstance(one, int), segments)]


def _segments(head: bytes, cut: int, tail: bytes) -> list[str | int]:
    parts: list[str | int] = [clean(head), cut, clean(tail)]
    return [part for part in parts if part]


def _whole(segments: list[str | int]) -> str:
    return "".join(f"\n... [{part} characters cut] ...\n" if isinstance(part, int) else part for part in segments)


def _wants_newline(segments: list[str | int]) -> bool:
    return bool(segments) and not str(segments[-1]).endswith("\n")


def clean(data: bytes) -> str:
    """Text that any tokenizer can take: bytes that are not UTF-8 and control characters become escapes."""
    text = data.decode("utf-8", "backslashreplace")
    if text.isprintable():
        return text
    text = _TERMINAL.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def _note(answer: dict[str, Any]) -> str:
    status, error_type = answer["status"], answer["error_type"]
    if status == "timeout":
        return f"TimeoutError: the program ran longer than {answer['timeout_s']:g} s and was stopped"
    if status == "output_limit":
        return f"Stopped: more than {limits.OUTPUT_BYTES >> 20} MiB of output"
    if status == "crash":
        return f"Crashed: signal {error_type}" if error_type.startswith("SIG") else f"Crashed: {error_type}"
    if status == "exit":
        return f"Exited with status {answer['code']}"
    if error_type == "DiskLimit":
        return f"OSError: [Errno 28] No space left on device: more than {limits.FILE_BYTES >> 20} MiB of files"
    if status == "out_of_memory" and error_type == "OutOfMemory":
        return "MemoryError: the program used too much memory and was stopped"
    return ""
