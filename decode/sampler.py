"""Draws tokens: Gumbel-max over fp32 logits, with the log-probability of what was drawn.

Training samples the whole softmax: top-k and top-p would draw from another distribution than the one the update
differentiates. Evaluation may truncate first; noise and log-probability then are those of what is left. This is the
reference; `decode.sampling_kernel.sample` is the same function on CUDA, without truncation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from decode.interface import Chunk, Draws
from decode.noise import gumbel
from modeling.logprob import head_logits


def sample(
    logits: Tensor, keys: Tensor, positions: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """One draw per sequence.

    logits: of the model's head, not divided by the temperature; fp32  # [B, V]
    keys: `decode.noise.row_key` words as int32  # [B, 2]
    positions: index in the sequence of the token to draw  # [B]
    temperature: 0 takes the largest logit, with log-probabilities at 1; any other value divides and adds the noise
    top_k, top_p: of `truncate`, after the division
    returns token ids [B] (lowest id on a tie) and their log-probabilities [B], fp32
    """
    scaled = logits if temperature in (0.0, 1.0) else logits / temperature
    scaled = truncate(scaled, top_k, top_p)
    scores = scaled if temperature == 0 else scaled + gumbel(keys, positions, logits.shape[1])
    tokens = scores.argmax(dim=-1)
    logprobs = scaled.gather(1, tokens[:, None])[:, 0] - scaled.logsumexp(dim=-1)
    return tokens, logprobs


def truncate(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Minus infinity for every token outside the `top_k` likeliest (0: all), then outside the fewest likeliest that
    together hold `top_p` of what is left (1: all; Holtzman et al. 2020). Tokens as likely as the last one stay.

    logits: divided by the temperature  # [B, V]
    """
    if 0 < top_k < logits.shape[1]:
        smallest = logits.topk(top_k, dim=-1).values[:, -1:]  # [B, 1]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    if top_p < 1:
        ordered = logits.sort(dim=-1, descending=True).values  # [B, V]
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities  # what the likelier ones hold; 0 for the first
        smallest = torch.where(before < top_p, ordered, float("inf")).amin(dim=-1, keepdim=True)  # [B, 1]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    return logits


def draw(
    sampler: Callable[..., tuple[Tensor, Tensor]], hidden: Tensor, head: Tensor, chunks: Sequence[Chunk],
    temperature: float, **truncation: Any,
) -> Draws:  # fmt: skip
    """The next token of each chunk that samples, from the hidden states of all chunks' tokens, end to end.

    sampler: `sample` or the kernel's; hidden [N, H]; head: weight of the LM head  # [V, H]
    """
    drawing = [i for i, chunk in enumerate(chunks) if chunk.sample]
    if not drawing:
        return Draws([], [])
    ends = torch.tensor([len(c.token_ids) for c in chunks]).cumsum(0)[drawing] - 1
    logits = head_logits(hidden.index_select(0, ends.to(hidden.device)), head, 1.0)
    keys = torch.tensor([chunks[i].key for i in drawing], dtype=torch.int64, device=hidden.device).to(torch.int32)
    positions = torch.tensor([chunks[i].start + len(chunks[i].token_ids) for i in drawing], device=hidden.device)
    tokens, logprobs = sampler(logits, keys, positions, temperature, **truncation)
    return Draws(tokens.tolist(), logprobs.tolist())
