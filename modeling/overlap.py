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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


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
