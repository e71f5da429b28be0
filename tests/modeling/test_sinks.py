"""Attention with sinks and sliding windows: values and gradients against the textbook in fp64, in every path."""

from __future__ import annotations

import pytest
import torch

from decode.cache import PagedCache, PagedRows, Span
from modeling.attention import SOFTMAX, Extras, TrainingRows, training_rows
from tests.conftest import FAMILIES, make_model
from tests.support.packing import packed, paged, splits, token_rows

HEADS, KV_HEADS, WIDTH = 6, 2, 16
LENGTHS = (1, 37, 150, 20)
SCALING = WIDTH**-0.5
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="flash attention needs a CUDA device")


def textbook(q, k, v, lengths, window, sinks):
    """Row by row, head by head: exp(score) over the keys a query sees, the sink in the denominator alone.

    q [H, N, D], k and v [G, N, D], sinks [H] -> [N, H, D], all fp64
    """
    out, base = [], 0
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], dim=0) for x in (k, v))
    for length in lengths:
        here = slice(base, base + length)
        position = torch.arange(length, device=q.device)
        distance = position[:, None] - position
        seen = (distance >= 0) & (distance < (window or length + 1))
        scores = (q[:, here] @ k[:, here].mT * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
        weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sinks.exp()[:, None, None])
        out.append((weights @ v[:, here]).transpose(0, 1))
        base += length
    return torch.cat(out)


def inputs(dtype=torch.float64, device="cpu", width=WIDTH):
    """q, k, v, sinks and an output gradient."""
    generator = torch.Generator().manual_seed(2)
    tokens = sum(LENGTHS)
    shapes = [(HEADS, tokens, width), (KV_HEADS, tokens, width), (KV_HEADS, tokens, width), (HEADS,),
              (tokens, HEADS, width)]  # fmt: skip
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]


def values_and_gradients(attend, tensors):
    *leaves, weight = [x.detach().clone() for x in tensors]
    out = attend(*(leaf.requires_grad_() for leaf in leaves))
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


def relative(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("implementation", ["auto", "eager"])
@pytest.mark.parametrize("window", [None, 1, 8, 128])
def test_training_rows_have_the_values_and_gradients_of_the_textbook(implementation, window):
    exact = values_and_gradients(lambda q, k, v, s: textbook(q, k, v, LENGTHS, window, s), inputs())
    rows = TrainingRows(LENGTHS, SOFTMAX[implementation])
    ours = values_and_gradients(
        lambda q, k, v, s: rows.attend(0, q, k, v, SCALING, Extras(window, s)), inputs(torch.float32)
    )
    assert max(relative(a, b) for a, b in zip(ours, exact, strict=True)) <= 1e-5


@gpu
@pytest.mark.parametrize("window", [None, 8, 128])
def test_flash_attention_with_sinks_has_the_values_and_gradients_of_the_textbook(window):
    tensors = inputs(torch.bfloat16, "cuda", width=64)
    as_given = [x.double() for x in tensors]
    exact = values_and_gradients(lambda q, k, v, s: textbook(q, k, v, LENGTHS, window, s), as_given)
    rows = training_rows(LENGTHS, "auto", tensors[0])
    ours = values_and_gradients(lambda q, k, v, s: rows.attend(0, q, k, v, 64**-0.5, Extras(window, s)), tensors)
    errors = [relative(a, b) for a, b in zip(ours, exact, strict=True)]
    eager = TrainingRows(LENGTHS, SOFTMAX["eager"], "cuda")
    theirs = values_and_gradients(lambda q, k, v, s: eager.attend(0, q, k, v, 64**-0.5, Extras(window, s)), tensors)
    bound = 2 * max(relative(a, b) for a, b in zip(theirs, exact, strict=True))
    assert max(errors) <= bound <= 1e-2, "no worse than eager attention in the same dtype"


@gpu
def test_a_windowed_flash_attention_without_sinks_equals_the_padded_one():
    q, k, v, _, _ = inputs(torch.bfloat16, "cuda", width=64)
    ours = training_rows(LENGTHS, "auto", q).attend(0, q, k, v, 64**-0.5, Extras(8))
    expected = TrainingRows(LENGTHS, SOFTMAX["eager"], "cuda").attend(0, q, k, v, 64**-0.5, Extras(8))
    torch.testing.assert_close(ours, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("implementation", ["auto", "eager"])
def test_the_cache_is_right_past_the_window_with_rows_of_unequal_length(implementation):
    """Window 128 as in the published models: the last 40 tokens of each row come through the cache one by one."""
    q, k, v, sinks, _ = inputs(torch.float32)
    extras = Extras(128, sinks)
    expected = TrainingRows(LENGTHS, SOFTMAX[implementation]).attend(0, q, k, v, SCALING, extras)
    config = FAMILIES["gpt_oss"]()
    cache = PagedCache(config, 60, 16, torch.float32, "cpu")
    cache.kv.fill_(1e3)
    pages = [[1, 2, 3], [6, 5, 4], list(range(30, 7, -1)), [40, 41]]
    starts = torch.tensor(LENGTHS).cumsum(0) - torch.tensor(LENGTHS)
    done = [0] * len(LENGTHS)
    while any(d < n for d, n in zip(done, LENGTHS, strict=True)):
        live = [i for i, n in enumerate(LENGTHS) if done[i] < n]
        spans = [Span(done[i], 1 if done[i] else max(1, LENGTHS[i] - 40), pages[i]) for i in live]
        at = torch.cat(
            [starts[i] + torch.arange(s.start, s.start + s.length) for i, s in zip(live, spans, strict=True)]
        )
        got = PagedRows(cache, spans, SOFTMAX[implementation]).attend(0, q[:, at], k[:, at], v[:, at], SCALING, extras)
        torch.testing.assert_close(got, expected[at], atol=1e-5, rtol=1e-5)
        for i, span in zip(live, spans, strict=True):
            done[i] += span.length


def test_every_gradient_of_the_model_is_that_of_hugging_faces_eager_attention():
    rows = token_rows((9, 33, 17))
    coefficients = torch.linspace(-1, 1, 48)

    def gradients(model, forward):
        (forward(model) * coefficients).sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def theirs(model):
        return torch.cat([model.base_model(input_ids=torch.tensor([row])).last_hidden_state[0] for row in rows])

    exact = gradients(make_model("gpt_oss", implementation="eager").double(), theirs)
    ours = gradients(make_model("gpt_oss"), lambda model: packed(model, rows))
    assert ours.keys() == exact.keys()
    for name, gradient in ours.items():
        assert relative(gradient, exact[name]) <= 1e-5, name
        assert exact[name].any(), name


@torch.no_grad()
@pytest.mark.skipif(torch.cuda.is_available(), reason="a contract of CPU runs; other machines' BLAS rounds otherwise")
def test_in_fp32_what_the_cache_gives_is_bit_for_bit_what_training_computes():
    """Lines of at least 4 tokens, as `decode.eager` makes them; experts of one token included."""
    model, lengths = make_model("gpt_oss"), (40,) * 4
    rows = token_rows(lengths)
    assert torch.equal(paged(model, rows, splits(lengths, (1,)), page_size=16), packed(model, rows))
