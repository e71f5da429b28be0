"""The one definition of a token's log-probability, used for sampling and for training.

Logits are the LM head's product in the model dtype, raised to fp32, then divided by the temperature; the log-softmax
is fp32. `token_logprobs` walks the head by chunks and recomputes each in the backward pass (non-reentrant: with a tied
head ZeRO-2 refuses a gradient that arrives twice), so that no more than one chunk of logits exists at a time.
On CUDA `modeling.logprob_kernel` computes the same function in fused passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from modeling.attention import MIN_ROWS

if TYPE_CHECKING:
    from modeling.divergence import Divergences

CHUNK_LOGITS = 1 << 25  # logits held at once: 134 MB in fp32, 220 rows at V = 151,936


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    logprobs: Tensor  # [M] fp32, differentiable
    entropy: Tensor  # [M] fp32 nats, no gradient
    top1: Tensor | None = None  # [M] fp32, 1 where no token is likelier than the target
    flips: Tensor | None = None  # [M] share of layers whose experts differ from those of sampling; None: dense
    balance: Tensor | None = None  # [M] fp32, differentiable: `modeling.routing.token_balance`; None: not asked for
    divergences: Divergences | None = None  # from a teacher, where there is one


def head_logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """hidden [M, H], weight [V, H] -> fp32 logits over the temperature [M, V]; temperature 0 (greedy) leaves them."""
    count = hidden.shape[0]
    if count < MIN_ROWS:
        hidden = F.pad(hidden, (0, 0, 0, MIN_ROWS - count))
    logits = F.linear(hidden, weight)[:count].float()
    return logits if temperature in (0.0, 1.0) else logits / temperature


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, keep_logits: bool = False
) -> TokenLogprobs:
    """Log-probability of each target, the entropy of its distribution, and whether the target is its top.

    keep_logits: CUDA only; keep all logits for the backward pass, [M, V] in the model dtype, instead of chunks that
        are computed twice

    hidden: final hidden states  # [M, H]
    weight: LM head  # [V, H]
    targets: token ids  # [M]
    """
    if hidden.device.type == "cuda":
        from modeling.logprob_kernel import FusedLogprobs  # needs Triton, which comes with torch's CUDA builds

        return TokenLogprobs(*FusedLogprobs.apply(hidden, weight, targets, temperature, keep_logits))
    chunk = max(1, CHUNK_LOGITS // weight.shape[0])
    if hidden.shape[0] <= chunk:
        return TokenLogprobs(*_chunk_logprobs(hidden, weight, targets, temperature))
    parts = [
        checkpoint(_chunk_logprobs, h, weight, t, temperature, use_reentrant=False)
        for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    logprobs, entropy, top1 = (torch.cat(figures) for figures in zip(*parts, strict=True))
    return TokenLogprobs(logprobs, entropy, top1)


def _chunk_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    logits = head_logits(hidden, weight, temperature)
    log_total = logits.logsumexp(dim=-1)
    chosen = logits.gather(1, targets[:, None])[:, 0]
    logprobs = chosen - log_total
    with torch.no_grad():
        top1 = (chosen >= logits.amax(dim=-1)).float()
        entropy = log_total - (torch.softmax(logits, dim=-1) * logits).sum(dim=-1)
    return logprobs, entropy, top1
