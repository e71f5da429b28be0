"""What the model is shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.parent import render

ANSWER = {"status": "ok", "error_type": "", "code": 0, "timeout_s": 10.0, "cut": [0, 0]}


def _text(out: bytes = b"", err: bytes = b"", max_chars: int = 4000, **answer) -> str:
    return render.render(ANSWER | answer, [out, b"", err, b""], max_chars).text


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"status": "timeout"}, "TimeoutError: the program ran longer than 10 s and was stopped"),
        ({"status": "timeout", "timeout_s": 0.5}, "TimeoutError: the program ran longer than 0.5 s and was stopped"),
        ({"status": "output_limit"}, "Stopped: more than 8 MiB of output"),
        ({"status": "crash", "error_type": "SIGSEGV"}, "Crashed: signal SIGSEGV"),
        ({"status": "exit", "code": 3}, "Exited with status 3"),
        ({"status": "error", "error_type": "DiskLimit"}, "OSError: [Errno 28] No space left on device"),
        ({"status": "out_of_memory", "error_type": "OutOfMemory"}, "MemoryError: "),
    ],
)
def test_a_call_that_was_ended_says_so_after_its_partial_output(answer, text):
    shown = _text(b"row 1\n", **answer)
    assert shown.startswith(f"row 1\n{text}")
    assert _text(**answer).startswith(text)


def test_no_output_is_said_in_words_and_infra_says_nothing():
    assert _text() == _text(b"\n\n") == "(no output)"
    assert _text(b"partial", status="infra") == ""


def test_stderr_follows_stdout_on_a_line_of_its_own():
    assert _text(b"a", b"Traceback\n") == "a\nTraceback"
    assert _text(b"a\n", b"Traceback\n") == "a\nTraceback"


def test_control_characters_and_terminal_sequences_cannot_reach_the_model():
    raw = b"a\x00b\x1b[31mred\x1b[0m\x1b]0;title\x07\x1bM\x7f\tz\r\nnext\rline"
    assert _text(raw) == "a\\x00bred\\x7f\tz\nnext\nline"
    assert _text(b"\xff\xfe ok") == "\\xff\\xfe ok"


@given(st.binary(max_size=200))
def test_any_bytes_become_text_that_encodes(data):
    shown = _text(data)
    shown.encode("utf-8")
    assert "\x1b" not in shown and "\x00" not in shown


@given(st.lists(st.one_of(st.text(max_size=300), st.integers(1, 1000)), max_size=6), st.integers(100, 400))
def test_shortening_keeps_head_and_tail_and_counts_what_is_missing(segments, limit):
    segments = [segment for segment in segments if segment]
    total = sum(segment if isinstance(segment, int) else len(segment) for segment in segments)
    text, cut = render.shorten(segments, limit)
    if not cut:
        assert text == "".join(segments) and total <= limit
        return
    head, _, rest = text.partition("\n... [")
    count, _, tail = rest.partition(" characters cut] ...\n")
    assert len(head) <= limit // 2 and len(tail) <= limit // 2
    assert int(count) == total - len(head) - len(tail)


def test_the_last_line_of_a_flood_is_still_shown():
    shown = render.render(
        ANSWER | {"cut": [934_464, 0]}, [b"x" * 32768, b"x" * 30000 + b"\nANSWER=42\n", b"", b""], 4000
    )
    assert shown.truncated and shown.text.endswith("ANSWER=42") and len(shown.text) < 4100
    assert "characters cut" in shown.text and "characters cut" in shown.stdout
