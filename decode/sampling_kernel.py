"""Fused sampler in Triton: Gumbel-max token and its log-prob in one pass over the logits, which need not exist.

Pass one looks at blocks of the vocabulary and leaves five numbers for each block and lane: the best noisy score, its
token, its logit, the largest logit and the sum of exponentials. It runs over logits in memory (`logits_kernel`) or in
the LM head's product itself (`head_kernel`). Pass two (`choose_kernel`) joins the blocks, ties to the lowest token.

score = logit / T + gumbel(lane key, position, token); logprob = logit / T - logsumexp(logits / T); T = 0: the largest
logit, with log-probs at T = 1. Logits are rounded to the model dtype first, as the model's own LM head rounds them.
The noise has the integers of `decode.noise`. Left out: top-k, top-p, penalties.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode.noise import GOLDEN, ODD
from decode.overlap import begin
from decode.products import accumulate, early_weights
from decode.stack import FEED, KEY0, POSITION, DecodeStack

_GOLDEN = tl.constexpr(GOLDEN)
_ODD = tl.constexpr(ODD)
FIELDS = 5  # numbers per block of the vocabulary and lane
LOGITS_BLOCK = 2048
LEAST_HEAD_TILE = 32  # columns of the logits in a block, at least


@triton.jit
def _mix(x):
    """murmur3's 32-bit finalizer (x: uint32)."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def lane_words(keys_ptr, positions_ptr, lanes, stride_keys, mask):
    """The two words that start the noise of each lane's next token; keys [2, stride_keys] int32, the lane's position
    is that of its input token, one before the token to draw."""
    position = tl.load(positions_ptr + lanes, mask=mask, other=0).to(tl.uint32, bitcast=True) + 1
    first = tl.load(keys_ptr + lanes, mask=mask, other=0).to(tl.uint32, bitcast=True)
    second = tl.load(keys_ptr + stride_keys + lanes, mask=mask, other=0).to(tl.uint32, bitcast=True)
    return _mix(first ^ position * tl.full((), _GOLDEN, tl.uint32)), _mix(
        second + position * tl.full((), _ODD, tl.uint32)
    )


@triton.jit
def log2(x, FAST: tl.constexpr):
    """log2 of normal positive x: the hardware's approximation (to 2^-22) if FAST, which the interpreter lacks."""
    if FAST:
        return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return tl.log2(x)


@triton.jit
def gumbel(first, second, token, FAST: tl.constexpr):
    """Standard Gumbel noise of uint32 lane words and tokens, broadcast against each other; fp32."""
    bits = _mix(_mix(token.to(tl.uint32) * tl.full((), _GOLDEN, tl.uint32) + first) ^ second)
    v = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)  # 2^-32, 1 - 2^-24
    # -log2(1 - v) by its series where 1 - v would lose v's digits, which is where the winners are
    series = 0.33333333 + v * (0.25 + v * (0.2 + v * (0.16666667 + v * 0.14285714)))
    series = 1.4426950408889634 * (v + v * v * (0.5 + v * series))
    exponential = tl.where(v < 0.0625, series, -log2(1.0 - v, FAST))  # in units of ln 2
    return -0.6931471805599453 * (log2(exponential, FAST) + -0.5287663729448977)  # log2(ln 2)


@triton.jit
def _summarize(logits, token, valid, first, second, out_ptr, stride_field, block, lanes, lane_mask, stride_lane,
               temperature, SAMPLE: tl.constexpr, TEMPERED: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """The five numbers of one vocabulary block for each lane; logits, token, valid [N, lanes], or 1 for either."""
    scaled = logits
    score = tl.where(valid, logits, float("-inf"))
    if SAMPLE:
        scaled = logits / temperature if TEMPERED else logits
        score = tl.where(valid, scaled + gumbel(first, second, token, FAST), float("-inf"))
    scaled = tl.where(valid, scaled, float("-inf"))
    best = tl.max(score, axis=0)
    choice = tl.min(tl.where(score == best[None, :], token, 0x7FFFFFFF), axis=0)
    chosen = tl.max(tl.where(token == choice[None, :], scaled, float("-inf")), axis=0)
    peak = tl.max(scaled, axis=0)
    total = tl.sum(tl.exp(scaled - peak[None, :]), axis=0)
    at = out_ptr + lanes * stride_lane + block
    tl.store(at, best, mask=lane_mask)
    tl.store(at + stride_field, choice.to(tl.float32, bitcast=True), mask=lane_mask)
    tl.store(at + 2 * stride_field, chosen, mask=lane_mask)
    tl.store(at + 3 * stride_field, peak, mask=lane_mask)
    tl.store(at + 4 * stride_field, total, mask=lane_mask)


@triton.jit
def logits_kernel(
    logits_ptr, keys_ptr, positions_ptr, out_ptr, V, stride_logits, stride_keys, stride_field, stride_lane,
    temperature, BLOCK: tl.constexpr, SAMPLE: tl.constexpr, TEMPERED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Pass one over logits [lanes, V] in memory.  grid (ceil(V / BLOCK), lanes)"""
    block, lane = tl.program_id(0), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)[:, None]  # [BLOCK, 1]
    lanes = lane + tl.arange(0, 1)
    valid = token < V
    logits = tl.load(logits_ptr + lane.to(tl.int64) * stride_logits + token, mask=valid, other=0.0).to(tl.float32)
    first, second = lane_words(keys_ptr, positions_ptr, lanes, stride_keys, lanes >= 0)
    _summarize(
        logits, token, valid, first[None, :], second[None, :], out_ptr, stride_field, block, lanes, lanes >= 0,
        stride_lane, temperature, SAMPLE, TEMPERED, FAST,
    )  # fmt: skip


@triton.jit(do_not_specialize=["lanes_live"])
def head_kernel(
    x_ptr, w_ptr, keys_ptr, positions_ptr, out_ptr, lanes_live, V, K, stride_keys, stride_field, stride_lane,
    temperature, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr, SAMPLE: tl.constexpr, TEMPERED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Pass one inside the LM head's product x Wᵀ.  grid (lanes / BM, ceil(V / BN)); x [lanes, K], w [V, K]"""
    block, m0 = tl.program_id(1), tl.program_id(0) * BM
    token = block * BN + tl.arange(0, BN)
    valid = token < V
    offsets = token.to(tl.int64) * K
    early = early_weights(w_ptr, offsets, valid, 0, AHEAD)
    begin(PDL)
    acc = accumulate(early, x_ptr, w_ptr, offsets, valid, m0, lanes_live, 0, K, K, BN, BM, BK, AHEAD, EVEN_K, STAGES)
    lanes = m0 + tl.arange(0, BM)
    logits = acc.to(x_ptr.dtype.element_ty).to(tl.float32)
    first, second = lane_words(keys_ptr, positions_ptr, lanes, stride_keys, lanes < lanes_live)
    _summarize(
        logits, token[:, None], valid[:, None], first[None, :], second[None, :], out_ptr, stride_field, block, lanes,
        lanes < lanes_live, stride_lane, temperature, SAMPLE, TEMPERED, FAST,
    )  # fmt: skip


@triton.jit
def choose_kernel(
    parts_ptr, draws_ptr, slots_ptr, last_ptr, blocks, stride_field, stride_lane, stride_draws,
    BLOCKS: tl.constexpr, FEED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Join the blocks of each lane.  grid (lanes,); draws [2, stride_draws] int32: token, log-prob's bits

    FEED: also leave the token in last[slots[lane]] for the lane's next step.
    """
    begin(PDL)
    lane = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    mask = block < blocks
    at = parts_ptr + lane * stride_lane + block
    score = tl.load(at, mask=mask, other=float("-inf"))
    token = tl.load(at + stride_field, mask=mask, other=0.0).to(tl.int32, bitcast=True)
    chosen = tl.load(at + 2 * stride_field, mask=mask, other=float("-inf"))
    peak = tl.load(at + 3 * stride_field, mask=mask, other=float("-inf"))
    total = tl.load(at + 4 * stride_field, mask=mask, other=0.0)
    best = tl.max(score, axis=0)
    choice = tl.min(tl.where((score == best) & mask, token, 0x7FFFFFFF), axis=0)
    logit = tl.max(tl.where((token == choice) & mask, chosen, float("-inf")), axis=0)
    highest = tl.max(peak, axis=0)
    logsumexp = highest + tl.log(tl.sum(tl.where(mask, total * tl.exp(peak - highest), 0.0), axis=0))
    tl.store(draws_ptr + lane, choice)
    tl.store(draws_ptr + stride_draws + lane, (logit - logsumexp).to(tl.int32, bitcast=True))
    if FEED:
        tl.store(last_ptr + tl.load(slots_ptr + lane), choice)


def sample(logits: Tensor, keys: Tensor, positions: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """`decode.sampler.sample` without truncation: tokens [B] int32 and log-probs [B] fp32.

    logits [B, V] in any float dtype, last dimension dense, not divided by the temperature; keys: the words of
    `decode.noise.row_key` as int32 bit patterns [B, 2]; positions: index in the sequence of the token to draw [B].
    """
    lanes, vocab = logits.shape
    blocks = triton.cdiv(vocab, LOGITS_BLOCK)
    parts = torch.empty(FIELDS, lanes, blocks, dtype=torch.float32, device=logits.device)
    draws = torch.empty(2, lanes, dtype=torch.int32, device=logits.device)
    logits_kernel[(blocks, lanes)](
        logits, keys.T.contiguous(), positions.to(torch.int32) - 1, parts, vocab, logits.stride(0), lanes,
        parts.stride(0), blocks, temperature, BLOCK=LOGITS_BLOCK, SAMPLE=temperature > 0,
        TEMPERED=temperature not in (0.0, 1.0), FAST=logits.is_cuda, num_warps=4,
    )  # fmt: skip
    choose_kernel[(lanes,)](
        parts, draws, draws, draws, blocks, parts.stride(0), blocks, lanes,
        BLOCKS=triton.next_power_of_2(blocks), FEED=False, PDL=False,
    )  # fmt: skip
    return draws[0], draws[1].view(torch.float32)


class HeadSampler:
    """LM head, sampling and feedback of the token, over the hidden states a `DecodeStack` leaves.

    draws: tokens and log-probs' bits of the last launch  # [2, max_lanes] int32
    """

    def __init__(self, stack: DecodeStack, max_lanes: int):
        self.stack = stack
        self.vocab, self.hidden = stack.weights.head.shape
        blocks = triton.cdiv(self.vocab, LEAST_HEAD_TILE)
        self.parts = torch.empty(FIELDS, max_lanes, blocks, dtype=torch.float32, device=stack.device)
        self.draws = torch.zeros(2, max_lanes, dtype=torch.int32, device=stack.device)

    def launch(self, lanes: int, temperature: float) -> None:
        stack = self.stack
        t = stack.tiles("head", lanes, self.vocab, self.hidden)
        blocks = triton.cdiv(self.vocab, t.bn)
        step, parts = stack.step, self.parts
        head_kernel[(triton.cdiv(lanes, t.bm), blocks)](
            stack.normed, stack.weights.head, step[KEY0], step[POSITION], parts, lanes, self.vocab, self.hidden,
            step.stride(0), parts.stride(0), parts.stride(1), temperature, BN=t.bn, BM=t.bm, BK=t.bk,
            EVEN_K=t.even(self.hidden), SAMPLE=temperature > 0, TEMPERED=temperature not in (0.0, 1.0),
            FAST=step.is_cuda, STAGES=t.stages, AHEAD=t.ahead_of(self.hidden), PDL=stack.overlap, num_warps=t.warps,
            launch_pdl=stack.overlap,
        )  # fmt: skip
        choose_kernel[(lanes,)](
            parts, self.draws, step[FEED], stack.last, blocks, parts.stride(0), parts.stride(1), self.draws.stride(0),
            BLOCKS=triton.next_power_of_2(blocks), FEED=True, PDL=stack.overlap, num_warps=4,
            launch_pdl=stack.overlap,
        )  # fmt: skip
