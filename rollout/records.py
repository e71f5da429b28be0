"""What the policy did: one frozen, self-checking record per sampled trajectory.

Field names follow DeepSpeed's per-sample rollout API (DeepSpeed#9037, unreleased at 0.19.8), so that a release can
replace this file. Reward and advantage are not fields: they travel as `Scored(record, ...)`, so no record is ever half
built. Standard library only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from config import Config


class StopReason(StrEnum):
    """Why a trajectory ended. docs/data_and_grading.md has a row for each, with its reward and whether it trains."""

    ANSWERED = "answered"  # a turn ended by itself and called no tool
    TURN_LIMIT = "turn_limit"  # the last allowed turn still called the tool
    TURN_TOKENS = "turn_tokens"  # a turn reached rollout.max_new_tokens
    CONTEXT_FULL = "context_full"  # prompt, turns and results reached rollout.context_length
    BAD_CALL = "bad_call"  # the last allowed turn ended in a call that cannot be read
    TOOL_INFRA = "tool_infra"  # the sandbox itself failed twice: neither trained on nor rewarded


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One executed call, or one that could not be read (status "bad_call")."""

    name: str
    code: str
    status: str  # ToolResult.status, or "bad_call"
    text: str  # what the model was shown
    seed: int  # numpy's and random's seed in the child; a replay passes it again
    wall_s: float  # seconds in the child


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One assistant turn: tokens [start, end) of the trajectory were sampled; its calls answer after `end`."""

    start: int
    end: int
    ended: bool  # True where the policy drew an end-of-turn token; False where the turn was cut
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """What one call of `RolloutEngine.generate` may do. Tokens, except temperature."""

    max_new_tokens: int  # per turn
    temperature: float  # 0: greedy (evaluation only)
    n_samples_per_prompt: int
    max_turns: int
    context_length: int
    seed: int  # with policy_step, prompt, sample and position it determines every draw
    top_k: int = 0  # draw from the k likeliest tokens; 0: from all (as training must)
    top_p: float = 1.0  # draw from the fewest tokens that hold this probability; 1: from all (as training must)

    @classmethod
    def of(cls, config: Config, **changes: Any) -> SamplingConfig:
        """How training samples under a run's settings, but for `changes`."""
        rollout = config.rollout
        training = {
            "max_new_tokens": rollout.max_new_tokens, "temperature": rollout.temperature,
            "n_samples_per_prompt": rollout.samples_per_prompt, "max_turns": rollout.max_turns,
            "context_length": rollout.context_length, "seed": config.train.seed,
        }  # fmt: skip
        return cls(**(training | changes))

    @property
    def truncation(self) -> dict[str, Any]:
        """What a decoder needs beside the temperature: nothing where the whole softmax is drawn from."""
        return {"top_k": self.top_k, "top_p": self.top_p} if self.top_k or self.top_p < 1 else {}


@dataclass(frozen=True, slots=True)
class Work:
    """The trajectories of one rollout, dealt one by one to the processes that share it; `Work()` is for one alone."""

    # Gives the number of the next one for this process; one past the last means that none is left.
    take: Callable[[], int] = field(default_factory=lambda: itertools.count().__next__)
    share: float = math.inf  # to hold at once, an even part of all: a process that starts later finds its own


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """One trajectory as one flat sequence of T tokens: prompt, sampled turns and tool results in order.

    P = prompt, A = sampled (the end-of-turn token included), O = appended after the turn (tool result, next header):

        token_ids = P    P    A    A    O    O    A       turns = (Turn(start=2, end=4), Turn(start=6, end=7))
        sampled   = 0    0    1    1    0    0    1
        logprobs  = 0.0  0.0  -.1  -.7  0.0  0.0  -.2

    With the real Qwen3 tokenizer "What is 12*13?" is answered by one turn `156.<|im_end|>`:

        token_ids = 151644 872 198 3838 374 220 16 17 9 16 18 30 151645 198 151644 77091 198 | 16 20 21 13 151645
        sampled   = 0 x 17                                                                   | 1  1  1  1  1

    Raises ValueError where the parts contradict each other, naming prompt and sample.
    """

    prompt_index: int  # which problem of the step; its siblings share it
    sample_index: int  # 0 .. samples_per_prompt - 1
    policy_step: int  # optimizer steps taken before the first token was drawn
    token_ids: tuple[int, ...]  # [T]
    sampled: tuple[bool, ...]  # [T] True where the policy drew the token
    logprobs: tuple[float, ...]  # [T] natural log at the sampling temperature, fp32; 0.0 where not sampled
    turns: tuple[Turn, ...]
    stop: StopReason
    # Of a mixture of experts, those each token but the last took while sampling  # [T - 1, layers, k] uint8, 255 where
    # that is not known; empty otherwise
    routes: bytes = b""

    def __post_init__(self) -> None:
        problem = self._inconsistency()
        if problem:
            raise ValueError(f"record of prompt {self.prompt_index}, sample {self.sample_index}: {problem}")

    def _inconsistency(self) -> str | None:
        length = len(self.token_ids)
        if len(self.sampled) != length or len(self.logprobs) != length:
            return (
                f"{length} token_ids, {len(self.sampled)} sampled, {len(self.logprobs)} logprobs; lengths must agree"
            )
        if not self.turns or not any(self.sampled):
            return "no sampled token; a trajectory has at least one turn"
        if self.turns[0].start < 1:
            return "no prompt token before the first turn"
        spans, end = [False] * length, 0
        for turn in self.turns:
            if not end <= turn.start < turn.end <= length:
                return f"turn [{turn.start}, {turn.end}) is empty, out of order or outside the {length} tokens"
            spans[turn.start : turn.end] = [True] * (turn.end - turn.start)
            end = turn.end
        if tuple(spans) != self.sampled:
            return "sampled is not exactly the union of the turns"
        for index, (drawn, logprob) in enumerate(zip(self.sampled, self.logprobs, strict=True)):
            if not drawn and logprob != 0.0:
                return f"token {index} has log-prob {logprob} but was not sampled"
            if not float("-inf") < logprob <= 0.0:
                return f"token {index} has log-prob {logprob}; it must be finite and at most 0"
        if len(self.routes) % (length - 1):
            return (
                f"{len(self.routes)} bytes of routes; equally many for each of the {length - 1} first tokens are due"
            )
        return None

    @property
    def num_sampled(self) -> int:
        return sum(self.sampled)

    @property
    def final_turn(self) -> Turn:
        return self.turns[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A record with its reward, the grader's reason code and the group advantage."""

    record: RolloutRecord
    reward: float
    reason: str
    advantage: float


# Prompts (token ids), policy step, which of their trajectories, how -> their records: `RolloutEngine.generate`.
Sample = Callable[[Sequence[list[int]], int, Work, SamplingConfig], list[RolloutRecord]]
