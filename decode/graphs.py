"""Decodes inside captured CUDA graphs: one replay per step, whatever the lanes, their lengths and their pages.

A chunk's tokens take a lane of the graph each, so that prompts and tool results are read in the steps in which others
decode; what does not fit goes first, through the decoder given for it. A graph is captured for each size of two
ladders, once per temperature: `ladder` up to the largest batch for steps of one token a sequence, `wide_ladder` for
the others.
A smaller step is padded with lanes that own nothing but the scratch page. Per step the host writes one small pinned
buffer, copies it, replays, and reads ids and log-probs back. Page tables and the last drawn token of each lane stay on
the device: the host sends a lane's whole table when the lane is new, and one page per token after that.

Invariants: nothing is captured that allocates or depends on a value; parameters stay where they were captured, which
is checked before every step that begins a prompt. `submit` may be called again before the draws of the step before are
read, with `LAST_DRAW` as the token of lanes that drew in it.
Left out: models that `decode.weights` refuses; they decode eagerly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.cache import PagedCache
from decode.fallback import capturing
from decode.interface import Chunk, Decoder, Draws
from decode.sampling_kernel import HeadSampler
from decode.stack import FEED, KEY0, KEY1, PAGE, POSITION, SLOT, SPAN, STEP_FIELDS, TOKEN, DecodeStack
from decode.weights import check_addresses, decode_weights
from modeling.attention import round_up

DEPTH = 2  # steps in flight: the host may prepare one while another runs
LEAST_WIDE = 64  # lanes of the smallest graph for longer chunks: a whole tile of the products, few kernels to compile


def ladder(max_rows: int) -> list[int]:
    """Batch sizes with a graph: powers of two, and the maximum itself."""
    sizes = [size for size in (1 << power for power in range(31)) if size < max_rows]
    return [*sizes, max_rows]


def rows_beside(max_rows: int) -> int:
    """Rows to add for the further tokens of longer chunks: half a tile at least, and to whole tiles."""
    return round_up(max_rows + LEAST_WIDE // 2, LEAST_WIDE) - max_rows


def wide_ladder(max_rows: int, extra_rows: int) -> list[int]:
    """Sizes with a graph for steps in which a sequence takes several lanes."""
    most = max_rows + extra_rows
    return [size for size in ladder(most) if size >= min(LEAST_WIDE, most)] if extra_rows else []


class PendingReplay:
    """The draws of a step that may still be running (a `decode.eager.Pending`); `read` waits for them."""

    def __init__(self, before: Draws, order: list[tuple[bool, int]], host: Tensor, done: torch.cuda.Event | None):
        """before: draws of chunks that took no graph; order: `_order`; host: the graph's, once `done` has happened."""
        self._before, self._order, self._host, self._done = before, order, host, done

    def read(self) -> Draws:
        """Must be called before `DEPTH` further steps are submitted."""
        if self._done is None:
            return self._before
        self._done.synchronize()
        tokens, logprobs = self._host[0].tolist(), self._host[1].view(torch.float32).tolist()
        return Draws(
            [tokens[i] if inside else self._before.tokens[i] for inside, i in self._order],
            [logprobs[i] if inside else self._before.logprobs[i] for inside, i in self._order],
        )


class GraphDecoder:
    """A `decode.eager.Decoder`; see the module."""

    pipelined = True

    def __init__(
        self, model: PreTrainedModel, cache: PagedCache, longer: Decoder, *, max_rows: int, context_length: int,
        temperature: float, extra_rows: int = 0,
    ):  # fmt: skip
        """longer: computes the chunks that do not fit; temperature: the one to capture for now; extra_rows: lanes that
        chunks of several tokens may take beyond max_rows, 0: they never take a graph.

        Raises `decode.weights.UnsupportedModel` for a model that the decode kernels do not restate; it and `submit`
        raise `decode.fallback.CaptureError` where the device refuses a graph.
        """
        self._model, self._cache, self._longer = model, cache, longer
        weights = decode_weights(model)
        self._addresses = weights.addresses()
        device = cache.kv.device
        pages = math.ceil(context_length / cache.page_size)
        self._table = torch.zeros(max_rows + 1, pages, dtype=torch.int32, device=device)  # slot 0: padding lanes
        last = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        overlap = torch.cuda.get_device_capability(device) >= (9, 0)
        rotary = rotary_table(model, context_length, cache.kv.dtype)
        self._stack = DecodeStack(
            weights, cache.kv, self._table, last, rotary, max_rows + extra_rows, overlap=overlap, routes=cache.routes
        )
        self._head = HeadSampler(self._stack, max_rows)
        self._max_rows, self.step_rows = max_rows, max_rows + extra_rows if extra_rows else 0
        self._sizes, self._wide_sizes = ladder(max_rows), wide_ladder(max_rows, extra_rows)
        self._graphs: dict[tuple[int, float, bool], torch.cuda.CUDAGraph] = {}
        self._known: list[tuple[tuple[int, int], int] | None] = [None] * max_rows  # (key, next position) by lane
        self._inputs = [_pinned(STEP_FIELDS, max_rows + extra_rows) for _ in range(DEPTH)]
        self._tables = [_pinned(max_rows, pages) for _ in range(DEPTH)]
        self._outputs = [_pinned(2, max_rows) for _ in range(DEPTH)]
        self._done = [torch.cuda.Event() for _ in range(DEPTH)]
        self._turn = 0
        self.replays = 0
        self.captures = 0
        for size in self._sizes:
            self._graph(size, temperature)
        for size in self._wide_sizes:
            self._graph(size, temperature, wide=True)

    def run(self, chunks: Sequence[Chunk], temperature: float) -> Draws:
        return self.submit(chunks, temperature).read()

    @torch.no_grad()
    def submit(self, chunks: Sequence[Chunk], temperature: float) -> PendingReplay:
        """Queues a step. Chunks of one token may name `LAST_DRAW` if their lane drew in the step before."""
        if any(chunk.start == 0 for chunk in chunks):
            check_addresses(self._model, self._addresses)
        inside = fitting(chunks, self.step_rows)
        outside = [chunk for chunk, fits in zip(chunks, inside, strict=True) if not fits]
        before = self._run_longer(outside, temperature) if outside else Draws([], [])
        if not any(inside):
            return PendingReplay(before, [], self._outputs[0], None)
        turn = self._turn
        self._turn = (turn + 1) % DEPTH
        self._replay([chunk for chunk, fits in zip(chunks, inside, strict=True) if fits], temperature, turn)
        return PendingReplay(before, _order(chunks, inside), self._outputs[turn], self._done[turn])

    def _run_longer(self, chunks: list[Chunk], temperature: float) -> Draws:
        draws = self._longer.submit(chunks, temperature).read()
        for chunk in chunks:
            self._known[chunk.lane] = None
        slots = torch.tensor([chunk.lane + 1 for chunk in chunks if chunk.sample], device=self._table.device)
        tokens = torch.tensor(draws.tokens, dtype=torch.int32, device=self._table.device)
        self._stack.last.index_copy_(0, slots, tokens)
        return draws

    def _replay(self, chunks: list[Chunk], temperature: float, turn: int) -> None:
        lanes = sum(len(chunk.token_ids) for chunk in chunks)
        wide = lanes > len(chunks)
        size = next(size for size in (self._wide_sizes if wide else self._sizes) if size >= lanes)
        graph = self._graph(size, temperature, wide)
        inputs = self._inputs[turn]
        self._done[turn].synchronize()  # the step that last used these buffers has been copied
        self._send_new_tables(chunks, self._tables[turn])
        fill_step(inputs.numpy(), chunks, self._cache.page_size, self._stack.tokens)
        self._stack.step.copy_(inputs, non_blocking=True)
        graph.replay()
        self.replays += 1
        self._outputs[turn].copy_(self._head.draws, non_blocking=True)
        self._done[turn].record()

    def _send_new_tables(self, chunks: list[Chunk], staging: Tensor) -> None:
        """Uploads the page tables of lanes that do not go on where the device knows them to stand."""
        for chunk in chunks:
            if self._known[chunk.lane] != (chunk.key, chunk.start):
                count = len(chunk.pages)
                pages = staging[chunk.lane, :count]
                pages.numpy()[:] = chunk.pages
                self._table[chunk.lane + 1, :count].copy_(pages, non_blocking=True)
            self._known[chunk.lane] = (chunk.key, chunk.start + len(chunk.token_ids))

    def _graph(self, size: int, temperature: float, wide: bool = False) -> torch.cuda.CUDAGraph:
        graph = self._graphs.get((size, temperature, wide))
        if graph is None:
            graph = self._graphs[size, temperature, wide] = self._capture(size, temperature, wide)
        return graph

    def _capture(self, size: int, temperature: float, wide: bool) -> torch.cuda.CUDAGraph:
        # Padding lanes only: the first run compiles the kernels and touches nothing but the scratch page.
        with capturing():
            self._stack.step.zero_()
            self._launch(size, temperature, wide)
            torch.cuda.synchronize(self._cache.kv.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # a checkpoint may be copied meanwhile
                self._launch(size, temperature, wide)
        self.captures += 1
        return graph

    def _launch(self, size: int, temperature: float, wide: bool = False) -> None:
        self._stack.launch(size, together=wide)
        self._head.launch(min(size, self._max_rows), temperature)  # lanes that draw come first, at most `max_rows`


def rotary_table(model: PreTrainedModel, context_length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The model's own rotary cosines and sines of every position, each [context_length, D]."""
    device = model.device
    positions = torch.arange(context_length, device=device)[None]
    rotary: Any = model.base_model.rotary_emb
    cos, sin = rotary(torch.empty(0, dtype=dtype, device=device), positions)
    # GPT-OSS's gives one column for both halves of a head.
    attention: Any = model.base_model.layers[0].self_attn  # type: ignore[index, union-attr]
    halves = attention.head_dim // cos.shape[-1]
    return cos[0].repeat(1, halves), sin[0].repeat(1, halves)


def _pinned(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, pin_memory=True)


def fitting(chunks: Sequence[Chunk], step_rows: int) -> list[bool]:
    """Which chunks take the graph, a lane for each token: those of one token, then the shortest while lanes last."""
    inside = [len(chunk.token_ids) == 1 for chunk in chunks]
    lanes = sum(inside)
    for place in sorted((i for i, short in enumerate(inside) if not short), key=lambda i: len(chunks[i].token_ids)):
        lanes += len(chunks[place].token_ids)
        if lanes > step_rows:
            break
        inside[place] = True
    return inside


def fill_step(view: np.ndarray, chunks: list[Chunk], page_size: int, together: int) -> None:
    """One column per lane: first the last token of each chunk, which may draw, then the others. Up to `together` of
    them read their past at once. Columns beyond are padding lanes, token 0 at position 0 of the scratch page."""
    count = len(chunks)
    view[:, count:] = 0
    words = view.view(np.uint32)
    ends = [chunk.start + len(chunk.token_ids) - 1 for chunk in chunks]
    view[TOKEN, :count] = [chunk.token_ids[-1] for chunk in chunks]
    view[POSITION, :count] = ends
    words[KEY0, :count] = [chunk.key[0] for chunk in chunks]
    words[KEY1, :count] = [chunk.key[1] for chunk in chunks]
    view[SLOT, :count] = view[FEED, :count] = [chunk.lane + 1 for chunk in chunks]
    view[SPAN, :count] = 1
    view[PAGE, :count] = [chunk.pages[end // page_size] for chunk, end in zip(chunks, ends, strict=True)]
    for chunk in chunks:
        others = len(chunk.token_ids) - 1
        if others:
            places = np.arange(chunk.start, chunk.start + others)
            columns = slice(count, count + others)
            view[TOKEN, columns], view[POSITION, columns] = chunk.token_ids[:-1], places
            view[SLOT, columns] = chunk.lane + 1
            view[SPAN, columns][::together] = np.minimum(together, np.arange(others, 0, -together))
            view[PAGE, columns] = np.asarray(chunk.pages, dtype=np.int32)[places // page_size]
            count += others


def _order(chunks: Sequence[Chunk], inside: Sequence[bool]) -> list[tuple[bool, int]]:
    """For each chunk that samples: whether it took the graph, and its place among the lanes or draws there."""
    order, lane, drawn = [], 0, 0
    for chunk, fits in zip(chunks, inside, strict=True):
        if chunk.sample:
            order.append((fits, lane if fits else drawn))
            drawn += not fits
        lane += fits
    return order
