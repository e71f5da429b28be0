"""Batches of a mixture of experts with their routes."""

from __future__ import annotations

import torch

from decode.cache import PagedCache
from decode.eager import EagerDecoder
from decode.interface import Chunk
from decode.noise import row_key
from rollout.records import RolloutRecord, StopReason, Turn
from update.batch import ResponseTokenBatch

PROMPT, DRAWS, PAGES = 7, 9, [3, 1, 4, 2, 5]


def sampled(model) -> RolloutRecord:
    """A prompt read in two chunks, then tokens drawn one by one."""
    cache = PagedCache(model.config, 6, 4, torch.float32, "cpu")
    decoder = EagerDecoder(model, cache, "auto")
    line, logprobs, start = list(range(20, 20 + PROMPT)), [0.0] * PROMPT, 0
    for end in [4, *range(PROMPT, PROMPT + DRAWS)]:
        chunk = Chunk(0, line[start:end], start, PAGES, row_key(0, 0, 0, 0), end == len(line))
        draws = decoder.run([chunk], 1.0)
        line += draws.tokens
        logprobs += draws.logprobs
        start = end
    count = len(line)
    return RolloutRecord(
        prompt_index=0, sample_index=0, policy_step=0, token_ids=tuple(line), logprobs=tuple(logprobs),
        sampled=(False,) * PROMPT + (True,) * DRAWS, turns=(Turn(start=PROMPT, end=count, ended=True),),
        stop=StopReason.ANSWERED, routes=cache.routes_of(PAGES, start, count - 1),
    )  # fmt: skip


def batch_of(record: RolloutRecord) -> ResponseTokenBatch:
    return ResponseTokenBatch.from_rollout([record, record], [1.0, -1.0], [1.0, 1.0])
