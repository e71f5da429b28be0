"""Long rows as dense windows of the packed line give what each row gives alone, value and gradient.

On CPU the two libraries' functions are stood in for by plain torch ones with the same signatures.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import modeling.train_attention as train_attention
from modeling.attention import FlashTrainingRows, TrainingRows, eager_softmax
from modeling.train_attention import LongTrainingRows, rounded

SCALE = 0.3
CPU = torch.device("cpu")


def dense(q, k, v, *_, scale, **__):
    """[1, H, T, D] -> what cuDNN's forward returns, in the places that are read."""
    return (
        eager_softmax(q, *(x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v)), None, scale),
        1,
        *"......"[:4],
        2,
        3,
    )


def dense_backward(by_out, q, k, v, out, lse, seed, offset, *_, scale, **__):
    assert (lse, seed, offset) == (1, 2, 3)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        got = dense(*leaves, scale=scale)[0]
        assert out.shape == got.shape == by_out.shape
        return torch.autograd.grad(got, leaves, by_out)


def packed(q, k, v, ends, *_, scale, **__):
    """[N, H, D] -> what flash attention's forward returns."""
    rows = TrainingRows(ends.diff().tolist(), eager_softmax)
    return rows.attend(0, *(x.transpose(0, 1) for x in (q, k, v)), scale), 4, 5, 6


def packed_backward(by_out, q, k, v, out, lse, ends, *rest, scale, **__):
    assert lse == 4 and rest[-2:] == (5, 6)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        return torch.autograd.grad(packed(*leaves, ends, scale=scale)[0], leaves, by_out)


@pytest.fixture
def stand_ins(monkeypatch):
    def saving(function):
        """Statistics are tensors, since autograd saves them."""

        def save(*args, **kwargs):
            return tuple(torch.tensor(x) if isinstance(x, int) else x for x in function(*args, **kwargs))

        return save

    names = {
        "_scaled_dot_product_cudnn_attention": saving(dense),
        "_scaled_dot_product_cudnn_attention_backward": dense_backward,
        "_flash_attention_forward": saving(packed),
        "_flash_attention_backward": packed_backward,
    }
    monkeypatch.setattr(train_attention, "_aten", SimpleNamespace(**names))
    monkeypatch.setattr(train_attention, "LONG", 17)


def attended(rows, lengths, dtype=torch.float64, device=CPU):
    generator = torch.Generator().manual_seed(0)
    q, k, v, by = (torch.randn(h, sum(lengths), 8, generator=generator).to(device, dtype) for h in (4, 2, 2, 4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = rows.attend(0, *leaves, SCALE)
    return [out, *torch.autograd.grad(out, leaves, by.transpose(0, 1))]


@pytest.mark.parametrize(
    "lengths", [(37, 33, 20, 5, 3), (33,), (40, 35), (5, 3), (5, 40)], ids=lambda x: "+".join(map(str, x))
)  # windows that reach into long rows, into short ones, past the end of the line; and long rows behind a short one
def test_values_and_gradients_are_those_of_each_row_alone(stand_ins, lengths):
    got = attended(LongTrainingRows(lengths, CPU), lengths)
    expected = attended(TrainingRows(lengths, eager_softmax), lengths)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_lengths_are_rounded_to_few_values_and_by_little():
    sizes = {n: rounded(n) for n in range(1, 8193)}
    assert all(n <= size <= n * 17 / 16 + 1 for n, size in sizes.items())
    assert all(rounded(size) == size for size in sizes.values())
    assert len({size for n, size in sizes.items() if n >= 1536}) <= 48


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs cuDNN and flash attention")
def test_on_cuda_they_are_those_of_flash_attention():
    cuda = torch.device("cuda")
    lengths = (2900, 1700, 1600, 700, 30)
    if not train_attention.cudnn_serves(4, 2, 8, torch.bfloat16, cuda):
        pytest.skip("cuDNN has no engine here")
    got = attended(LongTrainingRows(lengths, cuda), lengths, torch.bfloat16, cuda)
    expected = attended(FlashTrainingRows(lengths, cuda), lengths, torch.bfloat16, cuda)
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours - theirs).float().norm() <= 0.02 * theirs.float().norm()
