"""Tile rules hold for any shape: nothing read twice, nothing empty, nothing beyond the buffers."""

from __future__ import annotations

import math

import pytest

from decode.tiles import attention_tiles, low_tiles, product_tiles, rows_tile

SHAPES = [(4096, 1024), (19456, 2560), (2560, 9728), (80, 64), (144, 48), (151936, 4096), (6144, 80)]


@pytest.mark.parametrize("kind", ["qkv", "o", "gate_up", "down", "head"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("rows", [1, 17, 64, 65, 129, 300])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_splits_are_never_empty_and_reading_ahead_stays_inside_them(kind, n, k, rows, itemsize):
    tiles = product_tiles(kind, rows, n, k, itemsize)
    each = math.ceil(math.ceil(k / tiles.bk) / tiles.splits) * tiles.bk
    last = k - (tiles.splits - 1) * each
    ahead = tiles.ahead_of(k)
    assert last > 0
    assert 16 <= ahead <= min(each, last)
    assert ahead & (ahead - 1) == 0, "a power of two"
    assert tiles.splits == 1 or kind in ("qkv", "o", "down"), "only these kernels' readers sum parts"
    assert tiles.splits <= 8, "`decode.stack` has room for as many parts"
    assert not tiles.even(k) or (last - ahead) % tiles.bk == 0


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("rows", [1, 17, 33, 65, 129])
def test_what_is_read_ahead_is_wide_enough_for_the_tensor_cores_at_any_width(rows, itemsize):
    """A width of 72 in fp32 left 8 columns to the last of three splits, which the compiler refuses."""
    for k in range(16, 1400, 4):
        found = [product_tiles(kind, rows, n, k, itemsize) for kind in ("qkv", "o", "down") for n in (64, 1 << 20)]
        for tiles in (*found, low_tiles(rows, k, 8, itemsize)):
            assert tiles.ahead_of(k) >= 16, (k, tiles)


def test_the_fused_projection_tiles_do_not_straddle_two_matrices():
    assert product_tiles("qkv", 16, 144, 96, 4, divisor=48).bn == 16


def test_half_as_much_is_read_ahead_where_programs_share_a_processor():
    """The output product of Qwen3-4B has 120 programs; that of 8B, 192, took 6 us a layer longer with all of it."""
    assert [product_tiles("o", 1, n, 4096, 2).ahead for n in (2560, 4096)] == [512, 256]


def test_rows_fill_the_least_tile():
    assert [rows_tile(rows) for rows in (1, 16, 17, 33, 64, 65, 128, 129)] == [16, 16, 32, 64, 64, 128, 128, 64]


@pytest.mark.parametrize("rows", [100, 128])
def test_wide_adapters_leave_no_room_for_128_rows(rows):
    """With rank 256 gate and up would take 256 KiB of shared memory of the 227 there are, and no graph be captured."""
    assert product_tiles("gate_up", rows, 19456, 2560, 2, adapter=64).bm == 128
    assert product_tiles("gate_up", rows, 19456, 2560, 2, adapter=256) == product_tiles(
        "gate_up", 192, 19456, 2560, 2, adapter=256
    )


def test_about_one_wave_of_attention_programs_where_rows_allow_it():
    assert attention_tiles(1, 8, 1 << 22, 2).target == 132
    assert attention_tiles(16, 8, 1 << 22, 2).target == 132
    assert attention_tiles(64, 8, 1 << 22, 2).target == 528
    assert attention_tiles(256, 8, 1 << 22, 2).target == 264
    assert attention_tiles(128, 8, 1 << 22, 2, together=True).target == 528
