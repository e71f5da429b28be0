"""What the rollout asks of a decoder: chunks of tokens in, draws out. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

LAST_DRAW = -1  # stands for a token that the device has drawn and the host has not read yet


@dataclass(slots=True)
class Chunk:
    """Tokens of one sequence to compute in this step."""

    lane: int  # the decode lane of the sequence
    token_ids: list[int]
    start: int  # position of the first of them
    pages: list[int]  # all pages of the sequence so far; they hold start + len(token_ids) tokens
    key: tuple[int, int]  # decode.noise.row_key
    sample: bool  # draw the token after the last


@dataclass(frozen=True, slots=True)
class Draws:
    """One entry per chunk that sampled, in the order of the chunks."""

    tokens: list[int]
    logprobs: list[float]


class Pending(Protocol):
    """The draws of a step that may still be running."""

    def read(self) -> Draws: ...


class Decoder(Protocol):
    """Computes chunks, leaves their keys in the cache, and draws where a chunk samples.

    pipelined: `submit` may be called once more before the step before is read; a lane that drew in that step then
    names `LAST_DRAW` as its token. Steps are computed in the order of submission. step_rows: up to this many tokens
    of one step, in chunks of any length, cost about as much as one token a lane; 0 where length makes no difference.
    An evaluation that truncates passes `SamplingConfig.truncation` too; main.py then takes a decoder that knows it.
    """

    pipelined: bool

    @property
    def step_rows(self) -> int: ...
    @property
    def captures(self) -> int: ...  # CUDA graphs captured so far

    def submit(self, chunks: Sequence[Chunk], temperature: float) -> Pending: ...


@dataclass(frozen=True, slots=True)
class Done:
    """A step that was computed when it was submitted."""

    draws: Draws

    def read(self) -> Draws:
        return self.draws
