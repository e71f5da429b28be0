"""The log-prob walk: chunked equals whole, in value and gradient; only a chunk of logits exists at a time."""

from __future__ import annotations

import pytest
import torch

import modeling.logprob as logprob
from modeling.logprob import token_logprobs

WIDTH, VOCABULARY = 12, 50


def case(length: int):
    generator = torch.Generator().manual_seed(length)
    hidden = torch.randn(length, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, (length,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


@pytest.mark.parametrize("length", [1, 6, 7, 8, 3 * 7 + 6])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_any_length_over_chunks_of_seven_equals_the_plain_log_softmax(monkeypatch, length, temperature):
    monkeypatch.setattr(logprob, "CHUNK_LOGITS", 7 * VOCABULARY)
    hidden, weight, targets = case(length)
    out = token_logprobs(hidden, weight, targets, temperature)
    plain = torch.log_softmax((hidden @ weight.T).float() / temperature, dim=-1)
    torch.testing.assert_close(out.logprobs, plain[torch.arange(length), targets], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.entropy, -(plain.exp() * plain).sum(-1), rtol=1e-4, atol=1e-5)
    coefficients = torch.linspace(-1, 1, length)
    ours = torch.autograd.grad((out.logprobs * coefficients).sum(), (hidden, weight))
    theirs = torch.autograd.grad((plain[torch.arange(length), targets] * coefficients).sum(), (hidden, weight))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_no_more_than_one_chunk_of_logits_is_computed_at_a_time(monkeypatch):
    monkeypatch.setattr(logprob, "CHUNK_LOGITS", 7 * VOCABULARY)
    heights = []
    head = logprob.head_logits
    monkeypatch.setattr(logprob, "head_logits", lambda h, w, t: heights.append(len(h)) or head(h, w, t))
    hidden, weight, targets = case(30)
    token_logprobs(hidden, weight, targets, 1.0).logprobs.sum().backward()
    assert max(heights) == 7
    assert len(heights) == 2 * 5  # each chunk once forward, once again in the backward pass


def test_the_entropy_gives_no_gradient():
    hidden, weight, targets = case(5)
    assert not token_logprobs(hidden, weight, targets, 1.0).entropy.requires_grad


def test_logits_are_divided_in_fp32_whatever_the_model_dtype():
    hidden, weight, targets = case(5)
    out = token_logprobs(hidden.bfloat16(), weight.bfloat16(), targets, 0.7)
    assert out.logprobs.dtype == out.entropy.dtype == torch.float32
