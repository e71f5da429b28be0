"""Runs the policy over new tokens and draws the next ones: the eager decoder, for any device.

`decode.graphs.GraphDecoder` offers the same `run` with captured CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from decode.cache import PagedCache, PagedRows, Span
from decode.interface import Chunk, Done, Draws
from decode.sampler import sample, truncate
from modeling.attention import MIN_ROWS, NO_MASK, SOFTMAX
from modeling.logprob import head_logits


class EagerDecoder:
    """One forward over all chunks, long and short, as one packed line."""

    pipelined = False
    step_rows = 0
    captures = 0

    def __init__(self, model: PreTrainedModel, cache: PagedCache, attn_implementation: str):
        self._model, self._cache = model, cache
        self._softmax = SOFTMAX[attn_implementation]

    def submit(self, chunks: Sequence[Chunk], temperature: float, **truncation: Any) -> Done:
        return Done(self.run(chunks, temperature, **truncation))

    @torch.no_grad()
    def run(self, chunks: Sequence[Chunk], temperature: float, top_k: int = 0, top_p: float = 1.0) -> Draws:
        device = self._cache.kv.device
        spans = [Span(c.start, len(c.token_ids), c.pages) for c in chunks]
        line = [token for c in chunks for token in c.token_ids]
        if len(line) < MIN_ROWS:  # see there; the scratch page takes the keys
            spans.append(Span(0, MIN_ROWS, [0]))
            line += [0] * MIN_ROWS
        rows = PagedRows(self._cache, spans, self._softmax)
        ids = torch.tensor([line], device=device)  # [1, N]
        hidden = self._model.base_model(
            input_ids=ids, position_ids=rows.positions[None], attention_mask=NO_MASK, use_cache=False, rows=rows
        ).last_hidden_state[0]  # [N, H]
        ends = torch.tensor([len(c.token_ids) for c in chunks]).cumsum(0) - 1
        drawing = [i for i, c in enumerate(chunks) if c.sample]
        if not drawing:
            return Draws([], [])
        last = hidden.index_select(0, ends[drawing].to(device))  # [B, H]
        logits = head_logits(last, self._model.get_output_embeddings().weight, temperature)
        keys = torch.tensor([chunks[i].key for i in drawing], dtype=torch.int64, device=device).to(torch.int32)
        positions = torch.tensor([chunks[i].start + len(chunks[i].token_ids) for i in drawing], device=device)
        logits = truncate(logits, top_k, top_p)
        tokens, logprobs = sample(logits, keys, positions, temperature)
        return Draws(tokens.tolist(), logprobs.tolist())
