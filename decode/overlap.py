"""Programmatic dependent launch for the decode kernels: the next kernel's blocks start, and fetch what cannot change,
while the kernel before them drains.

The rule every decode kernel follows, in this order:
1. before `begin`: touch only what no kernel of the step writes (weights, pages of earlier tokens), or what a kernel at
   least two launches back wrote;
2. `begin`: wait until the kernel before has ended and its writes are visible, and only then let the next one start.
   So when a kernel runs, the one two launches before it has ended, and nothing is written before `begin`.

Left out: any scheduling across graph replays; the first kernel of a step is launched plainly.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PIECES = tl.constexpr(8)  # requests of a program for what the product after it reads
ASKED = 8 << 20  # bytes, about what arrives while a residual is joined; more delays the join itself


@triton.jit
def begin(PDL: tl.constexpr):
    """Wait for the kernel before, then allow the next (no code without PDL: stream order does both)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch(address, size, COUNT: tl.constexpr):
    """Ask for `size` bytes (a multiple of 16, or 0) at each 16-byte-aligned address in L2.

    address [COUNT] int64, size [COUNT] int32. Threads beyond COUNT hold copies of the same addresses and keep quiet.
    """
    tl.inline_asm_elementwise(
        """{ .reg .pred ask, some; .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.lt.u32 ask, thread, $3;
        setp.ne.and.s32 some, $2, 0, ask;
        @some cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0; }""",
        "=r,l,r,r",
        [address, size, COUNT],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def ask_next(next_ptr, piece, PDL: tl.constexpr):
    """Ask for this program's share, PIECES stretches of `piece` bytes, of what the product after this one reads first.

    The shares of a grid's programs adjoin from next_ptr on; piece: see `piece_bytes`.
    """
    if PDL:
        row, column, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
        program = row + tl.num_programs(0) * (column + tl.num_programs(1) * split)
        stretch = program * PIECES + tl.arange(0, PIECES)
        prefetch(next_ptr.to(tl.int64) + stretch * piece, tl.full((PIECES,), piece, tl.int32), PIECES)


def piece_bytes(following: Tensor, programs: int) -> int:
    """`ask_next`'s piece, by which `programs` programs ask for the first of the following weights; 0 for none."""
    if following.data_ptr() % 16:
        return 0
    total = min(ASKED, following.numel() * following.element_size())
    return total // (programs * PIECES.value) // 16 * 16
