"""Causal attention within packed sequences for training on CUDA: cuDNN for long ones, flash for the rest.

On Hopper cuDNN takes about half of FlashAttention-2's time, but torch gives it dense batches only: its packed form
builds a plan at every call (50 ms, and wrong gradients, in torch 2.11). So each long row is a dense batch of its own.
A plan is built once for a length, so lengths are rounded up; the row's window then reaches into the tokens after it,
which the causal mask hides from the row's own queries. What the foreign queries give is not read, and no gradient
enters them. Short rows go to flash attention together, packed.

Where cuDNN's results do not agree with flash attention's on a probe, all rows go to flash attention.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.attention import PLAIN, Extras, FlashTrainingRows

LONG = 1536  # tokens from which a row is worth launches of its own
GRAIN = 16  # lengths in one octave; rounding costs 3 % on average
PROBE_TOKENS, PROBE_ERROR = 200, 0.02
_aten = torch.ops.aten


def rounded(length: int) -> int:
    """The next of GRAIN lengths an octave."""
    step = max(1, (1 << (length.bit_length() - 1)) // GRAIN)
    return -(-length // step) * step


class LongTrainingRows(FlashTrainingRows):
    """The `modeling.attention.Rows` of a training batch in half precision on CUDA."""

    def __init__(self, lengths: Sequence[int], device: torch.device):
        """lengths: tokens of each row; long rows before the first short one are cuDNN's."""
        super().__init__(lengths, device)
        count = next((i for i, length in enumerate(lengths) if length < LONG), len(lengths))
        starts = [sum(lengths[:i]) for i in range(count)]
        self.long = tuple(zip(starts, lengths[:count], strict=True))
        self.tail_start, tail = sum(lengths[:count]), lengths[count:]
        self.tail_longest = max(tail, default=0)
        ends = torch.tensor([0, *tail]).cumsum(0)
        self.tail_ends = ends.to(device, torch.int32, non_blocking=True)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, extras: Extras = PLAIN
    ) -> Tensor:
        if extras.window is not None or extras.sinks is not None:
            return super().attend(layer, query, key, value, scaling, extras)
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))  # [N, heads, D]
        return _Attend.apply(q, k, v, self, scaling)


class _Attend(torch.autograd.Function):
    """(q [N, H, D], k [N, G, D], v [N, G, D], rows, scale) -> [N, H, D]"""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: LongTrainingRows, scale: float) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        out, stats = torch.empty_like(q), []
        for start, length in rows.long:
            windows = (_window(x, start, length) for x in (q, k, v))
            result = _aten._scaled_dot_product_cudnn_attention(*windows, None, True, 0.0, True, False, scale=scale)
            out[start : start + length] = result[0][0].transpose(0, 1)[:length]
            stats += [result[1], result[6], result[7]]
        if rows.tail_longest:
            part, ends, longest = slice(rows.tail_start, None), rows.tail_ends, rows.tail_longest
            result = _aten._flash_attention_forward(
                q[part], k[part], v[part], ends, ends, longest, longest, 0.0, True, False, scale=scale
            )
            out[part] = result[0]
            stats += [result[1], result[2], result[3]]
        ctx.save_for_backward(q, k, v, out, *stats)
        ctx.rows, ctx.scale = rows, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, *stats = ctx.saved_tensors
        rows, by_out = ctx.rows, gradients[0].contiguous()
        by = tuple(torch.empty_like(x) for x in (q, k, v))
        for index, (start, length) in enumerate(rows.long):
            windows = [_window(x, start, length) for x in (q, k, v, out)]
            size = rounded(length)
            result = _aten._scaled_dot_product_cudnn_attention_backward(
                _padded(by_out[start : start + length], size), *windows, *stats[3 * index : 3 * index + 3], None, None,
                None, size, size, 0.0, True, scale=ctx.scale,
            )  # fmt: skip
            for whole, part in zip(by, result, strict=True):
                whole[start : start + length] = part[0].transpose(0, 1)[:length]
        if rows.tail_longest:
            part, ends, longest = slice(rows.tail_start, None), rows.tail_ends, rows.tail_longest
            lse, *random = stats[-3:]
            result = _aten._flash_attention_backward(
                by_out[part], q[part], k[part], v[part], out[part], lse, ends, ends, longest, longest, 0.0, True,
                *random, scale=ctx.scale,
            )  # fmt: skip
            for whole, piece in zip(by, result, strict=True):
                whole[part] = piece
        return *by, None, None


def _window(line: Tensor, start: int, length: int) -> Tensor:
    """[N, heads, D] -> [1, heads, rounded length, D], a view unless the line ends before the window."""
    size = rounded(length)
    return _padded(line[start : start + size], size)


def _padded(row: Tensor, size: int) -> Tensor:
    short = size - row.shape[0]
    return (F.pad(row, (0, 0, 0, 0, 0, short)) if short else row).transpose(0, 1)[None]


@functools.cache
def cudnn_serves(heads: int, groups: int, head_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether cuDNN attends to such heads here, on Hopper, as flash attention does; asked once, by running both."""
    if torch.cuda.get_device_capability(device)[0] != 9 or not torch.backends.cudnn.is_available():
        return False
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((PROBE_TOKENS, heads, head_size), *[(PROBE_TOKENS, groups, head_size)] * 2)
    inputs = [torch.randn(shape, device=device, dtype=dtype, generator=generator) for shape in shapes]
    found = []
    for long in (True, False):
        rows = LongTrainingRows([PROBE_TOKENS], device)
        if long:
            rows.long, rows.tail_start, rows.tail_longest = ((0, PROBE_TOKENS),), PROBE_TOKENS, 0
        leaves = [x.clone().requires_grad_() for x in inputs]
        try:
            with torch.enable_grad():
                out = _Attend.apply(*leaves, rows, head_size**-0.5)
                found.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
        except RuntimeError:  # cuDNN has no engine for these shapes
            return False
    return all((a - b).float().norm() <= PROBE_ERROR * b.float().norm() for a, b in zip(*found, strict=True))
