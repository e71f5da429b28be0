"""Computes longer chunks on CUDA in bf16: one packed forward of the model's own modules with flash attention.

New keys and values go to their pages, then each sequence's whole past is gathered from its pages into packed keys,
since torch's varlen kernel of 2.11 knows no page table; sequences without a past need no gathering. Draws use the
fused sampler. `decode.eager.EagerDecoder` computes the same on any device and in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.cache import PagedCache
from decode.eager import EagerDecoder
from decode.interface import Chunk
from decode.sampling_kernel import sample
from modeling.attention import PLAIN, Extras, packed_flash
from modeling.routing import Recorded, Recorder


class FlashRows:
    """The `modeling.attention.Rows` of new tokens over the paged cache, on CUDA in bf16 or fp16."""

    def __init__(self, cache: PagedCache, chunks: Sequence[Chunk]):
        self._cache, device, size = cache, cache.kv.device, cache.page_size
        lengths = torch.tensor([len(c.token_ids) for c in chunks])
        starts = torch.tensor([c.start for c in chunks])
        ends = starts + lengths
        self._fresh = not bool(starts.any())
        self._longest, self._deepest = int(lengths.max()), int(ends.max())
        row_of = torch.arange(len(chunks)).repeat_interleave(lengths)
        positions = torch.arange(len(row_of)) - (lengths.cumsum(0) - lengths - starts)[row_of]  # [N]
        slots = _slots(chunks, ends, size)  # where each token of each row's past and present lies in the cache
        new = (ends.cumsum(0) - ends)[row_of] + positions  # each row's first place among the packed keys, and on
        self.positions = positions.to(device)
        self._all = slots.to(device)
        self._new = slots[new].to(device)
        self.routes: Recorder | Recorded | None = cache.recorder(self._new // size, self._new % size)
        self._queries = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32)
        self._keys = torch.nn.functional.pad(ends.cumsum(0), (1, 0)).to(device, torch.int32)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, extras: Extras = PLAIN
    ) -> Tensor:
        kv, size = self._cache.kv[layer], self._cache.page_size
        k, v = key.transpose(0, 1), value.transpose(0, 1)
        page, offset = self._new // size, self._new % size
        kv[0][page, :, offset] = k
        kv[1][page, :, offset] = v
        if not self._fresh:
            page, offset = self._all // size, self._all % size
            k, v = kv[0][page, :, offset], kv[1][page, :, offset]  # [all keys, G, D]
        ends, longest = (self._queries, self._keys), (self._longest, self._deepest)
        return packed_flash(query.transpose(0, 1), k, v, ends, longest, scaling, extras)


def _slots(chunks: Sequence[Chunk], ends: Tensor, size: int) -> Tensor:
    """page * size + offset of every token of every row, row by row  # [sum of ends]"""
    parts = []
    for chunk, end in zip(chunks, ends.tolist(), strict=True):
        pages = torch.tensor(chunk.pages[: -(-end // size)])
        parts.append((pages[:, None] * size + torch.arange(size)).flatten()[:end])
    return torch.cat(parts)


class FlashDecoder(EagerDecoder):
    """Runs any chunks eagerly with `FlashRows` and the fused sampler."""

    _sampler = staticmethod(sample)

    def __init__(self, model: PreTrainedModel, cache: PagedCache):
        super().__init__(model, cache, "auto")

    def _batch(self, chunks: Sequence[Chunk]) -> tuple[list[int], FlashRows]:
        return [token for c in chunks for token in c.token_ids], FlashRows(self._cache, chunks)
