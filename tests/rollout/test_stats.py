"""The figures of a rollout, checked by arithmetic on its records and by tools whose times are known."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict

import pytest

from rollout.engine import RolloutRequest
from rollout.records import Work
from tests.support.engines import (
    END,
    FakeTool,
    Result,
    ScriptedDecoder,
    call,
    generate,
    make_engine,
    prompts,
    sampling,
)  # fmt: skip
from update.groups import SampledStep


@pytest.mark.parametrize("options", [{}, {"rows": 3}, {"deterministic": True}], ids=str)
def test_every_token_was_drawn_read_or_found_computed(model, chat, options):
    engine = make_engine(model, chat, FakeTool(), **options)
    records, stats = generate(engine, chat), engine.stats
    assert stats.decode_tokens == sum(r.num_sampled for r in records)
    # The last token of a line is never computed: nothing is drawn after it.
    assert stats.decode_tokens + stats.prefill_tokens + stats.reused_tokens == sum(
        len(r.token_ids) - 1 for r in records
    )
    shareable = [(len(line) - 1) // 16 * 16 for line in prompts(chat)]
    assert stats.reused_tokens == 3 * sum(shareable)  # four samples of each prompt
    assert stats.kept_tokens == sum(turn.end - 1 for r in records for turn in r.turns[:-1]) > 0
    assert stats.preemptions == 0 and stats.row_slots == stats.steps * options.get("rows", 16) >= stats.running_rows


class Sleeper:
    """A call takes 50 ms."""

    def __init__(self):
        self.pool = ThreadPoolExecutor(8)

    def open(self, problem):
        return self

    def close(self):
        pass

    def call(self, name, arguments, seed) -> Future:
        return self.pool.submit(lambda: time.sleep(0.05) or Result("ok", "7"))


@pytest.mark.parametrize("deterministic", [True, False])
def test_tool_time_counts_as_hidden_only_while_other_rows_decode(chat, tokenizer, deterministic):
    scripts = {0: [call("1") + END, "x" + END], 1: ["many words " * 12 + END]}
    decoder = ScriptedDecoder(tokenizer, scripts)
    engine = make_engine(None, chat, Sleeper(), decoder=decoder, pages=400, deterministic=deterministic)
    limits = sampling(n_samples_per_prompt=2, max_new_tokens=160, context_length=400)
    engine.generate(RolloutRequest(prompts(chat, 1), 0, Work()), limits)
    stats, step = engine.stats, SampledStep()
    step.add([], [], [], asdict(stats))
    row = step.rollout_row()
    assert stats.tool_seconds > 0
    assert 0 < stats.idle_seconds <= stats.tools_open_seconds <= stats.seconds
    assert row["rollout_tools_running"] == stats.tool_seconds / stats.seconds
    # A deterministic rollout waits for every call before it decodes on, also where another row could.
    assert (row["rollout_tools_hidden"] == 0) == deterministic
