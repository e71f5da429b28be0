"""One decode step of a whole model, from token ids to the normed hidden states, as a fixed list of kernel launches.

Per layer seven kernels: q/k/v product, attention, output product, residual and norm, gated product, down product,
residual and norm. One more opens the step: embeddings, first norm, page tables, the plan of the attention. They
restate Qwen3's, Qwen2's and Llama's decoder layer over the model's live weights, with the modules' rounding points,
and GPT-OSS's, whose mixture of experts (`decode.experts`) takes the place of the gated and the down product;
`tests/decode/test_stack.py` holds them to the modules. A product with LoRA has one small kernel more before it
(`decode.adapters`).

Several new tokens of one sequence may take a lane each: one more kernel a layer then writes all new keys before the
attention reads any (`launch(lanes, together=True)`), and adjoining lanes may share the reading of their past.

Invariants: `launch` allocates nothing and reads no value on the host, so it can be captured; every kernel follows the
rule of `decode.overlap`; buffers hold whole tiles of lanes, and padding lanes own the scratch page 0 alone.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode.adapters import AdapterStage
from decode.attention import decode_attention_kernel, plan_items
from decode.experts import ExpertStage
from decode.heads import write_keys_kernel
from decode.overlap import piece_bytes
from decode.products import gated_product_kernel, join_kernel, rms_norm, split_product_kernel
from decode.tiles import AttentionTiles, Tiles, attention_tiles, product_tiles, rows_tile, tokens_together
from decode.weights import DecodeWeights, ExpertWeights, GatedWeights, LayerWeights, distance

# Fields of the step buffer, one int32 per lane each.
STEP_FIELDS = 8
TOKEN, POSITION, KEY0, KEY1, SLOT, PAGE, FEED, SPAN = range(STEP_FIELDS)
# FEED: the slot that keeps the draw, or 0. SPAN: how many lanes from this one on, consecutive tokens of one sequence,
# the attention takes together; 0 for those taken by another and for padding; above 1 only where launched `together`.
MOST_PROGRAMS = 1024  # that a lane's past may be cut into, over all lanes and heads
MOST_SPLITS = 8  # of a product's k range
NO_WINDOW = tl.constexpr(1 << 30)


@triton.jit(do_not_specialize=["lanes"])
def open_step_kernel(
    step_ptr, last_ptr, table_ptr, embedding_ptr, norm_ptr, h_ptr, normed_ptr,
    items_ptr, first_ptr, count_ptr, lanes, kv_heads, target, stride_step, stride_table, stride_lanes, K, eps,
    BLOCK_K: tl.constexpr, P: tl.constexpr, LANES: tl.constexpr, ITEMS: tl.constexpr, BN: tl.constexpr,
    WINDOW: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """Embeddings, the page of the new token, and the attention's plans.

    grid (lanes + 1,), or (lanes + 2,) with a WINDOW; the last programs plan: items [2, 3, ITEMS], for all tokens and
    for the window; first, count [2, stride_lanes]
    """
    lane = tl.program_id(0)
    if lane >= lanes:
        kind = lane - lanes
        window = tl.where(kind == 0, NO_WINDOW, WINDOW)
        plan_items(
            step_ptr + stride_step, step_ptr + 7 * stride_step, items_ptr + kind * 3 * ITEMS,
            first_ptr + kind * stride_lanes, count_ptr + kind * stride_lanes, lanes, kv_heads, target, window, LANES,
            ITEMS, BN,
        )  # fmt: skip
    else:
        slot = tl.load(step_ptr + 4 * stride_step + lane)
        position = tl.load(step_ptr + stride_step + lane)
        page = tl.load(step_ptr + 5 * stride_step + lane)
        tl.store(table_ptr + slot.to(tl.int64) * stride_table + position // P, page)
        token = tl.load(step_ptr + lane)
        if token < 0:
            token = tl.load(last_ptr + slot)
        column = tl.arange(0, BLOCK_K)
        mask = column < K
        h = tl.load(embedding_ptr + token.to(tl.int64) * K + column, mask=mask, other=0.0)
        tl.store(h_ptr + lane * K + column, h, mask=mask)
        norm = tl.load(norm_ptr + column, mask=mask, other=0.0)
        tl.store(normed_ptr + lane * K + column, rms_norm(h, norm, K, eps, LATE), mask=mask)


class DecodeStack:
    """Buffers for up to `max_lanes` decoding lanes, and the launches.

    kv: [L, 2, num_pages, G, page_size, D] in the model dtype; table: pages of each slot [slots, pages] int32;
    last: token drawn last in each slot [slots] int32; rotary: (cos, sin), each [context, D] in the model dtype.
    """

    def __init__(
        self, weights: DecodeWeights, kv: Tensor, table: Tensor, last: Tensor, rotary: tuple[Tensor, Tensor],
        max_lanes: int, *, overlap: bool, routes: Tensor | None = None,
    ):  # fmt: skip
        """routes: where each token's experts are written, beside its keys  # [L, num_pages, page_size, k] uint8"""
        self.weights, self.kv, self.table, self.last, self.rotary = weights, kv, table, last, rotary
        self.overlap = overlap  # programmatic dependent launch: Hopper and later
        self.dtype, self.device = kv.dtype, kv.device
        self.hidden = weights.embedding.shape[1]
        self.page_size = kv.shape[4]
        if self.page_size % 16:
            raise ValueError(f"rollout.page_size={self.page_size}: the decode kernel needs a multiple of 16")
        self.group = weights.heads // weights.kv_heads
        self.width = (weights.heads + 2 * weights.kv_heads) * weights.head_size
        self.padded_lanes = math.ceil(max_lanes / rows_tile(max_lanes)) * rows_tile(max_lanes)
        self.override: dict[str, Tiles] = {}  # by kind; benchmarks try others than the rule's
        self.attention_override: AttentionTiles | None = None
        self.routes, mlp = routes, weights.layers[0].mlp
        self.inner = mlp.gate.shape[0] if isinstance(mlp, GatedWeights) else 0
        self.tokens = tokens_together(self.group)  # of one sequence that the attention takes together, at most
        self.items = triton.next_power_of_2(max_lanes + math.ceil(MOST_PROGRAMS / weights.kv_heads))
        self._allocate(max_lanes)
        self.experts: ExpertStage | None = None
        if isinstance(mlp, ExpertWeights):
            step = self.step
            self.experts = ExpertStage(mlp, max_lanes, overlap, step[POSITION], step[SLOT], table, self.page_size)

    def _allocate(self, max_lanes: int) -> None:
        w = self.weights

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.step = zeros(STEP_FIELDS, max_lanes, dtype=torch.int32)
        self.h = zeros(self.padded_lanes, self.hidden, dtype=self.dtype)
        self.normed = zeros(self.padded_lanes, self.hidden, dtype=self.dtype)
        self.attended = zeros(self.padded_lanes, w.heads * w.head_size, dtype=self.dtype)
        self.gated = zeros(self.padded_lanes, self.inner, dtype=self.dtype)
        self.qkv = zeros(MOST_SPLITS, self.padded_lanes, self.width, dtype=torch.float32)
        self.low = AdapterStage(w, self.padded_lanes, self.overlap)
        self.parts = zeros(MOST_SPLITS, self.padded_lanes, self.hidden, dtype=torch.float32)
        self.arrivals = zeros(max_lanes * w.kv_heads, dtype=torch.int32)
        self.plan = zeros(2, 3, self.items, dtype=torch.int32)  # of all tokens, of the window
        self.first, self.count = zeros(2, max_lanes, dtype=torch.int32), zeros(2, max_lanes, dtype=torch.int32)
        self.item_parts = zeros(self.items, w.heads, self.tokens, w.head_size, dtype=torch.float32)
        self.item_sums = zeros(self.items, w.heads, self.tokens, 2, dtype=torch.float32)

    @property
    def element_size(self) -> int:
        return self.kv.element_size()

    def tiles(self, kind: str, lanes: int, n: int, k: int, divisor: int = 0, adapter: int = 0) -> Tiles:
        return self.override.get(kind) or product_tiles(kind, lanes, n, k, self.element_size, divisor, adapter)

    def attention_tiles(self, lanes: int, together: bool) -> AttentionTiles:
        weights = self.width * self.hidden
        return self.attention_override or attention_tiles(
            lanes, self.weights.kv_heads, weights, self.element_size, together
        )

    def launch(self, lanes: int, together: bool = False) -> None:
        """All kernels of one step over the first `lanes` lanes of `step`; leaves the last layer's output, normed.

        together: lanes may belong to one sequence; each sees the keys that the others write in this step.
        """
        layers, w = self.weights.layers, self.weights
        wide, narrow = w.heads * w.head_size, w.kv_heads * w.head_size
        self._open(lanes, together)
        for index, layer in enumerate(layers):
            after = layers[index + 1].input_norm if index + 1 < len(layers) else w.norm
            following = layers[index + 1].q if index + 1 < len(layers) else w.head
            splits = self._product(
                "qkv", lanes, self.normed, (layer.q, layer.k, layer.v), layer, divisor=math.gcd(wide, narrow)
            )
            if together:
                self._write_keys(lanes, index, layer, splits)
            self._attend(lanes, index, layer, splits, self.tokens if together else 0)
            self._join(
                lanes, self._product("o", lanes, self.attended, (layer.o,), layer), layer.post_norm, layer.o_bias
            )
            self._join(lanes, self._mlp(lanes, index, layer, following), after)

    def _open(self, lanes: int, together: bool) -> None:
        t = self.attention_tiles(lanes, together)
        w = self.weights
        open_step_kernel[(lanes + 1 + (w.window > 0),)](
            self.step, self.last, self.table, w.embedding, w.layers[0].input_norm, self.h,
            self.normed, self.plan, self.first, self.count, lanes, w.kv_heads, t.target,
            self.step.stride(0), self.table.stride(0), self.first.stride(0), self.hidden, w.eps,
            BLOCK_K=triton.next_power_of_2(self.hidden), P=self.page_size,
            LANES=triton.next_power_of_2(self.first.shape[1]), ITEMS=self.items, BN=t.bn, WINDOW=w.window,
            LATE=w.late_norms, num_warps=4,
        )  # fmt: skip

    def _product(
        self, kind: str, lanes: int, x: Tensor, weights: tuple[Tensor, ...], layer: LayerWeights,
        following: Tensor | None = None, divisor: int = 0,
    ) -> int:  # fmt: skip
        """Leaves the parts of x times the weights in `qkv` or `parts`; returns how many.

        following: weights to prefetch into L2, used two launches later
        """
        low = self.low.launch(lanes, x, layer.adapters.get(kind, ()))
        n, k = sum(weight.shape[0] for weight in weights), x.shape[1]
        t = self.tiles(kind, lanes, n, k, divisor, low.padded)
        out = self.qkv if kind == "qkv" else self.parts
        first, second, third = (*weights, weights[0], weights[0])[:3]
        heights = (first.shape[0], second.shape[0]) if len(weights) == 3 else (n, 0)
        grid = (math.ceil(lanes / t.bm), math.ceil(n / t.bn), t.splits)
        ask = (first, 0) if following is None else (following, piece_bytes(following, math.prod(grid)))
        split_product_kernel[grid](
            x, first, lanes, distance(first, second), distance(first, third), out, *ask, *low.tensors, n, *heights, k,
            out.stride(0), *low.numbers,
            BN=t.bn, BM=t.bm, BK=t.bk, SPLITS=t.splits, EVEN_K=t.even(k), STAGES=t.stages, AHEAD=t.ahead_of(k),
            PDL=self.overlap, RP=low.padded, LOW_SPLITS=low.splits, num_warps=t.warps, launch_pdl=self.overlap,
        )  # fmt: skip
        return t.splits

    def _join(self, lanes: int, splits: int, norm: Tensor, bias: Tensor | None = None) -> None:
        block = triton.next_power_of_2(self.hidden)
        join_kernel[(lanes,)](
            self.parts, self.h, norm, self.normed, norm if bias is None else bias, self.hidden, self.parts.stride(0),
            self.weights.eps, BLOCK=block, SPLITS=splits, BIAS=bias is not None, LATE=self.weights.late_norms,
            PDL=self.overlap, num_warps=min(16, max(1, block // 256)), launch_pdl=self.overlap,
        )  # fmt: skip

    def _write_keys(self, lanes: int, index: int, layer: LayerWeights, splits: int) -> None:
        w, kv = self.weights, self.kv[index]
        write_keys_kernel[(lanes * w.kv_heads,)](
            self.qkv, *_biases(layer), *_norms(layer), *self.rotary, kv, self.step[POSITION], self.step[SLOT],
            self.table, w.eps, self.qkv.stride(0), self.table.stride(0), kv.stride(1), kv.stride(0), HEADS=w.kv_heads,
            GROUP=self.group, BH=triton.next_power_of_2(self.group + 2), D=w.head_size, P=self.page_size,
            SPLITS=splits, BIAS=layer.biases is not None, NORM=layer.head_norms is not None, PDL=self.overlap,
            num_warps=1, launch_pdl=self.overlap,
        )  # fmt: skip

    def _attend(self, lanes: int, index: int, layer: LayerWeights, splits: int, tokens: int) -> None:
        w, kv = self.weights, self.kv[index]
        t = self.attention_tiles(lanes, tokens > 0)
        items, plan = min(self.items, lanes + math.ceil(t.target / w.kv_heads)), int(layer.windowed)
        sinks = layer.q if layer.sinks is None else layer.sinks
        heads = tokens * self.group if tokens else self.group + 2
        decode_attention_kernel[(items * w.kv_heads,)](
            self.qkv, *_biases(layer), *_norms(layer), sinks, *self.rotary, kv, self.attended, self.step[POSITION],
            self.step[SLOT], self.step[SPAN], self.table, self.plan[plan], self.first[plan], self.count[plan],
            self.item_parts, self.item_sums, self.arrivals, w.scale * math.log2(math.e), w.eps, self.qkv.stride(0),
            self.table.stride(0), kv.stride(1), kv.stride(0), ITEMS=self.items, HEADS=w.kv_heads, GROUP=self.group,
            BH=triton.next_power_of_2(heads), D=w.head_size, P=self.page_size, BN=t.bn, W=t.warps, STAGES=t.stages,
            SPLITS=splits, BIAS=layer.biases is not None, NORM=layer.head_norms is not None,
            SINKS=layer.sinks is not None, WINDOW=w.window * plan, PREFETCH=t.prefetch, TOKENS=tokens,
            PDL=self.overlap, num_warps=t.warps, launch_pdl=self.overlap,
        )  # fmt: skip

    def _mlp(self, lanes: int, index: int, layer: LayerWeights, following: Tensor) -> int:
        """Leaves the parts of the MLP's output in `parts`; returns how many. following: see `_product`"""
        mlp = layer.mlp
        if isinstance(mlp, GatedWeights):
            self._gate(lanes, mlp, layer)
            return self._product("down", lanes, self.gated, (mlp.down,), layer, following)
        assert self.experts is not None
        routes = None if self.routes is None else self.routes[index]
        return self.experts.launch(lanes, mlp, self.normed, self.parts, routes)

    def _gate(self, lanes: int, mlp: GatedWeights, layer: LayerWeights) -> None:
        low = self.low.launch(lanes, self.normed, layer.adapters.get("gate_up", ()))
        n, k = mlp.gate.shape
        t = self.tiles("gate_up", lanes, 2 * n, k, adapter=low.padded)
        gated_product_kernel[(math.ceil(lanes / t.bm), math.ceil(2 * n / t.bn))](
            self.normed, mlp.gate, lanes, distance(mlp.gate, mlp.up), self.gated, *low.tensors[:3], n, k,
            *low.numbers, BN=t.bn, BM=t.bm, BK=t.bk,
            EVEN_K=t.even(k), STAGES=t.stages, AHEAD=t.ahead_of(k), PDL=self.overlap, RP=low.padded,
            LOW_SPLITS=low.splits, num_warps=t.warps, launch_pdl=self.overlap,
        )  # fmt: skip


def _biases(layer: LayerWeights) -> tuple[Tensor, ...]:
    return layer.biases or (layer.q,) * 3  # without biases, any pointer


def _norms(layer: LayerWeights) -> tuple[Tensor, ...]:
    return layer.head_norms or (layer.q,) * 2
