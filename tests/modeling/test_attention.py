"""Our attention equals Hugging Face's on every family, packed or paged, and never looks across rows."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma2Config, MistralConfig

from modeling.families import check_supported
from tests.conftest import make_model
from tests.support.packing import LENGTHS, packed, paged, splits, token_rows


@torch.no_grad()
def test_a_packed_line_equals_hugging_face_row_by_row(family):
    ours, theirs = make_model(family), make_model(family, implementation="eager")
    rows = token_rows()
    expected = torch.cat([theirs.base_model(input_ids=torch.tensor([row])).last_hidden_state[0] for row in rows])
    torch.testing.assert_close(packed(ours, rows), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("sizes", [(1,), (64,), (5, 1, 1, 3), (16, 1)])
def test_reading_through_the_cache_in_pieces_equals_reading_at_once(family, sizes):
    model, rows = make_model(family), token_rows()
    torch.testing.assert_close(paged(model, rows, splits(LENGTHS, sizes)), packed(model, rows), rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("softmax", ["auto", "eager"])
@pytest.mark.parametrize("sizes", [(1,), (7, 1, 1)])
def test_in_bf16_on_cpu_the_cache_changes_not_one_bit(family, softmax, sizes):
    if softmax == "auto" and family != "qwen3":
        pytest.skip("exactness is promised for eager; SDPA is only watched on the main family")
    model, rows = make_model(family, torch.bfloat16), token_rows()
    assert torch.equal(paged(model, rows, splits(LENGTHS, sizes), "eager"), packed(model, rows, "eager"))


@torch.no_grad()
def test_a_row_does_not_depend_on_its_neighbours_in_the_line():
    model, rows = make_model(), token_rows((20, 31))
    alone = packed(model, rows[:1])
    other = packed(model, [rows[0], [5] * 31])[:20]
    torch.testing.assert_close(packed(model, rows)[:20], alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(other, alone, rtol=0, atol=1e-5)


def test_gradients_of_a_packed_line_are_the_sum_of_the_rows_gradients(family):
    rows = token_rows((9, 21, 4))
    coefficients = torch.linspace(-1, 1, 48)  # a plain square would be constant after the final norm

    def gradients(groups):
        model = make_model(family)
        for group in groups:
            (packed(model, group) * coefficients).sum().backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    together, apart = gradients([rows]), gradients([[row] for row in rows])
    assert together.keys() == apart.keys()
    for name, gradient in together.items():
        assert (gradient - apart[name]).norm() <= 1e-5 * apart[name].norm(), name


@pytest.mark.parametrize("config", [Gemma2Config(), MistralConfig(sliding_window=32)])
def test_a_family_whose_attention_we_do_not_compute_is_refused(config):
    with pytest.raises(ValueError, match=config.model_type):
        check_supported(config)
