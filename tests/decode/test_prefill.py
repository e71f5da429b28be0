"""Flash attention over gathered pages equals the reference attention over pages (needs a GPU)."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config

from decode.cache import PagedCache, PagedRows, Span
from decode.interface import Chunk
from modeling.attention import SOFTMAX
from tests.support.interpreted import DEVICE

from decode.prefill import FlashRows  # isort: skip

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="flash attention needs a CUDA device")
HEADS, KV_HEADS, WIDTH, PAGE_SIZE = 4, 2, 64, 16


@pytest.mark.parametrize("starts", [(0, 0, 0), (24, 0, 17)])
def test_rows_with_and_without_a_past_attend_and_write_as_the_reference_does(starts):
    torch.manual_seed(0)
    config = Qwen3Config(
        num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=WIDTH,
        hidden_size=HEADS * WIDTH,
    )  # fmt: skip
    caches = [PagedCache(config, 20, PAGE_SIZE, torch.bfloat16, DEVICE) for _ in range(2)]
    caches[0].kv.normal_()
    caches[1].kv.copy_(caches[0].kv)
    lengths, pages = (16, 33, 2), ([5, 9, 1], [3, 8, 19], [12, 2])
    chunks = [
        Chunk(lane=i, token_ids=[1] * n, start=s, pages=p, key=(0, 0), sample=True)
        for i, (n, s, p) in enumerate(zip(lengths, starts, pages, strict=True))
    ]
    tokens = sum(lengths)
    q = torch.randn(HEADS, tokens, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    k, v = torch.randn(2, KV_HEADS, tokens, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    flash = FlashRows(caches[0], chunks)
    spans = [Span(c.start, len(c.token_ids), c.pages) for c in chunks]
    reference = PagedRows(caches[1], spans, SOFTMAX["eager"])
    assert torch.equal(flash.positions, reference.positions)
    out = flash.attend(1, q, k, v, WIDTH**-0.5)
    expected = reference.attend(1, q, k, v, WIDTH**-0.5)
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
    assert torch.equal(caches[0].kv, caches[1].kv)
