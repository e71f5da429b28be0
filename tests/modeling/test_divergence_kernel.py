"""The fused divergence kernel equals the plain chunk, figures and gradient; on CPU in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

import tests.support.interpreted as interpreted
from modeling.divergence import Measure, chunk_gradient

kernel = pytest.importorskip("modeling.divergence_kernel", reason="needs Triton")
DEVICE = interpreted.DEVICE


def case(rows: int, vocabulary: int, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    targets = torch.randint(vocabulary, (rows,), generator=generator).to(DEVICE)
    targets[0], targets[-1] = 0, vocabulary - 1
    scales = torch.linspace(0.1, 2.0, rows, device=DEVICE)
    return draw(rows, 12), draw(vocabulary, 12), draw(rows, 8), draw(vocabulary, 8), targets, scales


def both(parts, measure: Measure):
    found = []
    for function in (kernel.fused_gradient, chunk_gradient):
        figures = torch.empty(3, len(parts[0]), device=DEVICE)
        found.append((function(*parts, measure, figures), figures))
    return found


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize(("rows", "vocabulary", "temperature"), [(1, 50, 1.0), (3, 4096, 0.7), (5, 5000, 2.0)])
def test_figures_and_gradient_equal_the_plain_chunk(kind, rows, vocabulary, temperature):
    (ours, figures), (theirs, expected) = both(case(rows, vocabulary), Measure(kind, 0.3, temperature, 0))
    torch.testing.assert_close(figures, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-6)
    assert ours.abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_logits_of_minus_infinity_are_floored_as_in_the_plain_chunk(kind):
    hidden, head, teacher_hidden, teacher_head, targets, scales = case(3, 4100)
    hidden[:, 0], teacher_hidden[:, 0] = 1.0, 1.0
    head[7, 0] = head[4099, 0] = teacher_head[7, 0] = teacher_head[11, 0] = float("-inf")
    parts = (hidden, head, teacher_hidden, teacher_head, targets.clamp(max=6), scales)
    (ours, figures), (theirs, expected) = both(parts, Measure(kind, 0.5, 1.0, 0))
    assert ours.isfinite().all() and figures.isfinite().all()
    torch.testing.assert_close(figures, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="measures CUDA memory")
def test_8192_tokens_at_full_vocabulary_take_two_chunks_of_logits_and_the_gradients():
    from modeling.divergence import TeacherStates, weighted_divergence

    hidden = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(151_936, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    states = TeacherStates(
        torch.randn(8192, 2560, dtype=torch.bfloat16).pin_memory(),
        torch.randn(151_936, 2560, device="cuda", dtype=torch.bfloat16), Measure("jsd", 0.5, 1.0, 0),
    )  # fmt: skip
    targets = torch.randint(151_936, (8192,), device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    weighted_divergence(hidden, weight, targets, torch.full((8192,), 1 / 8192, device="cuda"), states).loss.backward()
    gradients = weight.numel() * 2 + hidden.numel() * 2
    assert torch.cuda.max_memory_allocated() - before < 2 * 1024 * 151_936 * 2 + gradients + 60e6
