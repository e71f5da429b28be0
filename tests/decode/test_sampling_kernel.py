"""The Triton sampler agrees with the noise and log-probs of plain torch (in Triton's interpreter without a GPU)."""

import pytest
import torch

from decode.noise import gumbel, row_key
from decode.sampling_kernel import sample
from tests.support.interpreted import DEVICE


def signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.tensor([[signed(w) for w in row_key(7, 3, row, row % 2)] for row in range(count)], dtype=torch.int32)
    return keys.to(DEVICE), torch.arange(5, 5 + count, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(("count", "vocab"), [(1, 17), (3, 2048), (4, 5001)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_token_is_the_gumbel_max_and_the_logprob_that_of_the_softmax(count, vocab, temperature):
    logits = torch.randn(count, vocab, device=DEVICE) * 4
    keys, positions = rows(count)
    tokens, logprobs = sample(logits, keys, positions, temperature)
    scores = logits / temperature + gumbel(keys, positions, vocab)
    best = scores.topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 1e-5, "the case is too close to a tie to judge"
    assert tokens.tolist() == scores.argmax(-1).tolist()
    expected = (logits / temperature).log_softmax(-1).gather(1, tokens.long()[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)


def test_temperature_zero_takes_the_lowest_of_the_largest_logits_and_reports_the_untempered_logprob():
    logits = torch.randn(2, 4500, device=DEVICE).clamp_(max=2.0)
    logits[0, [4100, 31, 2900]] = 3.0
    logits[1, [4400, 4200]] = 3.0
    keys, positions = rows(2)
    tokens, logprobs = sample(logits, keys, positions, 0.0)
    assert tokens.tolist() == [31, 4200]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[[0, 1], [31, 4200]], atol=1e-5, rtol=1e-5)


def test_drawn_tokens_follow_the_softmax():
    """Chi-square over 4 tokens, one draw per position: 16.3 is the 0.1 % point at 3 degrees of freedom."""
    draws, temperature = 300, 0.8
    line = torch.tensor([1.5, 1.0, 0.5, 0.0], device=DEVICE)
    keys = torch.tensor([[signed(w) for w in row_key(1, 0, 0, 0)]], dtype=torch.int32, device=DEVICE).expand(draws, 2)
    positions = torch.arange(draws, dtype=torch.int32, device=DEVICE)
    tokens, _ = sample(line.expand(draws, 4).contiguous(), keys, positions, temperature)
    expected = (line / temperature).softmax(-1).double() * draws
    counts = torch.bincount(tokens.long(), minlength=4).double()
    assert ((counts - expected) ** 2 / expected).sum() < 16.3
