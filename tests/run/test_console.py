"""Plain lines where nobody looks, a live table on a terminal."""

from __future__ import annotations

import io
import sys

import pytest

from run.console import LiveConsole, PlainConsole, console_line, open_console


def test_the_line_shows_what_the_step_has():
    line = console_line({"step": 3, "reward": -0.25, "loss": 0.123456, "unlisted": 1}, 50)
    assert line == "step 3/50  reward -0.25  loss 0.1235"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"skipped": True, "nothing_trained": "all rewards of each group are equal"},
         "nothing trained: all rewards of each group are equal"),
        ({"bad_updates": 1}, "nothing trained: loss or gradient not finite (see bad_steps/)"),
        ({"bad_updates": 1, "by_update": [{}, {}]},
         "1 of 2 updates not trained: loss or gradient not finite (see bad_steps/)"),
    ],
)  # fmt: skip
def test_the_line_says_why_a_step_trained_nothing(row, words):
    assert console_line({"step": 3, "reward": 0.5} | row, 50) == f"step 3/50  reward 0.5  {words}"


def test_a_trained_step_needs_no_words():
    assert console_line({"step": 3, "bad_updates": 0, "by_update": [{}, {}]}, 50) == "step 3/50"


def test_without_a_terminal_there_is_one_line_a_step_and_no_progress(capsys):
    console = open_console(50)
    assert isinstance(console, PlainConsole)
    console.progress(1, 8, 100, 2)
    console.step({"step": 1, "reward": 1.0})
    console.close()
    assert capsys.readouterr().out == "step 1/50  reward 1\n"


@pytest.fixture
def screen():
    rich_console = pytest.importorskip("rich.console", reason="rich is not installed: requirements/report.txt")
    return rich_console.Console(file=io.StringIO(), force_terminal=True, width=160)


def test_on_a_terminal_the_table_and_the_rollout_move(screen):
    console = LiveConsole(50, screen)
    row = {"step": 1, "reward": -0.5, "rollout_tokens_per_second": 1234.5, "nothing_trained": "all equal"}
    console.step(row)
    console.progress(3, 8, 100, 2)
    with screen.capture() as moving:
        screen.print(console._render())
    console.progress(8, 8, 200, 0)
    with screen.capture() as training:
        screen.print(console._render())
    console.close()
    text = moving.get()
    assert "nothing trained: all equal" in text
    assert "step" in text and "-0.5" in text and "1234" in text
    assert "step 2/50  3/8 trajectories" in text and "2 tools running" in text
    assert "8 trajectories sampled, training" in training.get()


def test_a_terminal_without_rich_gets_plain_lines(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert isinstance(open_console(1), PlainConsole)
