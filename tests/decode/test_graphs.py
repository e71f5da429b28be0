"""Decoding in CUDA graphs draws what eager decoding draws (needs a GPU), and its bookkeeping (anywhere)."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from config import LoraConfig
from decode.cache import PagedCache
from decode.interface import LAST_DRAW, Chunk
from decode.noise import row_key
from modeling import lora
from tests.support.interpreted import DEVICE

from decode.stack import FEED, KEY0, KEY1, PAGE, POSITION, SLOT, SPAN, STEP_FIELDS, TOKEN  # isort: skip
from decode.graphs import fill_step, _order, fitting, ladder, rows_beside, wide_ladder  # isort: skip
from tests.support.captured import FAMILIES, PAGE_SIZE, chunk, eager, gpu, graphs, make, rollout


@gpu
@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_a_graph_draws_the_ids_and_logprobs_of_the_eager_decoder(family, temperature):
    expected = rollout(eager(*make(family)), [3, 40, 17, 33, 1], 40, temperature)
    decoder = graphs(*make(family), temperature=temperature)
    lines, logprobs = rollout(decoder, [3, 40, 17, 33, 1], 40, temperature)
    assert lines == expected[0]
    torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(expected[1]), atol=2e-5, rtol=1e-4)
    assert decoder.replays > 0
    assert decoder.captures == len(ladder(6)), "everything was captured at the start"


@gpu
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_graph_draws_through_adapters_what_the_modules_draw(family):
    def adapted():
        model, cache = make(family)
        lora.add_adapters(model, LoraConfig(rank=8, alpha=8), seed=0)
        generator = torch.Generator(DEVICE).manual_seed(4)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1, generator=generator)
        return model, cache

    expected = rollout(eager(*adapted()), [3, 40, 17], 30)
    lines, logprobs = rollout(graphs(*adapted()), [3, 40, 17], 30)
    assert lines == expected[0] != rollout(eager(*make(family)), [3, 40, 17], 30)[0]
    torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(expected[1]), atol=2e-5, rtol=1e-4)


@gpu
def test_a_row_draws_the_same_alone_and_in_another_decode_row():
    lines, _ = rollout(graphs(*make("qwen3")), [30, 5, 21], 30)
    again, _ = rollout(graphs(*make("qwen3"), max_rows=5), [30, 5, 21], 30, rows=[4, 0, 2])
    assert again == lines


@gpu
@pytest.mark.parametrize("extra_rows", [5, 40, 80])
def test_a_prompt_read_beside_rows_that_decode_draws_the_ids_of_the_eager_decoder(extra_rows):
    """Of the prompts some fit into the graph and some do not; a forced token makes chunks of two."""
    expected = rollout(eager(*make("qwen3")), [3, 40, 17, 33, 1], 40)
    decoder = graphs(*make("qwen3"), extra_rows=extra_rows)
    lines, logprobs = rollout(decoder, [3, 40, 17, 33, 1], 40)
    assert lines == expected[0]
    torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(expected[1]), atol=2e-5, rtol=1e-4)
    assert decoder.captures == len(ladder(6)) + len(wide_ladder(6, extra_rows))


@gpu
def test_the_next_replay_sees_weights_changed_by_an_optimizer_step():
    model, cache = make("qwen3")
    decoder = graphs(model, cache)
    before, _ = rollout(decoder, [9], 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(input_ids=torch.tensor([before[0]], device=DEVICE), use_cache=False, attention_mask=None,
          rows=_training_rows(len(before[0]))).logits.logsumexp(-1).sum().backward()  # fmt: skip
    optimizer.step()
    after, _ = rollout(decoder, [9], 20)
    assert after == rollout(eager(model, PagedCache(model.config, 120, PAGE_SIZE, torch.float32, DEVICE)), [9], 20)[0]
    assert after != before


def _training_rows(length: int):
    from modeling.attention import SOFTMAX, TrainingRows

    return TrainingRows([length], SOFTMAX["auto"], DEVICE)


@gpu
def test_draws_read_one_step_late_are_the_same():
    lines, _ = rollout(graphs(*make("qwen3")), [12], 12)
    decoder = graphs(*make("qwen3"))
    chunk = {"lane": 2, "pages": list(range(1, 17))[::-1], "key": row_key(5, 0, 0, 0), "sample": True}
    token = decoder.run([Chunk(token_ids=lines[0][:12], start=0, **chunk)], 1.0).tokens[0]
    drawn = [token]
    pending = decoder.submit([Chunk(token_ids=[LAST_DRAW], start=12, **chunk)], 1.0)  # drawn by a longer chunk
    for position in (13, 14):
        following = decoder.submit([Chunk(token_ids=[LAST_DRAW], start=position, **chunk)], 1.0)
        drawn += pending.read().tokens
        pending = following
    assert drawn + pending.read().tokens == lines[0][12:16]


@gpu
def test_moved_parameters_are_refused():
    model, cache = make("qwen3")
    decoder = graphs(model, cache)
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.clone()
    with pytest.raises(RuntimeError, match="moved in memory"):
        rollout(decoder, [4], 2)


def test_the_ladder_ends_at_its_maximum():
    assert ladder(1) == [1]
    assert ladder(4) == [1, 2, 4]
    assert ladder(48) == [1, 2, 4, 8, 16, 32, 48]


def test_the_step_buffer_pads_with_rows_of_the_scratch_page():
    view = np.full((STEP_FIELDS, 4), 9, dtype=np.int32)
    key = (0x80000001, 3)
    chunks = [Chunk(lane=2, token_ids=[5], start=17, pages=[8, 6], key=key, sample=True)]
    fill_step(view, chunks, PAGE_SIZE, 4)
    assert view[[TOKEN, POSITION, KEY1, SLOT, PAGE], 0].tolist() == [5, 17, 3, 3, 6]
    assert view.view(np.uint32)[KEY0, 0] == key[0]
    assert not view[:, 1:].any()


def test_the_tokens_of_a_longer_chunk_take_a_column_each_and_the_last_one_draws():
    view = np.full((STEP_FIELDS, 6), 9, dtype=np.int32)
    long = Chunk(lane=0, token_ids=[5, 6, 7], start=15, pages=[8, 4, 3], key=(1, 2), sample=True)
    short = Chunk(lane=2, token_ids=[LAST_DRAW], start=3, pages=[2], key=(3, 4), sample=True)
    fill_step(view, [long, short], PAGE_SIZE, 4)
    assert view[TOKEN].tolist() == [7, LAST_DRAW, 5, 6, 0, 0]
    assert view[POSITION].tolist() == [17, 3, 15, 16, 0, 0]
    assert view[PAGE].tolist() == [4, 2, 8, 4, 0, 0]
    assert view[SLOT].tolist() == [1, 3, 1, 1, 0, 0]
    assert view[FEED].tolist() == [1, 3, 0, 0, 0, 0], "only a chunk's last token leaves a draw for its row"
    assert view[KEY0].tolist() == [1, 3, 0, 0, 0, 0]
    assert view[SPAN].tolist() == [1, 1, 2, 0, 0, 0], "the other two are read together"


def test_the_shortest_chunks_take_the_graph_first():
    def fits(*lengths: int, step_rows: int) -> list[bool]:
        return fitting([chunk(length, True) for length in lengths], step_rows)

    assert fits(1, 9, 1, 3, 5, step_rows=10) == [True, False, True, True, True]
    assert fits(1, 2, step_rows=0) == [True, False]
    assert fits(1, 2, step_rows=3) == [True, True]


def test_wide_graphs_reach_all_rows_and_exist_only_where_there_are_extra_ones():
    assert wide_ladder(64, 64) == [64, 128]
    assert wide_ladder(8, rows_beside(8)) == [64]
    assert wide_ladder(33, rows_beside(33)) == [64, 128]
    assert wide_ladder(6, 5) == [11]
    assert wide_ladder(64, 0) == []


def test_draws_come_in_the_order_of_the_chunks():
    chunks = [chunk(1, True), chunk(3, True), chunk(1, False), chunk(2, False), chunk(1, True), chunk(9, True)]
    assert _order(chunks, [len(c.token_ids) == 1 for c in chunks]) == [(True, 0), (False, 0), (True, 2), (False, 1)]
