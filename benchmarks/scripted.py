"""Scripted trajectories: the lengths of every turn and the latency of every tool call are fixed, the ids are sampled.

A turn samples exactly its scripted number of tokens (stop tokens are ignored); after its tool latency the scripted
number of tool tokens is appended, a function of prompt, sample and turn, so that every process appends the same. Used
through `RolloutEngine.run_type`; records are ordinary ones and pass `RolloutRecord`'s checks.
"""

from __future__ import annotations

import json
import math
import random
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rollout.engine import RolloutRun
from rollout.episode import Episode, OpenTurn
from rollout.records import StopReason, ToolCall

Row = dict[str, Any]  # prompt, sample, prompt_tokens, turns of new_tokens and, but for the last, tool_*
NO_STOPS: Any = SimpleNamespace(stop_ids=frozenset())  # all that a scripted run asks of a chat format
IDS = 300  # scripted ids are drawn below it: the tiny model has them too


def load_workload(name: str, copies: int, shrink: int = 1) -> tuple[list[Row], int]:
    """Trajectories, `copies` times with other prompts, and samples per prompt.

    shrink: every length (at least one token stays) and latency is divided by it
    """
    data = json.loads((Path(__file__).parent / "workloads" / f"{name}.json").read_text())
    prompts = data["meta"]["prompts"]
    rows = [row | {"prompt": row["prompt"] + c * prompts} for c in range(copies) for row in data["trajectories"]]
    return [shrunk(row, shrink) for row in rows] if shrink > 1 else rows, data["meta"]["samples_per_prompt"]


def shrunk(row: Row, by: int) -> Row:
    turns = [
        {name: value / by if name == "tool_seconds" else max(1, value // by) for name, value in turn.items()}
        for turn in row["turns"]
    ]
    return row | {"prompt_tokens": max(1, row["prompt_tokens"] // by), "turns": turns}


def scripts_of(rows: list[Row]) -> dict[tuple[int, int], Row]:
    return {(row["prompt"], row["sample"]): row for row in rows}


def length_of(row: Row) -> int:
    """Tokens at its end."""
    return row["prompt_tokens"] + sum(turn["new_tokens"] + turn.get("tool_tokens", 0) for turn in row["turns"])


def scripted_ids(count: int, *of: int) -> list[int]:
    """A function of `of` alone."""
    generator = random.Random(" ".join(map(str, of)))
    return [generator.randrange(IDS) for _ in range(count)]


class TimeUp(Exception):
    """The time limit of a rollout has passed; what was done by then still counts."""


class ScriptedEpisode(Episode):
    """A trajectory whose turns have the lengths of the script."""

    def __init__(self, script: Row, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.script = script
        self.started = self.began = time.perf_counter()  # when it was taken, and when its first draw was asked for

    def expect(self, placeholder: int) -> None:
        self.began = time.perf_counter()
        self.expect = super().expect  # later draws cost nothing more
        self.expect(placeholder)

    @property
    def max_turn_tokens(self) -> int:
        return self.script["turns"][self.turn_index]["new_tokens"]


class ScriptedRun(RolloutRun):
    """Ends turns by the script; a tool call is a timer."""

    scripts: dict[tuple[int, int], Row]
    instant = False
    longest = 0.0  # seconds from taking a trajectory to its end, the most of any
    longest_drawing = 0.0  # from its first draw: without its wait for a row
    deadline = math.inf

    def __init__(self, chat, *args):
        super().__init__(NO_STOPS, *args)

    @classmethod
    def watch(cls, *_: int) -> None:
        if time.perf_counter() > cls.deadline:
            raise TimeUp

    def new_episode(self, prompt, prompt_index, sample_index):
        return ScriptedEpisode(
            self.scripts[prompt_index, sample_index], prompt, prompt_index=prompt_index, sample_index=sample_index,
            policy_step=self._request.policy_step, sampling=self._sampling,
        )  # fmt: skip

    def finish(self, sequence, stop):
        episode, now = self._episodes[sequence.order], time.perf_counter()
        type(self).longest = max(self.longest, now - episode.started)
        type(self).longest_drawing = max(self.longest_drawing, now - episode.began)
        super().finish(sequence, stop)

    def end_turn(self, sequence, episode, ended):
        turn = episode.script["turns"][episode.turn_index]
        if "tool_tokens" not in turn:
            episode.close_turn(ended=False)
            self.finish(sequence, StopReason.ANSWERED)
            return
        self.scheduler.park(sequence)
        future = self.start_tool(0.0 if self.instant else turn["tool_seconds"])
        self.open_turns.append(OpenTurn(episode, sequence, False, [], [future]))

    def start_tool(self, seconds):
        future: Future = Future()
        threading.Timer(seconds, future.set_result, [None]).start() if seconds else future.set_result(None)
        return future

    def deliver_turn(self, turn):
        self._stats.tool_seconds += time.perf_counter() - turn.submitted
        episode = turn.episode
        script = episode.script["turns"][episode.turn_index]
        ids = scripted_ids(script["tool_tokens"], episode.prompt_index, episode.sample_index, episode.turn_index)
        call = ToolCall(name="python", code="", status="ok", text="", seed=0, wall_s=script["tool_seconds"])
        episode.close_turn(ended=False, calls=(call,))
        episode.append_suffix(ids)
        self.scheduler.resume(turn.sequence)
