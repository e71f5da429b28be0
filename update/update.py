"""The updates of one rollout: micro-batches through the policy and the loss, gradients summed, figures gathered.

Invariants: with `loss.old_policy` "rollout" the old log-probabilities of every mini-batch are those of the weights
that sampled, computed under the same micro-batches, so the first ratio is exactly 1. Inside an update the host never
waits for the device. A loss or gradient that is not finite changes no weight on any rank.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from config import LossConfig
from modeling.divergence import Lesson, TeacherStates
from modeling.logprob import TokenLogprobs
from update.batch import ResponseTokenBatch
from update.losses import importance_weights, kl_penalty, policy_losses
from update.measures import GapFigures, TeacherFigures, TokenColumns, gap_figures, teacher_figures

Batches = Sequence[ResponseTokenBatch]

TOKEN_MEANS = {  # figures of `OneUpdate` that are the mean of a column of `TokenColumns`
    "clip_fraction": "clipped", "entropy": "entropy", "top1_agreement": "top1", "importance_mean": "importance",
    "importance_cut": "importance_cut", "kl": "kl", "balance": "balance", "flips": "flips",
}  # fmt: skip


class TrainablePolicy(Protocol):
    """The part of `policy.Policy` that an update uses."""

    device: torch.device

    def train(self) -> None: ...
    def token_logprobs(self, batch: ResponseTokenBatch, lesson: TeacherStates | None = None) -> TokenLogprobs: ...
    def frozen_logprobs(self, batch: ResponseTokenBatch) -> Tensor: ...
    def reference_logprobs(self, batches: Iterable[ResponseTokenBatch]) -> list[Tensor]: ...
    def backward(self, loss: Tensor, last: bool) -> None: ...
    def step(self, learning_rate: float) -> float: ...


@dataclass(frozen=True, slots=True)
class OneUpdate:
    """Over all trained tokens of all ranks."""

    loss: float
    grad_norm: float  # before clipping; not finite where the step was skipped
    tokens: int  # without trajectories of advantage 0, as in the forward, unless `loss.needs_every_row`
    clip_fraction: float
    entropy: float  # nats a token
    ratio_error: float  # largest |ratio - 1|; exactly 0 in the first update
    importance_mean: float  # of the importance weights; 1 where they are off
    importance_cut: float  # share of tokens whose weight was truncated or masked
    kl: float  # mean estimate of KL(policy || reference), 0 without a reference
    gap: GapFigures  # this update's weights against the sampling log-probabilities
    top1_agreement: float = 0.0  # share of tokens that were the likeliest of their distribution
    balance: float = 0.0  # of the routers, 1 where even; 0 where loss.router_balance is off
    flips: float = math.nan  # share of (token, layer) whose experts are not those of sampling; NaN in a dense model
    flipped_tokens: float = 0.0  # share of tokens with at least one such layer

    @property
    def is_bad(self) -> bool:
        return not (math.isfinite(self.loss) and math.isfinite(self.grad_norm))


@dataclass(frozen=True, slots=True)
class UpdateStats:
    updates: tuple[OneUpdate, ...]
    mismatch: GapFigures  # training forward against sampling, at the weights that sampled
    stale: GapFigures | None  # the same at the moved weights of all later updates
    entropies: tuple[Tensor, ...] = ()  # of each update, nats of each trained token of all ranks, on CPU  # [M] each
    teacher: TeacherFigures | None = None  # over all updates

    @property
    def tokens(self) -> int:
        return sum(u.tokens for u in self.updates)

    def row(self, loss: LossConfig) -> dict[str, Any]:
        """For metrics.jsonl: sums and token means over the updates, without terms that are off; None for a NaN."""
        row: dict[str, Any] = {"loss": _mean([u.loss for u in self.updates]), "tokens": self.tokens}
        row |= {name: self._token_mean(name) for name in ("clip_fraction", "entropy", "top1_agreement")}
        row["grad_norm"] = _mean([u.grad_norm for u in self.updates])
        row["ratio_error"] = max(u.ratio_error for u in self.updates)
        if loss.importance != "off":
            row |= {name: self._token_mean(name) for name in ("importance_mean", "importance_cut")}
        if loss.kl_coef > 0:
            row["kl"] = self._token_mean("kl")
        if loss.router_balance > 0:
            row["router_balance"] = self._token_mean("balance")
        if not math.isnan(self.updates[0].flips):
            row |= {f"router_{name}": self._token_mean(name) for name in ("flips", "flipped_tokens")}
        if self.teacher:
            row |= {f"teacher_{name}": value for name, value in dataclasses.asdict(self.teacher).items()}
        row["bad_updates"] = sum(u.is_bad for u in self.updates)
        row |= {f"mismatch_{name}": value for name, value in dataclasses.asdict(self.mismatch).items()}
        if self.stale:
            row |= {f"stale_{name}": value for name, value in dataclasses.asdict(self.stale).items()}
            row["by_update"] = [_flat(u) for u in self.updates]
        return _finite(row)

    def _token_mean(self, name: str) -> float:
        return sum(getattr(u, name) * u.tokens for u in self.updates) / max(self.tokens, 1)


def update(
    policy: TrainablePolicy, minibatches: Sequence[Batches], loss: LossConfig, learning_rate: float,
    lessons: Sequence[Sequence[Lesson]] | None = None,
) -> UpdateStats:  # fmt: skip
    """Trains once on each mini-batch, given as this rank's micro-batches; every rank has equally many.

    lessons: the teacher's for each micro-batch, with loss.distill_weight above 0
    """
    policy.train()
    on_device = [[batch.to(policy.device) for batch in batches] for batches in minibatches]
    old = _old_logprobs(policy, on_device, loss)
    reference = _reference_logprobs(policy, on_device, loss)
    updates, columns = [], []
    each: Sequence[Sequence[Lesson] | None] = lessons or [None] * len(minibatches)
    for batches, olds, references, given in zip(on_device, old, reference, each, strict=True):
        one, tokens = _one_update(policy, batches, olds, references, given, loss, learning_rate)
        updates.append(one)
        columns.append(tokens)
    teacher = teacher_figures(TokenColumns.concatenate(columns)) if lessons else None
    return UpdateStats(tuple(updates), *_gaps(columns, loss), tuple(c.entropy for c in columns), teacher)


def _old_logprobs(
    policy: TrainablePolicy, minibatches: Sequence[Batches], loss: LossConfig
) -> list[list[Tensor] | None]:
    """Those of each micro-batch at the present weights; None where the update's own forward gives them."""
    if loss.old_policy == "update":
        return [None] * len(minibatches)
    return [None, *([policy.frozen_logprobs(batch) for batch in batches] for batches in minibatches[1:])]


def _reference_logprobs(
    policy: TrainablePolicy, minibatches: Sequence[Batches], loss: LossConfig
) -> list[list[Tensor] | None]:
    if loss.kl_coef == 0:
        return [None] * len(minibatches)
    values = iter(policy.reference_logprobs(batch for batches in minibatches for batch in batches))
    return [[next(values) for _ in batches] for batches in minibatches]


def _one_update(
    policy: TrainablePolicy, batches: Batches, old: list[Tensor] | None, reference: list[Tensor] | None,
    lessons: Sequence[Lesson] | None, loss: LossConfig, learning_rate: float,
) -> tuple[OneUpdate, TokenColumns]:  # fmt: skip
    total = torch.zeros((), dtype=torch.float64, device=policy.device)
    columns = []
    for index, batch in enumerate(batches):
        lesson = lessons[index] if lessons else None
        out = policy.token_logprobs(batch, lesson if isinstance(lesson, TeacherStates) else None)
        value, tokens = batch_loss(
            out, batch, old[index] if old else out.logprobs.detach(), reference[index] if reference else None, loss,
            lesson,
        )  # fmt: skip
        total += value.detach()
        columns.append(tokens)
        last = index == len(batches) - 1
        if last:  # NaN reaches the gradient of every rank, and `step` then changes nothing; times 1.0 is exact
            value = value * torch.where(total.isfinite(), 1.0, math.nan)
        policy.backward(value, last)
    grad_norm = policy.step(learning_rate)
    dist.all_reduce(total)
    tokens = TokenColumns.concatenate(columns).gathered()
    return _summary(total.item(), grad_norm, tokens), tokens


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of the loss of a token, and the columns that it shows of itself."""

    values: Tensor  # [M] differentiable
    figures: dict[str, Tensor]  # columns of `TokenColumns`  # [M] each


def batch_loss(
    out: TokenLogprobs, batch: ResponseTokenBatch, old: Tensor, reference: Tensor | None, loss: LossConfig,
    lesson: Lesson | None = None,
) -> tuple[Tensor, TokenColumns]:  # fmt: skip
    """A micro-batch's part of the loss, a scalar: the sum over tokens of

        weight x ((1 - distill_weight) x importance x policy loss + distill_weight x divergence + kl_coef x KL
                  + router_balance x balance)

    where the divergence "sampled" is importance x policy loss as well, with log teacher - log policy as the advantage.

    old, reference  # [M] each, no gradient
    """
    sampled = lesson if isinstance(lesson, TokenLogprobs) else None  # the teacher's log-probs of sampled tokens alone
    share = loss.distill_weight if sampled or out.divergences else 0.0
    importance = importance_weights(old, batch.behaviour_logprobs, batch.rows, len(batch.lengths), loss)
    policy = policy_losses(out.logprobs, old, batch.advantages, batch.rows, len(batch.lengths), loss)
    terms = [Term((1 - share) * (importance.weights * policy.values), {"clipped": policy.clipped})]
    if sampled:
        terms.append(_imitation(out, batch, old, sampled, share * importance.weights, policy.clipped, loss))
    if reference is not None:
        kl = kl_penalty(out.logprobs, reference, loss.kl_estimator)
        terms.append(Term(loss.kl_coef * kl, {"kl": kl}))
    if out.balance is not None:
        terms.append(Term(loss.router_balance * out.balance, {"balance": out.balance}))
    value = (batch.weights * sum(term.values for term in terms)).sum()
    figures = {"importance": importance.weights, "importance_cut": importance.cut}
    for term in terms:
        figures |= term.figures
    if out.divergences:  # already summed over the tokens with their weights
        value = value + share * out.divergences.loss
        figures |= _teacher_figures(out.divergences.values, out.divergences.gap, out.divergences.entropy)
    return value, _columns(out, batch, old, figures)


def _imitation(
    out: TokenLogprobs, batch: ResponseTokenBatch, old: Tensor, lesson: TokenLogprobs, scale: Tensor,
    clipped: Tensor, loss: LossConfig,
) -> Term:  # fmt: skip
    """The divergence "sampled": a policy loss that raises what the teacher finds likelier.

    scale: of each token; clipped: the tokens that the policy loss clips  # [M] each
    """
    gap = batch.behaviour_logprobs - lesson.logprobs
    imitation = policy_losses(out.logprobs, old, -gap, batch.rows, len(batch.lengths), loss)
    figures = _teacher_figures(gap, gap, lesson.entropy) | {"clipped": clipped | imitation.clipped}
    return Term(scale * imitation.values, figures)


def _teacher_figures(divergence: Tensor, gap: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    return {"divergence": divergence, "teacher_gap": gap, "teacher_entropy": entropy}


def _columns(out: TokenLogprobs, batch: ResponseTokenBatch, old: Tensor, figures: dict[str, Tensor]) -> TokenColumns:
    """figures: those of the terms; a term that is off shows 0."""
    present, nothing = out.logprobs.detach(), torch.zeros_like(old)
    names = ("kl", "balance", "divergence", "teacher_gap", "teacher_entropy")
    shown: dict[str, Tensor] = dict.fromkeys(names, nothing) | {n: v.detach() for n, v in figures.items()}
    return TokenColumns(
        gap=present - batch.behaviour_logprobs,
        old_gap=old - batch.behaviour_logprobs,
        turns=batch.turns,
        since_tool=batch.since_tool,
        entropy=out.entropy,
        top1=nothing if out.top1 is None else out.top1,
        ratio_error=torch.expm1(present - old).abs(),
        flips=torch.full_like(old, math.nan) if out.flips is None else out.flips,
        trained=batch.weights > 0,
        **shown,
    )


def _summary(loss: float, grad_norm: float, tokens: TokenColumns) -> OneUpdate:
    count = tokens.gap.numel()
    return OneUpdate(
        loss=loss,
        grad_norm=grad_norm,
        tokens=count,
        ratio_error=tokens.ratio_error.max().item(),
        **{name: getattr(tokens, column).mean().item() for name, column in TOKEN_MEANS.items()},
        flipped_tokens=(tokens.flips > 0).double().mean().item(),
        gap=gap_figures(tokens.gap, tokens.turns, tokens.since_tool),
    )


def _gaps(columns: Sequence[TokenColumns], loss: LossConfig) -> tuple[GapFigures, GapFigures | None]:
    """The gap at the weights that sampled, over every token with a forward there, and the gap at later weights."""
    there = columns if loss.old_policy == "rollout" else columns[:1]
    first = TokenColumns.concatenate(there)
    mismatch = gap_figures(first.old_gap, first.turns, first.since_tool)
    if len(columns) == 1:
        return mismatch, None
    later = TokenColumns.concatenate(columns[1:])
    return mismatch, gap_figures(later.gap, later.turns, later.since_tool)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _flat(one: OneUpdate) -> dict[str, Any]:
    """Scalars alone; the gap's with their own names."""
    own = {f.name: getattr(one, f.name) for f in dataclasses.fields(one) if f.name != "gap"}
    gap = dataclasses.asdict(one.gap)
    return own | {f"gap_{name}": gap[name] for name in ("mean", "p99", "max", "k1", "k3", "ess")}


def _finite(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON lacks, by None."""
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
