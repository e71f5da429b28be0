"""The fused log-prob kernels equal the plain walk, value and gradient; on CPU in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

import tests.support.interpreted as interpreted
from modeling.logprob import _chunk_logprobs

logprob_kernel = pytest.importorskip("modeling.logprob_kernel", reason="needs Triton")
DEVICE = interpreted.DEVICE


def case(length: int, vocabulary: int, dtype=torch.float32):
    generator = torch.Generator().manual_seed(length)
    hidden = torch.randn(length, 12, generator=generator).to(DEVICE, dtype)
    weight = torch.randn(vocabulary, 12, generator=generator).to(DEVICE, dtype)
    targets = torch.randint(vocabulary, (length,), generator=generator).to(DEVICE)
    targets[0], targets[-1] = 0, vocabulary - 1
    return hidden.requires_grad_(), weight.requires_grad_(), targets


@pytest.mark.parametrize(("length", "vocabulary"), [(1, 50), (3, 4096), (11, 5000)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("keep", [False, True])
def test_value_and_gradient_equal_the_plain_walk_over_uneven_chunks(
    monkeypatch, length, vocabulary, temperature, keep
):
    monkeypatch.setattr(logprob_kernel, "CHUNK_ROWS", 4)
    hidden, weight, targets = case(length, vocabulary)
    targets[1:2] = (hidden @ weight.T)[1:2].argmax(-1)  # the top of its row
    logprobs, entropy, top1 = logprob_kernel.FusedLogprobs.apply(hidden, weight, targets, temperature, keep)
    expected, expected_entropy, expected_top1 = _chunk_logprobs(hidden, weight, targets, temperature)
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-4, atol=1e-4)
    assert not (entropy.requires_grad or top1.requires_grad)
    assert torch.equal(top1, expected_top1)
    coefficients = torch.linspace(-1, 1, length, device=DEVICE)
    ours = torch.autograd.grad((logprobs * coefficients).sum(), (hidden, weight))
    theirs = torch.autograd.grad((expected * coefficients).sum(), (hidden, weight))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="measures CUDA memory")
def test_one_long_row_at_full_vocabulary_stays_under_700_mb_above_its_hidden_states():
    hidden = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(151_936, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(151_936, (8192,), device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logprobs, _, _ = logprob_kernel.FusedLogprobs.apply(hidden, weight, targets, 1.0)
    logprobs.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 700e6 + hidden.numel() * 2
