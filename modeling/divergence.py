"""Divergences between the policy and a teacher over the vocabulary, walked over both LM heads by chunks.

A chunk of logits of either side exists at a time and no more: the gradient by the policy's logits has a closed form,
so it is computed in the forward pass and multiplied into the gradients of hidden states and head at once, and nothing
is kept or computed again. The tokens' weights must therefore be known in the forward; only their weighted sum is
differentiable.

With p the policy, q the teacher (both softmaxes at temperature T), M = (1 - beta) p + beta q:

    forward_kl  sum q (log q - log p)                       slope s = 1 - q / p
    reverse_kl  sum p (log p - log q)                       s = log p - log q
    jsd         beta KL(q || M) + (1 - beta) KL(p || M)     s = (1 - beta) (log p - log M)

and the gradient by a logit is p (s - sum p s) / T. The divergences are those of Agarwal et al. 2024, "On-Policy
Distillation of Language Models", not multiplied by T^2 as Hinton et al. 2015 would: a change of T changes the step.

With top_k the teacher's k likeliest tokens stay and all others are one further outcome, on both sides. By the data
processing inequality that is a lower bound of the whole divergence, which renormalising the k tokens is not: mass that
the policy puts outside them would cost nothing.

On CUDA `modeling.divergence_kernel` computes the whole-vocabulary case in fused passes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modeling.logprob import CHUNK_LOGITS, TokenLogprobs, head_logits

LOG_FLOOR = -80.0  # nats: what is less likely counts as e^-80, so that logits of -inf leave loss and gradient finite


@dataclass(frozen=True, slots=True)
class Measure:
    kind: str  # forward_kl, reverse_kl or jsd
    beta: float  # of jsd
    temperature: float
    top_k: int  # 0: the whole vocabulary


@dataclass(frozen=True, slots=True)
class TeacherStates:
    """What the teacher left for the M predicting tokens of a micro-batch: its logits are `hidden @ head.T`."""

    hidden: Tensor  # [M, H'], in host memory where there is a device
    head: Tensor  # [V', H'] on the device
    measure: Measure


# For one micro-batch; log-probabilities of the sampled tokens alone where teacher.divergence is "sampled".
Lesson = TeacherStates | TokenLogprobs


@dataclass(frozen=True, slots=True)
class Divergences:
    loss: Tensor  # scalar fp32: sum of weight x value, differentiable
    values: Tensor  # [M] fp32 nats, no gradient, as are the others
    gap: Tensor  # [M] log p - log q of the sampled token: its mean estimates KL(policy || teacher)
    entropy: Tensor  # [M] of the teacher, nats


def weighted_divergence(
    hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor, states: TeacherStates
) -> Divergences:
    """The policy's divergence from the teacher. Where one vocabulary is longer, its further rows take no part.

    hidden: final hidden states of the policy  # [M, H]
    weight: its LM head  # [V, H]
    targets: sampled tokens; where one is a further row of the policy's, the gap is 0  # [M]
    token_weights: fp32, global denominators in them  # [M]
    """
    return Divergences(*_WeightedDivergence.apply(hidden, weight, targets, token_weights, states))


class _WeightedDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor, states: TeacherStates
    ) -> tuple[Tensor, ...]:
        shared = min(weight.shape[0], states.head.shape[0])
        student_head, teacher_head = weight[:shared], states.head[:shared]
        walk, rows = _walk(hidden.device.type, states.measure, shared)
        figures = torch.empty(3, len(targets), device=hidden.device, dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        scales = token_weights / states.measure.temperature
        known = targets < shared
        targets = targets.where(known, 0)
        for start in range(0, len(targets), rows):
            part = slice(start, start + rows)
            taught = states.hidden[part].to(hidden.device, non_blocking=True)
            gradient = walk(
                hidden[part], student_head, taught, teacher_head, targets[part], scales[part], states.measure,
                figures[:, part],
            )  # fmt: skip
            torch.mm(gradient, student_head, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight[:shared].addmm_(gradient.T, hidden[part])
            del gradient  # else it would stay beside both logits of the next chunk
        ctx.save_for_backward(grad_hidden, grad_weight)
        values, gap, entropy = figures
        gap = gap.where(known, 0.0)
        ctx.mark_non_differentiable(values, gap, entropy)
        return (token_weights * values).sum(), values, gap, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        by_weight = None if grad_weight is None else grad_weight.mul_(gradients[0])
        return grad_hidden.mul_(gradients[0]), by_weight, None, None, None


def _walk(device: str, measure: Measure, vocabulary: int) -> tuple[Any, int]:
    """What computes a chunk, and its rows."""
    if device == "cuda" and not measure.top_k:
        from modeling.divergence_kernel import CHUNK_ROWS, fused_gradient  # needs Triton, as torch's CUDA builds have

        return fused_gradient, CHUNK_ROWS
    return chunk_gradient, max(1, CHUNK_LOGITS // vocabulary)


def chunk_gradient(
    hidden: Tensor, head: Tensor, teacher_hidden: Tensor, teacher_head: Tensor, targets: Tensor, scales: Tensor,
    measure: Measure, figures: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient by the undivided logits of C tokens, in the model dtype  # [C, V]

    scales: weight over temperature  # [C]
    figures: filled with value, gap and teacher entropy of each token  # [3, C]
    """
    log_p = log_probabilities(head_logits(hidden, head, measure.temperature))
    log_q = log_probabilities(head_logits(teacher_hidden, teacher_head, measure.temperature))
    figures[1] = (log_p - log_q).gather(1, targets[:, None])[:, 0]
    figures[2] = -(log_q.exp() * log_q).sum(dim=1)
    figures[0], gradient = divergence_gradient(log_p, log_q, measure)
    return gradient.mul_(scales[:, None]).to(hidden.dtype)


def log_probabilities(logits: Tensor) -> Tensor:
    return logits.log_softmax(dim=-1).clamp_(min=LOG_FLOOR)


def divergence_gradient(log_p: Tensor, log_q: Tensor, measure: Measure) -> tuple[Tensor, Tensor]:
    """Value of each token and its gradient by the policy's logits over T: [C, V] twice -> [C], [C, V]"""
    p = log_p.exp()
    if not measure.top_k:
        values, slopes = _divergence(log_p, p, log_q, measure)
        return values, p * (slopes - (p * slopes).sum(dim=1, keepdim=True))
    ids = log_q.topk(measure.top_k, dim=1).indices
    few_p, few_q = _with_tail(log_p, ids), _with_tail(log_q, ids)
    values, slopes = _divergence(few_p, few_p.exp(), few_q, measure)
    slopes = slopes - (few_p.exp() * slopes).sum(dim=1, keepdim=True)
    slope_of_each = slopes[:, -1:].expand_as(p).scatter(1, ids, slopes[:, :-1])
    return values, p * slope_of_each


def _with_tail(log_p: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of the tokens `ids` and of all others together: [C, V], [C, k] -> [C, k + 1]"""
    others = log_p.scatter(1, ids, -math.inf).logsumexp(dim=1, keepdim=True).clamp_(min=LOG_FLOOR)
    return torch.cat([log_p.gather(1, ids), others], dim=1)


def _divergence(log_p: Tensor, p: Tensor, log_q: Tensor, measure: Measure) -> tuple[Tensor, Tensor]:
    """Value of each token, and the slope s of the table above: [C, K] each -> [C], [C, K]"""
    if measure.kind == "forward_kl":
        difference = log_q - log_p
        return (log_q.exp() * difference).sum(dim=1), -torch.expm1(difference)
    if measure.kind == "reverse_kl":
        difference = log_p - log_q
        return (p * difference).sum(dim=1), difference
    beta = measure.beta
    log_m = torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
    to_mixture = log_p - log_m
    values = beta * (log_q.exp() * (log_q - log_m)).sum(dim=1) + (1 - beta) * (p * to_mixture).sum(dim=1)
    return values, (1 - beta) * to_mixture
