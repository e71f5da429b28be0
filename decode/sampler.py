"""Draws tokens: Gumbel-max over fp32 logits, with the log-probability of what was drawn.

Training samples the whole softmax: top-k and top-p would draw from another distribution than the one the update
differentiates. Evaluation may `truncate` first; noise and log-probability then are those of what is left. This is the
reference; `decode.sampling_kernel` fuses the same function on CUDA.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decode.noise import gumbel


def sample(logits: Tensor, keys: Tensor, positions: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """One draw per row.

    logits: already divided by the temperature (`modeling.logprob.head_logits`), fp32  # [B, V]
    keys: `decode.noise.row_key` words as int32  # [B, 2]
    positions: index in the token line of the token to draw  # [B]
    temperature: 0 takes the largest logit; any other value adds the noise
    returns token ids [B] (lowest id on a tie) and their log-probabilities [B], fp32
    """
    scores = logits if temperature == 0 else logits + gumbel(keys, positions, logits.shape[1])
    tokens = scores.argmax(dim=-1)
    logprobs = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(dim=-1)
    return tokens, logprobs


def truncate(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Minus infinity for every token outside the `top_k` likeliest (0: all), then outside the fewest likeliest that
    together hold `top_p` of what is left (1: all; Holtzman et al. 2020). Tokens as likely as the last one stay.

    logits: as `sample` takes them  # [B, V]
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
