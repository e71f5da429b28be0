"""A rotation's products round as the modules round them, whatever the compiler would like to join."""

from __future__ import annotations

import torch

from tests.support.interpreted import DEVICE

import triton  # isort: skip
import triton.language as tl  # isort: skip

from decode.heads import _rounded  # isort: skip


@triton.jit
def _round_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, _rounded(tl.load(x_ptr + at), DTYPE))


def test_rounding_in_integers_is_rounding_to_the_nearest_even_bf16():
    generator = torch.Generator().manual_seed(0)
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 0.0, -0.0, 2.0**-130, 3.0e38])
    x = torch.cat([torch.randn(4096 - len(ties), generator=generator) * 100, ties]).to(DEVICE)
    out = torch.empty_like(x)
    _round_kernel[(1,)](x, out, BLOCK=4096, DTYPE=tl.bfloat16)
    assert torch.equal(out.view(torch.int32), x.bfloat16().float().view(torch.int32))


def test_other_dtypes_round_by_conversion():
    x = torch.randn(16, device=DEVICE)
    out = torch.empty_like(x)
    _round_kernel[(1,)](x, out, BLOCK=16, DTYPE=tl.float16)
    assert torch.equal(out, x.half().float())
