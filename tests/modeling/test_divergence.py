"""Divergences from a teacher: values and gradients against autograd and other people's code, in chunks of any size."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from deepspeed.runtime.rollout import opsd

import modeling.divergence as divergence
from config import LossConfig
from modeling.divergence import Measure, TeacherStates, divergence_gradient, weighted_divergence
from update.losses import policy_losses

KINDS = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.3}  # DeepSpeed's beta of each
WIDTH, TEACHER_WIDTH, VOCABULARY = 12, 8, 40


def measure(kind: str, temperature: float = 1.0, top_k: int = 0) -> Measure:
    return Measure(kind, 0.3, temperature, top_k)


def logits(rows: int = 6, vocabulary: int = 9, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64) for _ in range(2))


def plain(z: torch.Tensor, y: torch.Tensor, kind: str) -> torch.Tensor:
    """The textbook sums, differentiable  # [C, V] -> [C]"""
    p, q = z.softmax(-1), y.softmax(-1)
    mixture = {"forward_kl": p, "reverse_kl": q, "jsd": 0.7 * p + 0.3 * q}[kind]
    from_p, from_q = (p * (p / mixture).log()).sum(-1), (q * (q / mixture).log()).sum(-1)
    return {"forward_kl": from_q, "reverse_kl": from_p, "jsd": 0.3 * from_q + 0.7 * from_p}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_value_and_closed_form_gradient_equal_autograd_in_fp64(kind):
    z, y = logits()
    z.requires_grad_()
    expected = plain(z, y, kind)
    [gradient] = torch.autograd.grad(expected.sum(), z)
    values, ours = divergence_gradient(z.detach().log_softmax(-1), y.log_softmax(-1), measure(kind))
    torch.testing.assert_close(values, expected.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(ours, gradient, rtol=1e-11, atol=1e-14)
    assert (ours + gradient).abs().max() > 0.1  # a flipped sign would be seen


def test_the_ends_are_those_of_torch():
    z, y = logits()
    log_p, log_q = z.log_softmax(-1), y.log_softmax(-1)
    forward, _ = divergence_gradient(log_p, log_q, measure("forward_kl"))
    reverse, _ = divergence_gradient(log_p, log_q, measure("reverse_kl"))
    torch.testing.assert_close(forward, F.kl_div(log_p, log_q.exp(), reduction="none").sum(-1))
    torch.testing.assert_close(reverse, F.kl_div(log_q, log_p.exp(), reduction="none").sum(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_it_agrees_with_deepspeeds_generalized_jsd_loss(kind):
    z, y = logits()
    values, _ = divergence_gradient(z.log_softmax(-1), y.log_softmax(-1), measure(kind))
    theirs = opsd.generalized_jsd_loss(z[None], y[None], torch.ones(1, len(z)), beta=KINDS[kind])
    assert values.mean().item() == pytest.approx(theirs.loss.item(), abs=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_top_k_of_everything_is_the_whole_and_less_is_a_lower_bound(kind):
    z, y = logits(40, 11)
    log_p, log_q = z.log_softmax(-1), y.log_softmax(-1)
    whole, gradient = divergence_gradient(log_p, log_q, measure(kind))
    every, same = divergence_gradient(log_p, log_q, measure(kind, top_k=11))
    torch.testing.assert_close(every, whole, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(same, gradient, rtol=1e-10, atol=1e-12)
    bounds = [divergence_gradient(log_p, log_q, measure(kind, top_k=k))[0] for k in (1, 3, 10)]
    for less, more in zip(bounds, [*bounds[1:], whole], strict=True):
        assert (less <= more + 1e-12).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_with_a_tail_bucket_equals_autograd(kind):
    z, y = logits()
    z.requires_grad_()
    ids = y.topk(3).indices

    def few(x):
        p = x.softmax(-1)
        kept = p.gather(1, ids)
        return torch.cat([kept, 1 - kept.sum(1, keepdim=True)], 1).log()

    expected = plain(few(z), few(y), kind)
    [gradient] = torch.autograd.grad(expected.sum(), z)
    values, ours = divergence_gradient(z.detach().log_softmax(-1), y.log_softmax(-1), measure(kind, top_k=3))
    torch.testing.assert_close(values, expected.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ours, gradient, rtol=1e-9, atol=1e-12)


def test_mass_outside_the_teachers_top_k_is_seen_through_the_tail():
    """Renormalised over the k tokens this reverse KL would be 0: DeepSpeed's is."""
    y = torch.zeros(1, 10, dtype=torch.float64)
    y[0, :4] = 8.0
    z = y.flip(1)  # nearly all of the policy's mass lies elsewhere, equally spread over the four
    log_p, log_q = z.log_softmax(-1), y.log_softmax(-1)
    renormalised = opsd.generalized_jsd_loss(z[None], y[None], torch.ones(1, 1), beta=1.0, teacher_top_k=4).loss.item()
    with_tail = divergence_gradient(log_p, log_q, measure("reverse_kl", top_k=4))[0].item()
    assert abs(renormalised) < 1e-9
    assert 1.0 < with_tail <= divergence_gradient(log_p, log_q, measure("reverse_kl"))[0].item()


def case(tokens: int = 17, vocabulary: int = VOCABULARY):
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(vocabulary, WIDTH, generator=generator).requires_grad_()
    taught = torch.randn(tokens, TEACHER_WIDTH, generator=generator)
    head = torch.randn(VOCABULARY, TEACHER_WIDTH, generator=generator)
    targets = torch.randint(min(vocabulary, VOCABULARY), (tokens,), generator=generator)
    return hidden, weight, targets, torch.linspace(0.01, 0.1, tokens), taught, head


def run(parts, told: Measure):
    hidden, weight, targets, weights, taught, head = parts
    out = weighted_divergence(hidden, weight, targets, weights, TeacherStates(taught, head, told))
    return out, torch.autograd.grad(out.loss, (hidden, weight))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 7, 17])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("top_k", [0, 5])
def test_any_chunk_gives_loss_figures_and_gradients_of_plain_autograd(monkeypatch, kind, rows, temperature, top_k):
    monkeypatch.setattr(divergence, "CHUNK_LOGITS", rows * VOCABULARY)
    parts = case()
    hidden, weight, targets, weights, taught, head = parts
    out, gradients = run(parts, measure(kind, temperature, top_k))
    z, y = hidden @ weight.T / temperature, taught @ head.T / temperature
    if top_k:
        ids = y.topk(top_k).indices
        rest = [x.softmax(-1).scatter(1, ids, 0.0).sum(1, keepdim=True).log() for x in (z, y)]
        few = [torch.cat([x.log_softmax(-1).gather(1, ids), r], 1) for x, r in zip((z, y), rest, strict=True)]
        values = plain(*few, kind)
    else:
        values = plain(z, y, kind)
    torch.testing.assert_close(out.values, values.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out.loss.detach(), (weights * values).sum().detach(), rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(gradients, torch.autograd.grad((weights * values).sum(), (hidden, weight)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)
    gap = (z.log_softmax(-1) - y.log_softmax(-1)).gather(1, targets[:, None])[:, 0].detach()
    torch.testing.assert_close(out.gap, gap, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out.entropy, -(y.softmax(-1) * y.log_softmax(-1)).sum(-1), rtol=1e-4, atol=1e-5)


def test_no_more_than_one_chunk_of_logits_of_either_side_is_ever_computed(monkeypatch):
    monkeypatch.setattr(divergence, "CHUNK_LOGITS", 7 * VOCABULARY)
    heights, head = [], divergence.head_logits
    monkeypatch.setattr(divergence, "head_logits", lambda h, w, t: heights.append(len(h)) or head(h, w, t))
    run(case(30), measure("jsd"))
    assert heights == [7, 7] * 4 + [2, 2]  # each once: the backward pass computes none again


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top_k", [0, 5])
def test_a_teacher_that_is_the_policy_gives_no_loss_and_no_gradient(kind, top_k):
    hidden, weight, targets, weights, *_ = case()
    out, gradients = run(
        (hidden, weight, targets, weights, hidden.detach(), weight.detach()), measure(kind, 1.0, top_k)
    )
    rounding = 1e-6 if kind == "jsd" else 0.0  # of the mixture's logarithm; the others take log p - log q, which is 0
    assert abs(out.loss.item()) <= rounding
    assert all((g.abs() <= rounding).all() for g in gradients)


def test_further_rows_of_a_longer_head_take_no_part_and_get_no_gradient():
    parts = case(vocabulary=VOCABULARY + 3)
    hidden, weight, *rest = parts
    out, gradients = run(parts, measure("reverse_kl"))
    short, expected = run((hidden, weight[:VOCABULARY].detach().requires_grad_(), *rest), measure("reverse_kl"))
    assert torch.equal(out.loss, short.loss)
    assert torch.equal(gradients[1][:VOCABULARY], expected[1])
    assert (gradients[1][VOCABULARY:] == 0).all()


@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_only_the_policys_longer_head_has_is_no_gap_and_changes_nothing_else(kind, top_k):
    hidden, weight, targets, *rest = case(vocabulary=VOCABULARY + 3)
    beyond = targets.clone()
    beyond[[0, 9]] = torch.tensor([VOCABULARY, VOCABULARY + 2])
    out, gradients = run((hidden, weight, beyond, *rest), measure(kind, 1.0, top_k))
    plain, expected = run((hidden, weight, targets, *rest), measure(kind, 1.0, top_k))
    assert torch.equal(out.loss, plain.loss) and torch.equal(out.values, plain.values)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert torch.equal(out.gap, torch.where(beyond < VOCABULARY, plain.gap, 0.0))


@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_minus_infinity_leave_everything_finite(kind, top_k):
    z, y = (x.float() for x in logits())
    z[:, 2], y[:, 2], y[:, 4] = -math.inf, -math.inf, -math.inf
    log_p, log_q = divergence.log_probabilities(z), divergence.log_probabilities(y)
    values, gradient = divergence_gradient(log_p, log_q, measure(kind, top_k=top_k))
    assert values.isfinite().all() and gradient.isfinite().all()
    assert (gradient[:, 2].abs() < 1e-30).all()


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, targets, weights, taught, head = case()
    states = TeacherStates(taught, head, measure("jsd"))
    weighted_divergence(hidden, weight.detach(), targets, weights, states).loss.backward()
    assert hidden.grad is not None


def test_over_all_tokens_the_sampled_gradient_is_that_of_the_reverse_kl():
    """E_y[ gradient of the policy loss with advantage log q - log p ], y from p, by enumeration in fp64."""
    z, y = logits(1)
    z.requires_grad_()
    log_p, log_q = z.log_softmax(-1)[0], y.log_softmax(-1)[0]
    old = log_p.detach()
    rows = torch.arange(len(old))
    loss = policy_losses(log_p, old, log_q - old, rows, len(rows), LossConfig()).values
    [sampled] = torch.autograd.grad((old.exp() * loss).sum(), z, retain_graph=True)
    [exact] = torch.autograd.grad(plain(z, y, "reverse_kl").sum(), z)
    torch.testing.assert_close(sampled, exact, rtol=1e-12, atol=1e-15)


def test_a_temperature_is_not_compensated_by_its_square():
    parts = case()
    for temperature in (1.0, 2.0):
        out, _ = run(parts, measure("forward_kl", temperature))
        expected = plain(parts[0] @ parts[1].T / temperature, parts[4] @ parts[5].T / temperature, "forward_kl")
        torch.testing.assert_close(out.values, expected.detach(), rtol=1e-4, atol=1e-5)
