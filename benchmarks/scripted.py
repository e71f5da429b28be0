"""Scripted trajectories in our engine: turn lengths and tool latencies are fixed, the token ids are sampled.

A turn samples exactly its scripted number of tokens and ignores stop tokens. After its tool latency the scripted
number of tool tokens is appended. Their ids are a function of prompt, sample and turn, so every process appends the
same. Set as `RolloutEngine.run_type`; the records are ordinary ones and pass `RolloutRecord`'s checks.
Left out: reading and checking of workload files, which is `benchmarks/workload.py`.
"""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from benchmarks.workload import Row, scripted_ids
from rollout.engine import RolloutRun
from rollout.episode import Episode, OpenTurn
from rollout.records import StopReason, ToolCall

NO_STOPS: Any = SimpleNamespace(stop_ids=frozenset())  # all that a scripted run asks of a chat format


class TimeUp(Exception):
    """The time limit of a rollout has passed; the tokens sampled so far still count."""


class ScriptedEpisode(Episode):
    """A trajectory whose turns have the lengths of the script."""

    def __init__(self, script: Row, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.script = script
        self.started = self.began = time.perf_counter()  # when it was taken, when its first draw was requested

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
    longest = 0.0  # seconds from taking a trajectory to its end, the maximum over trajectories
    longest_drawing = 0.0  # the same from its first draw, without the wait for a lane
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
        call = ToolCall(name="python", arguments={}, status="ok", text="", seed=0, wall_s=script["tool_seconds"])
        episode.close_turn(ended=False, calls=(call,))
        episode.append_suffix(ids)
        self.scheduler.resume(turn.sequence)
