"""What a decode kernel asks for ahead lies inside the weights that come next."""

from __future__ import annotations

import pytest
import torch

from tests.support.interpreted import DEVICE

from decode.overlap import ASKED, PIECES, piece_bytes  # isort: skip


@pytest.mark.parametrize("numel", [8, 4096, 2048 * 1024, 4096 * 2560])
@pytest.mark.parametrize("programs", [1, 7, 200, 240])
def test_the_shares_of_all_programs_end_inside_the_weights_and_the_limit(numel, programs):
    weights = torch.empty(numel, dtype=torch.bfloat16, device=DEVICE)
    piece = piece_bytes(weights, programs)
    asked, most = piece * PIECES.value * programs, min(ASKED, 2 * numel)
    assert piece % 16 == 0
    assert most - 16 * PIECES.value * programs < asked <= most, "nothing beyond, and nearly all of it"


def test_weights_that_the_copy_engine_cannot_address_are_left_alone():
    weights = torch.empty(4096 + 1, dtype=torch.bfloat16, device=DEVICE)
    assert piece_bytes(weights[1:], 1) == 0 < piece_bytes(weights[:4096], 1)
