"""Decodes inside captured CUDA graphs: one replay per step, whatever the rows, their lengths and their pages.

Chunks of one token (sampled or forced) take the graph; longer ones go first, through the decoder given for them. A
graph is captured for each size of a ladder that ends at the largest batch, once per temperature; a smaller batch is
padded with rows that own nothing but the scratch page. Per step the host writes one small pinned buffer, copies it,
replays, and reads ids and log-probs back. Page tables and the last drawn token of each row stay on the device: the
host sends a row's whole table when the row is new, and one page per step after that.

Invariants: nothing is captured that allocates or depends on a value; parameters stay where they were captured, which
is checked before every step with longer chunks (each rollout starts with one). `submit` may be called again before the
draws of the step before are read, with `LAST_DRAW` as the token of rows that drew in it.
Left out: models that `modeling.fused` refuses; they decode eagerly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from modeling.decode_stack import KEY0, KEY1, PAGE, POSITION, SLOT, TOKEN, DecodeStack
from modeling.fused import check_addresses, decode_weights
from rollout.cache import PagedCache
from rollout.decoder import Decoder, Draws
from rollout.fallback import capturing
from rollout.sampling_kernel import HeadSampler
from rollout.scheduler import Chunk

DEPTH = 2  # steps in flight: the host may prepare one while another runs


def ladder(max_rows: int) -> list[int]:
    """Batch sizes with a graph: powers of two from 4, and the maximum itself."""
    sizes = [size for size in (1 << power for power in range(2, 31)) if size < max_rows]
    return [*sizes, max_rows]


class Flight:
    """The draws of a step that may still be running (a `rollout.decoder.Pending`); `read` waits for them."""

    def __init__(self, before: Draws, order: list[tuple[bool, int]], host: Tensor, done: torch.cuda.Event | None):
        self._before, self._order, self._host, self._done = before, order, host, done

    def read(self) -> Draws:
        """Must be called before `DEPTH` further steps are submitted."""
        if self._done is None:
            return self._before
        self._done.synchronize()
        tokens, logprobs = self._host[0].tolist(), self._host[1].view(torch.float32).tolist()
        return Draws(
            [tokens[i] if short else self._before.tokens[i] for short, i in self._order],
            [logprobs[i] if short else self._before.logprobs[i] for short, i in self._order],
        )


class GraphDecoder:
    """A `rollout.decoder.Decoder`; see the module."""

    pipelined = True

    def __init__(
        self, model: PreTrainedModel, cache: PagedCache, longer: Decoder, *, max_rows: int, context_length: int,
        temperature: float,
    ):  # fmt: skip
        """longer: computes chunks of more than one token; temperature: the one to capture for now.

        Raises `modeling.fused.UnsupportedModel` for a model that the decode kernels do not restate; it and `submit`
        raise `rollout.fallback.CaptureError` where the device refuses a graph.
        """
        self._model, self._cache, self._longer = model, cache, longer
        weights = decode_weights(model)
        self._addresses = weights.addresses()
        device = cache.kv.device
        pages = math.ceil(context_length / cache.page_size)
        self._table = torch.zeros(max_rows + 1, pages, dtype=torch.int32, device=device)  # slot 0: padding rows
        last = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        overlap = torch.cuda.get_device_capability(device) >= (9, 0)
        rotary = rotary_table(model, context_length, cache.kv.dtype)
        self._stack = DecodeStack(weights, cache.kv, self._table, last, rotary, max_rows, overlap=overlap)
        self._head = HeadSampler(self._stack, max_rows)
        self._sizes = ladder(max_rows)
        self._graphs: dict[tuple[int, float], torch.cuda.CUDAGraph] = {}
        self._known: list[tuple[tuple[int, int], int] | None] = [None] * max_rows  # (key, next position) by row
        self._inputs = [_pinned(6, max_rows) for _ in range(DEPTH)]
        self._outputs = [_pinned(2, max_rows) for _ in range(DEPTH)]
        self._done = [torch.cuda.Event() for _ in range(DEPTH)]
        self._turn = 0
        self.replays = 0
        self.captures = 0
        for size in self._sizes:
            self._graph(size, temperature)

    def run(self, chunks: Sequence[Chunk], temperature: float) -> Draws:
        return self.submit(chunks, temperature).read()

    @torch.no_grad()
    def submit(self, chunks: Sequence[Chunk], temperature: float) -> Flight:
        """Queues a step. Chunks of one token may name `LAST_DRAW` if their row drew in the step before."""
        long = [chunk for chunk in chunks if len(chunk.token_ids) > 1]
        before = Draws([], [])
        if long:
            check_addresses(self._model, self._addresses)
            for chunk in long:
                self._known[chunk.row] = None
            before = self._longer.submit(long, temperature).read()
        if len(long) == len(chunks):
            return Flight(before, [], self._outputs[0], None)
        short = [chunk for chunk in chunks if len(chunk.token_ids) == 1]
        turn = self._turn
        self._turn = (turn + 1) % DEPTH
        self._replay(short, temperature, turn)
        return Flight(before, _order(chunks), self._outputs[turn], self._done[turn])

    def _replay(self, chunks: list[Chunk], temperature: float, turn: int) -> None:
        size = next(size for size in self._sizes if size >= len(chunks))
        graph = self._graph(size, temperature)
        self._send_new_tables(chunks)
        inputs = self._inputs[turn]
        self._done[turn].synchronize()  # the step that last used these buffers has been copied
        _fill(inputs.numpy(), chunks, self._cache.page_size)
        self._stack.step.copy_(inputs, non_blocking=True)
        graph.replay()
        self.replays += 1
        self._outputs[turn].copy_(self._head.draws, non_blocking=True)
        self._done[turn].record()

    def _send_new_tables(self, chunks: list[Chunk]) -> None:
        """Uploads the page tables of rows that are not the ones, one token later, that the device knows."""
        new = []
        for chunk in chunks:
            if self._known[chunk.row] != (chunk.key, chunk.start):
                new.append(chunk)
            self._known[chunk.row] = (chunk.key, chunk.start + 1)
        if new:
            rows = np.zeros((len(new), self._table.shape[1]), dtype=np.int32)
            for line, chunk in zip(rows, new, strict=True):
                line[: len(chunk.pages)] = chunk.pages
            slots = torch.tensor([chunk.row + 1 for chunk in new], device=self._table.device)
            self._table.index_copy_(0, slots, torch.from_numpy(rows).to(self._table.device))

    def _graph(self, size: int, temperature: float) -> torch.cuda.CUDAGraph:
        graph = self._graphs.get((size, temperature))
        if graph is None:
            graph = self._graphs[size, temperature] = self._capture(size, temperature)
        return graph

    def _capture(self, size: int, temperature: float) -> torch.cuda.CUDAGraph:
        # Padding rows only: the first run compiles the kernels and touches nothing but the scratch page.
        with capturing():
            self._stack.step.zero_()
            self._launch(size, temperature)
            torch.cuda.synchronize(self._cache.kv.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # a checkpoint may be copied meanwhile
                self._launch(size, temperature)
        self.captures += 1
        return graph

    def _launch(self, size: int, temperature: float) -> None:
        self._stack.launch(size)
        self._head.launch(size, temperature)


def rotary_table(model: PreTrainedModel, context_length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The model's own rotary cosines and sines of every position, each [context_length, D]."""
    device = model.device
    positions = torch.arange(context_length, device=device)[None]
    rotary: Any = model.base_model.rotary_emb
    cos, sin = rotary(torch.empty(0, dtype=dtype, device=device), positions)
    return cos[0].contiguous(), sin[0].contiguous()


def _pinned(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, pin_memory=True)


def _fill(view: np.ndarray, chunks: list[Chunk], page_size: int) -> None:
    """One column per row; columns beyond the chunks are padding rows: token 0 at position 0 of the scratch page."""
    count = len(chunks)
    view[:, count:] = 0
    words = view.view(np.uint32)
    view[TOKEN, :count] = [chunk.token_ids[0] for chunk in chunks]
    view[POSITION, :count] = [chunk.start for chunk in chunks]
    words[KEY0, :count] = [chunk.key[0] for chunk in chunks]
    words[KEY1, :count] = [chunk.key[1] for chunk in chunks]
    view[SLOT, :count] = [chunk.row + 1 for chunk in chunks]
    view[PAGE, :count] = [chunk.pages[chunk.start // page_size] for chunk in chunks]


def _order(chunks: Sequence[Chunk]) -> list[tuple[bool, int]]:
    """For each chunk that samples: whether it took the graph, and its place among the rows or draws there."""
    order, row, drawn = [], 0, 0
    for chunk in chunks:
        short = len(chunk.token_ids) == 1
        if chunk.sample:
            order.append((short, row if short else drawn))
            drawn += not short
        row += short
    return order
