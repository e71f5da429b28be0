"""The paged key/value cache and the attention over it: the torch reference, for any device and dtype.

A page holds `page_size` tokens of one sequence, for every layer; a sequence's page table lists its pages in order.
Page 0 belongs to nobody: padding of fixed-shape batches writes there. The scheduler decides who owns which page
(`rollout.pages`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from config import ConfigError, RolloutConfig
from modeling.attention import KEY_MULTIPLE, MIN_ROWS, PLAIN, Extras, Softmax, round_up, visible
from modeling.routing import UNKNOWN, Recorded, Recorder


class PagedCache:
    """One tensor for all layers, so that a layer's slice is a view at a fixed address."""

    def __init__(
        self, config: PretrainedConfig, num_pages: int, page_size: int, dtype: torch.dtype,
        device: torch.device | str,
    ):  # fmt: skip
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.page_size = page_size
        self.num_pages = num_pages
        # [L, 2, P, G, page_size, D]; zeros, since masked slots are read and 0 x NaN would be NaN
        shape = (config.num_hidden_layers, 2, num_pages, heads, page_size, width)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        # The experts of each token, beside its keys  # [L, P, page_size, k] uint8; None in a dense model
        self.routes: Tensor | None = None
        if getattr(config, "num_local_experts", 0):
            routes = (config.num_hidden_layers, num_pages, page_size, config.num_experts_per_tok)
            self.routes = torch.full(routes, UNKNOWN, dtype=torch.uint8, device=device)

    def recorder(self, pages: Tensor, offsets: Tensor) -> Recorder | None:
        """For new tokens at these places  # [N] each"""
        return None if self.routes is None else Recorder(self.routes, pages, offsets)

    def routes_of(self, pages: Sequence[int], computed: int, length: int) -> bytes:
        """The experts of a sequence's first `length` tokens  # [length, L, k] uint8; UNKNOWN from `computed` on."""
        if self.routes is None:
            return b""
        layers, _, _, top_k = self.routes.shape
        found = torch.full((length, layers, top_k), UNKNOWN, dtype=torch.uint8)
        known = min(computed, length)
        if known:
            used = torch.tensor(pages[: -(-known // self.page_size)], device=self.routes.device)
            found[:known] = self.routes[:, used].flatten(1, 2).transpose(0, 1)[:known].cpu()
        return found.numpy().tobytes()

    @staticmethod
    def bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * config.num_hidden_layers * heads * width * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Span:
    """New tokens of one sequence: `length` of them from position `start`, whose keys go to `pages`."""

    start: int
    length: int
    pages: Sequence[int]  # at least enough for start + length tokens


class PagedRows:
    """Writes new keys and values into the cache, then lets each sequence's queries attend to all of its own keys.

    Sequences of equal length attend together, so that one prompt does not pad every decoding sequence.
    """

    def __init__(self, cache: PagedCache, spans: Sequence[Span], softmax: Softmax):
        self._cache, self._softmax = cache, softmax
        device, page_size = cache.kv.device, cache.page_size
        lengths = torch.tensor([span.length for span in spans])
        starts = torch.tensor([span.start for span in spans])
        ends = starts + lengths
        offsets = lengths.cumsum(0) - lengths  # of each sequence in the packed tokens
        row_of = torch.arange(len(spans)).repeat_interleave(lengths)  # [N]
        positions = torch.arange(len(row_of)) - (offsets - starts)[row_of]  # [N]
        num_pages = -(-round_up(int(ends.max()), KEY_MULTIPLE) // page_size)
        # A shorter sequence repeats page 0, whose keys the mask hides.
        table = torch.tensor([[*s.pages[:num_pages], *[0] * (num_pages - len(s.pages))] for s in spans])  # [B, P]
        self.positions = positions.to(device)
        self._write_pages = table[row_of, positions // page_size].to(device)  # [N]
        self._write_offsets = (positions % page_size).to(device)  # [N]
        self.routes: Recorder | Recorded | None = cache.recorder(self._write_pages, self._write_offsets)
        buckets = torch.tensor([_bucket(span.length) for span in spans])
        self._groups = []
        for bucket in buckets.unique():
            rows = (buckets == bucket).nonzero().flatten()
            self._groups.append(_Group(starts[rows], lengths[rows], offsets[rows], table[rows], page_size, device))

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, extras: Extras = PLAIN
    ) -> Tensor:
        keys, values = self._cache.kv[layer]  # [P, G, page_size, D] each
        keys[self._write_pages, :, self._write_offsets] = key.transpose(0, 1)
        values[self._write_pages, :, self._write_offsets] = value.transpose(0, 1)
        heads, tokens, width = query.shape
        out = query.new_empty(tokens, heads, width)
        for group in self._groups:
            group.attend(out, query, keys, values, scaling, extras, self._softmax)
        return out


def _bucket(length: int) -> int:
    """Lengths that attend together: 1 alone, then powers of two."""
    return 1 << (length - 1).bit_length()


class _Group:
    """Sequences whose new tokens attend as one padded batch."""

    def __init__(
        self, starts: Tensor, lengths: Tensor, offsets: Tensor, table: Tensor, page_size: int, device: torch.device
    ):
        """starts, lengths, offsets in the packed tokens: [B]; table of pages: [B, P]."""
        self._batch, self._longest = len(starts), int(lengths.max())
        num_pages = -(-round_up(int((starts + lengths).max()), KEY_MULTIPLE) // page_size)
        self._table = table[:, :num_pages].flatten().to(device)  # [B * P]
        steps = torch.arange(self._longest)
        real = steps[None] < lengths[:, None]  # [B, Q]
        # A padding query repeats the sequence's last token and is dropped below.
        steps = torch.minimum(steps[None], lengths[:, None] - 1)  # [B, Q]
        self._queries = (offsets[:, None] + steps).flatten().to(device)  # [B * Q] into the packed tokens
        self._real = None if bool(real.all()) else real.flatten().nonzero().flatten().to(device)
        self._positions = (starts[:, None] + steps).to(device)  # [B, Q]
        self._columns = torch.arange(num_pages * page_size, device=device)  # [K]
        self._visible: dict[int | None, Tensor] = {}  # by window  # [B, Q, K]

    def attend(
        self, out: Tensor, query: Tensor, keys: Tensor, values: Tensor, scaling: float, extras: Extras,
        softmax: Softmax,
    ) -> None:  # fmt: skip
        """Fills this group's tokens of out [N, H, D]; query [H, N, D], keys and values [P, G, page_size, D]."""
        shared = keys.shape[1]
        per_key = query.shape[0] // shared
        q = query.transpose(0, 1).index_select(0, self._queries)  # [B * Q, H, D]
        q = q.unflatten(1, (shared, per_key)).unflatten(0, (self._batch, self._longest))  # [B, Q, G, H / G, D]
        q = q.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, G, H / G * Q, D]: a key head's queries side by side
        k, v = (self._gathered(x) for x in (keys, values))  # [B, G, K, D]
        if extras.window not in self._visible:
            self._visible[extras.window] = visible(self._positions, self._columns, extras.window)
        mask = self._visible[extras.window].repeat(1, per_key, 1)[:, None]  # [B, 1, H / G * Q, K]
        sinks = extras.sinks
        if sinks is not None:
            sinks = sinks.float().view(shared, per_key).repeat_interleave(self._longest, dim=1)  # [G, H / G * Q]
        spare = -q.shape[2] % MIN_ROWS  # a multiple, since the kernel cuts queries into blocks of 32
        if spare:
            q, mask = F.pad(q, (0, 0, 0, spare)), F.pad(mask, (0, 0, 0, spare), value=True)
            sinks = None if sinks is None else F.pad(sinks, (0, spare))
        result = softmax(q, k, v, mask, scaling, sinks)[:, :, : per_key * self._longest]
        result = result.unflatten(2, (per_key, self._longest)).permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1, 2)
        if self._real is None:
            out[self._queries] = result
        else:
            out[self._queries[self._real]] = result[self._real]

    def _gathered(self, pages: Tensor) -> Tensor:
        """[P, G, page_size, D] -> the rows' keys in order [B, G, K, D]; whole pages are copied, not elements."""
        rows = pages.index_select(0, self._table).unflatten(0, (self._batch, -1))
        return rows.transpose(1, 2).flatten(2, 3)


def num_pages(rollout: RolloutConfig, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Pages to allocate, the scratch page included. Raises ConfigError where not one full context fits.

    rollout.kv_tokens rules where set. Otherwise every lane gets a full context on CPU, and on CUDA
    rollout.kv_memory_fraction of the memory that is free now (the engine is built), at most a context a trajectory.
    """
    context_pages = -(-rollout.context_length // rollout.page_size)
    if rollout.kv_tokens is not None:
        return 1 - -rollout.kv_tokens // rollout.page_size
    if device.type != "cuda":
        return 1 + context_pages * rollout.decode_rows
    page_bytes = PagedCache.bytes_per_token(config, dtype) * rollout.page_size
    free, _ = torch.cuda.mem_get_info(device)
    pages = int(free * rollout.kv_memory_fraction) // page_bytes
    if pages <= context_pages:
        raise ConfigError(
            "rollout.kv_memory_fraction", rollout.kv_memory_fraction,
            f"gives {pages * rollout.page_size} tokens of KV cache ({free / 1e9:.1f} GB are free), and one context "
            f"takes rollout.context_length={rollout.context_length}; raise the fraction or shorten the context",
        )  # fmt: skip
    return 1 + min(pages, context_pages * rollout.trajectories_per_step)
