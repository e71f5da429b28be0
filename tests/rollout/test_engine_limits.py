"""Where a trajectory meets a limit: a context that ends with a page, pages for one context alone, an endless tool."""

from __future__ import annotations

import pytest

from config import ToolConfig
from decode.cache import PagedCache
from decode.eager import EagerDecoder
from rollout.engine import RolloutRequest
from rollout.records import StopReason, Work
from tests.support.engines import (
    END,
    FakeTool,
    LaggingDecoder,
    ScriptedDecoder,
    call,
    generate,
    make_engine,
    prompts,
    sampling,
)
from tools import PythonTool


@pytest.mark.parametrize(("context", "page"), [(32, 16), (48, 8), (47, 8), (49, 8)])
@pytest.mark.parametrize("decoder", [EagerDecoder, LaggingDecoder])
def test_a_context_that_ends_at_the_border_of_a_page_needs_no_page_more(model, chat, context, page, decoder):
    limits = {"context_length": context, "max_new_tokens": 64}
    plenty = generate(make_engine(model, chat, FakeTool()), chat, **limits)
    pages = 1 + -(-context // page)  # one context and the scratch page
    made = decoder(model, PagedCache(model.config, pages, page, model.dtype, "cpu"), "auto")
    engine = make_engine(model, chat, FakeTool(), rows=3, pages=pages, page_size=page, decoder=made)
    assert generate(engine, chat, **limits) == plenty
    full = [r for r in plenty if r.stop is StopReason.CONTEXT_FULL]
    assert full and all(len(r.token_ids) <= context for r in plenty)
    if context == 32:
        assert {len(r.token_ids) for r in full} == {32}


def test_a_program_that_never_ends_costs_its_row_the_time_limit_and_no_other_row_anything(chat, tokenizer):
    scripts = [[call("while True: pass") + END, "late" + END], [call("print(2+3)") + END, "early" + END], ["x" + END]]
    decoder = ScriptedDecoder(tokenizer, dict(enumerate(scripts)))
    tool = PythonTool(ToolConfig(timeout_seconds=0.5, preload=()))
    done = []
    try:
        engine = make_engine(
            None, chat, tool, decoder=decoder, pages=400, progress=lambda *counts: done.append((counts[0], counts[3]))
        )
        limits = sampling(n_samples_per_prompt=3, max_new_tokens=120, context_length=400)
        records = engine.generate(RolloutRequest(prompts(chat, 1), 0, Work()), limits)
    finally:
        tool.close()
    endless, answered, plain = records
    assert [c.status for c in endless.turns[0].calls] == ["timeout"]
    assert [c.text for c in answered.turns[0].calls] == ["5"]
    assert {r.stop for r in records} == {StopReason.ANSWERED}
    assert (2, 1) in done  # the others were done while it still ran
    assert plain.turns[0].calls == ()
