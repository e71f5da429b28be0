"""Packed and paged batches of random tokens."""

from __future__ import annotations

import torch

from decode.cache import PagedCache, PagedRows, Span
from modeling.attention import NO_MASK, SOFTMAX, TrainingRows
from tests.conftest import VOCABULARY

LENGTHS = (1, 17, 40, 33)


def token_rows(lengths=LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def packed(model, rows: list[list[int]], softmax="auto") -> torch.Tensor:
    """Final hidden states of all rows as one packed line  # [N, H]"""
    ids = torch.tensor([[token for row in rows for token in row]])
    positions = torch.tensor([[p for row in rows for p in range(len(row))]])
    layout = TrainingRows([len(row) for row in rows], SOFTMAX[softmax])
    out = model.base_model(input_ids=ids, position_ids=positions, attention_mask=NO_MASK, use_cache=False, rows=layout)
    return out.last_hidden_state[0]


def paged(model, rows: list[list[int]], parts: list[list[int]], softmax="auto", page_size=4) -> torch.Tensor:
    """The same through the cache: row i is fed in pieces of parts[i] tokens, all rows side by side."""
    per_row = -(-max(map(len, rows)) // page_size)
    cache = PagedCache(model.config, 1 + per_row * len(rows), page_size, model.dtype, "cpu")
    cache.kv.fill_(1e3)  # what earlier rows left in a page must not reach a result
    order = torch.randperm(per_row * len(rows), generator=torch.Generator().manual_seed(1)) + 1
    pages = order.view(len(rows), per_row).tolist()
    got: list[list[torch.Tensor]] = [[] for _ in rows]
    done = [0] * len(rows)
    for turn in range(max(map(len, parts))):
        live = [i for i in range(len(rows)) if turn < len(parts[i])]
        spans = [Span(done[i], parts[i][turn], pages[i]) for i in live]
        layout = PagedRows(cache, spans, SOFTMAX[softmax])
        pieces = [rows[i][s.start : s.start + s.length] for i, s in zip(live, spans, strict=True)]
        ids = torch.tensor([[token for piece in pieces for token in piece]])
        hidden = model.base_model(
            input_ids=ids, position_ids=layout.positions[None], attention_mask=NO_MASK, use_cache=False, rows=layout
        ).last_hidden_state[0]
        for i, span, piece in zip(live, spans, hidden.split([s.length for s in spans]), strict=True):
            got[i].append(piece)
            done[i] += span.length
    return torch.cat([torch.cat(pieces) for pieces in got])


def splits(lengths, sizes) -> list[list[int]]:
    """Pieces of cycling sizes for each row."""
    parts = []
    for row, length in enumerate(lengths):
        pieces, left, turn = [], length, row
        while left:
            pieces.append(min(left, sizes[turn % len(sizes)]))
            left -= pieces[-1]
            turn += 1
        parts.append(pieces)
    return parts
