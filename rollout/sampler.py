"""Draws tokens: Gumbel-max over fp32 logits, with the log-probability of what was drawn.

The whole softmax is sampled: top-k and top-p would draw from another distribution than the one the update
differentiates. This is the reference; `rollout.sampling_kernel` fuses the same function on CUDA.
"""

from __future__ import annotations

from torch import Tensor

from rollout.noise import gumbel


def sample(logits: Tensor, keys: Tensor, positions: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """One draw per row.

    logits: already divided by the temperature (`modeling.logprob.head_logits`), fp32  # [B, V]
    keys: `rollout.noise.row_key` words as int32  # [B, 2]
    positions: index in the token line of the token to draw  # [B]
    temperature: 0 takes the largest logit; any other value adds the noise
    returns token ids [B] (lowest id on a tie) and their log-probabilities [B], fp32
    """
    scores = logits if temperature == 0 else logits + gumbel(keys, positions, logits.shape[1])
    tokens = scores.argmax(dim=-1)
    logprobs = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(dim=-1)
    return tokens, logprobs
