"""The paged decode attention against plain torch (in Triton's interpreter without a GPU)."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.interpreted import DEVICE

import triton  # isort: skip

from decode.attention import decode_attention_kernel  # isort: skip
from decode.stack import STEP_FIELDS, open_step_kernel  # isort: skip

PAGE, D, BN, WARPS, ITEMS = 16, 16, 32, 2, 64
SHORTEST = 2 * BN  # tokens of a piece, at least
ROW_PAGES = 32


def plan(
    positions: list[int], kv_heads: int, target: int, window: int = 0, spans: list[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Items [3, ITEMS], first and count [rows] for rows whose new tokens stand at `positions`."""
    rows = len(positions)
    step = torch.zeros(STEP_FIELDS, rows, dtype=torch.int32)
    step[1] = torch.tensor(positions)
    step[4] = torch.arange(rows)
    step[7] = torch.tensor([1] * rows if spans is None else spans)
    step = step.to(DEVICE)
    items = torch.zeros(2, 3, ITEMS, dtype=torch.int32, device=DEVICE)
    first, count = torch.zeros(2, 2, rows, dtype=torch.int32, device=DEVICE)
    last = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    table = torch.zeros(rows, max(positions) // PAGE + 1, dtype=torch.int32, device=DEVICE)
    embedding = torch.zeros(1, 16, device=DEVICE)
    h, normed = torch.zeros(rows, 16, device=DEVICE), torch.zeros(rows, 16, device=DEVICE)
    open_step_kernel[(rows + 1 + (window > 0),)](
        step, last, table, embedding, embedding, h, normed, items, first, count, rows, kv_heads, target,
        step.stride(0), table.stride(0), rows, 16, 1e-6, BLOCK_K=16, P=PAGE, LANES=triton.next_power_of_2(rows),
        ITEMS=ITEMS, BN=BN, WINDOW=window, LATE=False,
    )  # fmt: skip
    kind = int(window > 0)
    return items[kind], first[kind], count[kind]


def attend(
    positions: list[int], kv_heads: int, group: int, target: int, splits: int = 1, window: int = 0, sinks: bool = False
):
    """(kernel's output, expected output, cache after, cache before with the new keys and values put in)."""
    torch.manual_seed(0)
    rows = len(positions)
    items, first, count = plan(positions, kv_heads, target, window)
    sink = torch.randn(kv_heads, group) * 2 if sinks else torch.full((kv_heads, group), -math.inf)
    pages = [(1 + ROW_PAGES * r + torch.arange(ROW_PAGES)).flip(0) for r in range(rows)]
    kv = torch.randn(2, ROW_PAGES * rows + 1, kv_heads, PAGE, D)
    table = torch.zeros(rows + 1, ROW_PAGES, dtype=torch.int32)
    for row in range(rows):
        table[row + 1] = pages[row]
    qkv = torch.randn(splits, rows, kv_heads * (group + 2) * D)
    line = qkv.sum(0)
    q = line[:, : kv_heads * group * D].view(rows, kv_heads, group, D)
    k, v = line[:, kv_heads * group * D :].view(rows, 2, kv_heads, D).unbind(1)
    after, expected = kv.clone(), torch.zeros(rows, kv_heads, group, D)
    for row, position in enumerate(positions):
        page = pages[row][position // PAGE]
        after[0, page, :, position % PAGE], after[1, page, :, position % PAGE] = k[row], v[row]
        low = max(0, position + 1 - window) if window else 0
        keys, values = (x[pages[row]].transpose(0, 1).flatten(1, 2)[:, low : position + 1] for x in after)
        scores = torch.cat([(q[row] @ keys.mT) / math.sqrt(D), sink[..., None]], dim=-1)
        expected[row] = scores.softmax(-1)[..., :-1] @ values
    kv, table, qkv = kv.to(DEVICE), table.to(DEVICE), qkv.to(DEVICE)
    out = torch.full((rows, kv_heads * group * D), float("nan"), device=DEVICE)
    parts = torch.full((ITEMS * kv_heads * group * D,), float("nan"), device=DEVICE)
    sums = torch.full((ITEMS * kv_heads * group * 2,), float("nan"), device=DEVICE)
    arrivals = torch.zeros(rows * kv_heads, dtype=torch.int32, device=DEVICE)
    ones, zeros = torch.ones(512, D, device=DEVICE), torch.zeros(512, D, device=DEVICE)
    slots = torch.arange(1, rows + 1, dtype=torch.int32, device=DEVICE)
    decode_attention_kernel[(int(count.sum()) * kv_heads,)](
        qkv, ones, ones, ones, ones, ones, sink.to(DEVICE), ones, zeros, kv, out,
        torch.tensor(positions, dtype=torch.int32, device=DEVICE), slots, slots, table, items, first, count,
        parts, sums, arrivals, math.log2(math.e) / math.sqrt(D), 1e-6, qkv.stride(0), table.stride(0), kv.stride(1),
        kv.stride(0),
        ITEMS=ITEMS, HEADS=kv_heads, GROUP=group, BH=triton.next_power_of_2(group + 2), D=D, P=PAGE, BN=BN, W=WARPS,
        STAGES=3, SPLITS=splits, BIAS=False, NORM=False, SINKS=sinks, WINDOW=window, PREFETCH=0, TOKENS=0, PDL=False,
        num_warps=WARPS,
    )  # fmt: skip
    assert not arrivals.any(), "the counters are left as they were found"
    return out.view_as(expected).cpu(), expected, kv.cpu(), after, count.tolist()


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
def test_grouped_heads_attend_to_every_token_up_to_their_own(group):
    out, expected, kv, after, _ = attend([0, 14, 15, 16, 40], kv_heads=2, group=group, target=4, splits=2)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(kv, after), "exactly the new keys and values were written"


@pytest.mark.parametrize("target", [1, 40])
@pytest.mark.parametrize("window", [0, 33])
@pytest.mark.parametrize(("group", "tokens"), [(2, 8), (3, 5), (16, 1)])
def test_tokens_of_one_sequence_read_its_past_together_and_see_it_up_to_themselves(group, tokens, window, target):
    """Eleven tokens from position 235 on, and one of another sequence; the past is cut in up to five pieces."""
    torch.manual_seed(0)
    heads, chunk = 2, 11
    positions = [*range(235, 235 + chunk), 40]
    spans = [0 if row % tokens else min(tokens, chunk - row) for row in range(chunk)] + [1]
    items, first, count = plan(positions, heads, target, window, spans)
    slots = torch.tensor([1] * chunk + [2], dtype=torch.int32, device=DEVICE)
    table = torch.zeros(3, ROW_PAGES, dtype=torch.int32, device=DEVICE)
    table[1], table[2] = torch.arange(1, ROW_PAGES + 1).flip(0), torch.arange(ROW_PAGES + 1, 2 * ROW_PAGES + 1)
    kv = torch.randn(2, 2 * ROW_PAGES + 1, heads, PAGE, D, device=DEVICE)
    rows, lines = len(positions), tokens * group
    qkv = torch.randn(1, rows, heads * (group + 2) * D, device=DEVICE)
    sinks, before = torch.randn(heads, group, device=DEVICE), kv.clone()
    out = torch.full((rows, heads * group * D), float("nan"), device=DEVICE)
    parts, sums = (
        torch.empty(ITEMS * heads * lines * D, device=DEVICE),
        torch.empty(ITEMS * heads * 2 * lines, device=DEVICE),
    )
    ones, zeros = torch.ones(512, D, device=DEVICE), torch.zeros(512, D, device=DEVICE)
    words = [torch.tensor(w, dtype=torch.int32, device=DEVICE) for w in (positions, spans)]
    decode_attention_kernel[(int(count.sum()) * heads,)](
        qkv, ones, ones, ones, ones, ones, sinks, ones, zeros, kv, out, words[0], slots, words[1], table, items, first,
        count, parts, sums, torch.zeros(rows * heads, dtype=torch.int32, device=DEVICE),
        math.log2(math.e) / math.sqrt(D), 1e-6, qkv.stride(0), table.stride(0), kv.stride(1), kv.stride(0),
        ITEMS=ITEMS, HEADS=heads, GROUP=group, BH=triton.next_power_of_2(lines), D=D, P=PAGE, BN=BN, W=WARPS, STAGES=3,
        SPLITS=1, BIAS=False, NORM=False, SINKS=True, WINDOW=window, PREFETCH=0, TOKENS=tokens, PDL=False,
        num_warps=WARPS,
    )  # fmt: skip
    assert torch.equal(kv, before), "nothing is written"
    q = qkv[0, :, : heads * group * D].view(rows, heads, group, D)
    for row, position in enumerate(positions):
        low = max(0, position + 1 - window) if window else 0
        keys, values = (x[table[slots[row]]].transpose(0, 1).flatten(1, 2)[:, low : position + 1] for x in kv)
        scores = torch.cat([(q[row] @ keys.mT) / math.sqrt(D), sinks[..., None]], dim=-1)
        expected = scores.softmax(-1)[..., :-1] @ values
        torch.testing.assert_close(out[row].view_as(expected), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pieces", range(1, 9))
def test_a_row_cut_in_pieces_gives_the_same(pieces):
    past = SHORTEST * pieces - 3  # an odd length: the last piece is not whole
    out, expected, _, _, count = attend([past - 1, 0], kv_heads=1, group=2, target=1000)
    assert count == [pieces, 1]
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("window", "target"), [(0, 1000), (1, 4), (33, 4), (128, 1000)])
def test_a_sink_joins_every_softmax_and_a_window_bounds_it(window, target):
    positions = [0, 31, 32, 40, 300]
    out, expected, kv, after, _ = attend(positions, kv_heads=2, group=4, target=target, window=window, sinks=True)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(kv, after), "exactly the new keys and values were written"


def test_a_window_is_read_and_nothing_before_its_first_tile():
    items, first, count = (x.cpu() for x in plan([0, 100, 319, 320], 2, 1, window=33))
    starts = [int(items[1, f]) for f in first]
    assert starts == [0, 64, 256, 288]
    assert [int(items[2, f + c - 1]) for f, c in zip(first, count, strict=True)] == [1, 101, 320, 321]


@pytest.mark.parametrize("past", range(500, 1100, 40))
def test_rows_that_fill_the_gpu_about_once_are_not_cut(past):
    _, _, count = plan([past] * 16, kv_heads=8, target=132)
    assert count.tolist() == [1] * 16


def test_rows_of_different_lengths_are_cut_to_run_at_once():
    """As 5 to 8 rows of a rollout are; an even share and an eighth more would take 160 programs for 132 places."""
    past = [7000, 6000, 5100, 4000, 3000, 2100, 1000, 300]
    items, _, count = (x.cpu() for x in plan([tokens - 1 for tokens in past], kv_heads=8, target=132))
    assert int(count.sum()) * 8 <= 132
    lengths = (items[2] - items[1])[: int(count.sum())]
    assert int(lengths.max()) <= 1.4 * sum(past) / 16, "and none is much longer than its share"


def test_rows_without_a_span_have_no_items_and_others_reach_the_end_of_theirs():
    items, _, count = (x.cpu() for x in plan([0, 40, 41, 42, 7], 2, 1, spans=[0, 3, 0, 0, 1]))
    assert count.tolist() == [0, 1, 0, 0, 1]
    assert items[:, : int(count.sum())].T.tolist() == [[1, 0, 43], [4, 0, 8]]


@pytest.mark.parametrize("target", [1, 7, 40])
def test_items_cover_every_token_once(target):
    positions = [0, 100, 31, 32, 180, 7]
    items, first, count = (x.cpu() for x in plan(positions, 2, target))
    for row, position in enumerate(positions):
        mine = items[:, first[row] : first[row] + count[row]]
        assert mine[0].tolist() == [row] * int(count[row])
        edges = [0, *mine[2].tolist()]
        assert mine[1].tolist() == edges[:-1]
        assert edges[-1] == position + 1
    assert (items[0, int(count.sum()) :] == -1).all()
    assert int(count.sum()) <= len(positions) + math.ceil(target / 2)
