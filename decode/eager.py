"""Runs the policy over new tokens and draws the next ones: the eager decoder, for any device.

`decode.graphs.GraphDecoder` offers the same `run` with captured CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.cache import PagedCache, PagedRows, Span
from decode.interface import Chunk, Done, Draws
from decode.sampler import draw, sample
from modeling.attention import MIN_ROWS, NO_MASK, SOFTMAX, Rows


class CachedRows(Rows, Protocol):
    """Attention over the paged cache, which also knows where the new tokens stand."""

    positions: Tensor  # [N]


class EagerDecoder:
    """One forward over all chunks, long and short, packed end to end."""

    pipelined = False
    step_rows = 0
    captures = 0
    _sampler: Callable[..., tuple[Tensor, Tensor]] = staticmethod(sample)

    def __init__(self, model: PreTrainedModel, cache: PagedCache, attn_implementation: str):
        self._model, self._cache = model, cache
        self._softmax = SOFTMAX[attn_implementation]

    def submit(self, chunks: Sequence[Chunk], temperature: float, **truncation: Any) -> Done:
        return Done(self.run(chunks, temperature, **truncation))

    @torch.no_grad()
    def run(self, chunks: Sequence[Chunk], temperature: float, **truncation: Any) -> Draws:
        """truncation: `top_k` and `top_p` of `decode.sampler.sample`"""
        tokens, rows = self._batch(chunks)
        ids = torch.tensor([tokens], device=self._cache.kv.device)  # [1, N]
        hidden = self._model.base_model(
            input_ids=ids, position_ids=rows.positions[None], attention_mask=NO_MASK, use_cache=False, rows=rows
        ).last_hidden_state[0]  # [N, H]
        head = self._model.get_output_embeddings().weight
        return draw(self._sampler, hidden, head, chunks, temperature, **truncation)

    def _batch(self, chunks: Sequence[Chunk]) -> tuple[list[int], CachedRows]:
        """The chunks' tokens, end to end, and the attention over them."""
        spans = [Span(c.start, len(c.token_ids), c.pages) for c in chunks]
        tokens = [token for c in chunks for token in c.token_ids]
        if len(tokens) < MIN_ROWS:  # see there; the scratch page takes the keys
            spans.append(Span(0, MIN_ROWS, [0]))
            tokens += [0] * MIN_ROWS
        return tokens, PagedRows(self._cache, spans, self._softmax)
