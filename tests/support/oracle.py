"""Hand-made trajectories with probabilities, and every objective restated in plain Python floats from its paper.

The oracle knows trajectories as lists of sampled tokens; it imports none of our losses, weights or batches. `frozen`
stands for what the papers put under a stop-gradient, so that finite differences of the oracle are true gradients.
"""

from __future__ import annotations

import dataclasses
import math
import types
from pathlib import Path
from typing import Any

import torch

from config import Config, parse_config
from modeling.logprob import TokenLogprobs
from rollout.records import Scored, StopReason
from tests.support.builders import record, scored
from update.batch import ResponseTokenBatch
from update.minibatch import token_budget, token_weights
from update.update import batch_loss

# A tool span, two tool spans, a single-token response, a turn cut by its token limit, a plain answer.
SPANS = ("PPAAAOOAA", "PPPAOAAOOA", "PA", "PPAAAAAA", "PAAA")
STOPS = (StopReason.ANSWERED,) * 3 + (StopReason.TURN_TOKENS, StopReason.ANSWERED)
ADVANTAGES = (1.0, -0.7, -1.0, 1.5, -0.3)
# Per sampled token: logp - old, old - behaviour, logp - reference. Both sides of every clip range, and inside.
LOG_RATIOS = (
    (0.0, 0.4, -0.5, 0.1, 0.6), (-0.4, 0.9, 0.05, -0.02), (1.3,), (0.02, -0.03, 0.01, -0.3, 0.0, 0.05),
    (-0.25, 0.15, 0.2),
)  # fmt: skip
MISMATCHES = (
    (0.0, 0.1, -0.05, 0.9, -1.2), (0.3, -0.1, 0.2, 0.1), (-0.9,), (0.02, 0.01, 0.0, 0.01, -0.02, 0.03),
    (0.5, 0.4, 0.3),
)  # fmt: skip
DRIFTS = ((0.3, -0.2, 0.1, 0.0, -0.6), (0.05, 0.2, -0.1, 0.4), (-0.8,), (0.1, -0.3, 0.2, 0.6, -0.1, 0.0), (0.1,) * 3)
LOGPROBS = (
    (-0.9, -1.4, -0.3, -2.2, -0.6), (-1.1, -0.7, -0.2, -3.0), (-2.5,), (-0.4, -0.8, -1.6, -0.1, -2.0, -0.5),
    (-0.6, -1.2, -0.9),
)  # fmt: skip


def config(**loss: Any) -> Config:
    return parse_config({
        "model": {"path": "m"}, "data": {"path": "d"}, "loss": loss,
        "rollout": {"max_turns": 3, "max_new_tokens": 7, "context_length": 64, "trajectories_per_step": 64},
    })  # fmt: skip


def step() -> list[Scored]:
    records = [record(s, prompt=0, sample=i, stop=stop) for i, (s, stop) in enumerate(zip(SPANS, STOPS, strict=True))]
    return scored(records, list(ADVANTAGES))


def flat(values: tuple[tuple[float, ...], ...]) -> torch.Tensor:
    return torch.tensor([v for row in values for v in row], dtype=torch.float64)


@dataclasses.dataclass
class Made:
    """The case as our code sees it, in fp64."""

    batch: ResponseTokenBatch
    logprobs: torch.Tensor
    old: torch.Tensor
    reference: torch.Tensor


def make(settings: Config, weigh=token_weights) -> Made:
    items = step()
    weights = weigh(items, settings.loss.policy, token_budget(settings.rollout))
    batch = ResponseTokenBatch.from_rollout([s.record for s in items], list(ADVANTAGES), weights)
    logprobs, ratios, mismatches = flat(LOGPROBS), flat(LOG_RATIOS), flat(MISMATCHES)
    old = logprobs - ratios
    batch = dataclasses.replace(
        batch,
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float64)[batch.rows],
        weights=torch.tensor(weights, dtype=torch.float64)[batch.rows],
        behaviour_logprobs=old - mismatches,
    )
    return Made(batch, logprobs.requires_grad_(), old, logprobs.detach() - flat(DRIFTS))


def ours(settings: Config, weigh=token_weights, loss_of=batch_loss):
    """Loss, gradient by the log-probabilities, and the token columns."""
    made = make(settings, weigh)
    out = TokenLogprobs(made.logprobs, torch.zeros_like(made.old))
    reference = made.reference if settings.loss.kl_coef else None
    value, columns = loss_of(out, made.batch, made.old, reference, settings.loss)
    return value.item(), torch.autograd.grad(value, made.logprobs)[0], columns


def oracle(settings: Config, logprobs: list[list[float]], frozen: list[list[float]]) -> float:
    """The loss of the step. logprobs vary, frozen is their value under a stop-gradient."""
    loss = settings.loss
    total, tokens = 0.0, sum(len(row) for row in LOGPROBS)
    for i, advantage in enumerate(ADVANTAGES):
        now, still, n = logprobs[i], frozen[i], len(LOGPROBS[i])
        old = [LOGPROBS[i][t] - LOG_RATIOS[i][t] for t in range(n)]
        gaps = MISMATCHES[i]
        terms = []
        for t in range(n):
            term = _policy_term(loss, now, still, old, t, advantage) * _importance(loss, gaps, t)
            if loss.kl_coef:
                term += loss.kl_coef * _kl(loss.kl_estimator, now[t], LOGPROBS[i][t] - DRIFTS[i][t])
            terms.append(term)
        if loss.policy in ("dapo", "cispo"):  # DAPO eq. 8: 1 / sum |o_i|
            total += sum(terms) / tokens
        elif loss.policy == "dr_grpo":  # Dr. GRPO: a constant in place of |o_i|; here 3 turns of 7 tokens
            total += sum(terms) / 21 / len(ADVANTAGES)
        else:  # GRPO eq. 3 and GSPO eq. 5: 1/G sum_i 1/|o_i|
            total += sum(terms) / n / len(ADVANTAGES)
    return total


def _policy_term(loss, now, still, old, t, advantage) -> float:
    if loss.policy == "cispo":  # MiniMax-M1: -sg(clip(r)) A log pi
        ratio = math.exp(still[t] - old[t])
        return -min(max(ratio, 0.0), 5.0) * advantage * now[t]
    if loss.policy == "gspo":  # s_i = (pi(y_i) / pi_old(y_i)) ^ (1 / |y_i|)
        ratio = (math.exp(sum(now)) / math.exp(sum(old))) ** (1 / len(now))
        low, high = 3e-4, 4e-4
    else:
        ratio, low, high = math.exp(now[t]) / math.exp(old[t]), 0.2, 0.28
    objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    if loss.dual_clip is not None and advantage < 0:
        objective = max(objective, loss.dual_clip * advantage)
    return -objective


def _importance(loss, gaps, t) -> float:
    token, sequence = math.exp(gaps[t]), math.exp(sum(gaps))
    if loss.importance == "token":
        return min(token, 2.0)
    if loss.importance == "sequence":
        return min(sequence, 2.0)
    if loss.importance == "token_mask":
        return token if 0.5 <= token <= 2.0 else 0.0
    if loss.importance == "sequence_mask":
        return sequence if 0.5 <= sequence <= 2.0 else 0.0
    return 1.0


def _kl(estimator, logprob, reference) -> float:
    ratio = math.exp(reference) / math.exp(logprob)  # Schulman 2020: r = p / q with samples from q
    return {"k2": math.log(ratio) ** 2 / 2, "k3": ratio - 1 - math.log(ratio)}[estimator]


def expected(settings: Config) -> tuple[float, torch.Tensor]:
    """Loss and gradient of the oracle, the gradient by central differences."""
    frozen = [list(row) for row in LOGPROBS]
    value, gradient, h = oracle(settings, frozen, frozen), [], 1e-6
    for i, row in enumerate(LOGPROBS):
        for t in range(len(row)):
            sides = []
            for sign in (1, -1):
                moved = [list(r) for r in LOGPROBS]
                moved[i][t] += sign * h
                sides.append(oracle(settings, moved, frozen))
            gradient.append((sides[0] - sides[1]) / (2 * h))
    return value, torch.tensor(gradient, dtype=torch.float64)


def agrees(settings: Config, weigh=token_weights, loss_of=batch_loss) -> bool:
    value, gradient, _ = ours(settings, weigh, loss_of)
    wanted, wanted_gradient = expected(settings)
    return math.isclose(value, wanted, rel_tol=1e-12, abs_tol=1e-14) and torch.allclose(
        gradient, wanted_gradient, rtol=1e-7, atol=1e-9
    )


def mutant(module: types.ModuleType, text: str, replacement: str) -> types.ModuleType:
    """A copy of `module` with one piece of its source replaced. The piece must stand there exactly once."""
    source = Path(str(module.__file__)).read_text()
    assert source.count(text) == 1, f"{text!r} stands {source.count(text)} times in {module.__name__}"
    fresh = types.ModuleType(module.__name__)
    exec(compile(source.replace(text, replacement), str(module.__file__), "exec"), fresh.__dict__)
    return fresh
