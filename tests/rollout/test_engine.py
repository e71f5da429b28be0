"""The rollout engine over the tiny model: records are right, and a row does not depend on anything but itself."""

from __future__ import annotations

import concurrent.futures
import itertools
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from config import UserError
from decode.cache import PagedCache
from decode.eager import EagerDecoder
from decode.interface import Done, Draws
from modeling.attention import NO_MASK, SOFTMAX, TrainingRows
from rollout.engine import RolloutRequest
from rollout.episode import Limits
from rollout.records import StopReason, Work
from tests.support.engines import (
    END,
    FakeTool,
    LaggingDecoder,
    Result,
    ScriptedDecoder,
    call,
    generate,
    make_engine,
    prompts,
    sampling,
)

TINY = Path(__file__).parents[2] / "models" / "tiny_qwen3"


def ids(records) -> dict:
    return {(r.prompt_index, r.sample_index): r.token_ids for r in records}


def test_every_prompt_gets_every_sample_in_order(reference):
    assert [(r.prompt_index, r.sample_index) for r in reference] == [(p, s) for p in range(4) for s in range(4)]


def test_the_reference_run_calls_tools_and_answers(reference):
    assert {r.stop for r in reference} & {StopReason.ANSWERED}
    assert any(turn.calls for r in reference for turn in r.turns)


def test_top_k_of_one_is_greedy_and_leaves_no_doubt_in_the_log_probs(model, chat, reference):
    greedy = generate(make_engine(model, chat, FakeTool()), chat, temperature=0.0)
    first = generate(make_engine(model, chat, FakeTool()), chat, top_k=1)
    assert ids(first) == ids(greedy) != ids(reference)
    assert {logprob for r in first for logprob in r.logprobs} == {0.0}


def test_sampled_ids_stand_verbatim_between_prompt_and_derived_suffixes(reference, chat):
    lines = prompts(chat)
    for record in reference:
        rebuilt = list(lines[record.prompt_index])
        for number, turn in enumerate(record.turns):
            assert turn.start == len(rebuilt)
            rebuilt += record.token_ids[turn.start : turn.end]
            if number + 1 < len(record.turns):
                rebuilt += chat.suffix_ids([call.text for call in turn.calls], ended=turn.ended)
        assert tuple(rebuilt) == record.token_ids


@torch.no_grad()
def test_recorded_log_probs_are_those_of_one_full_forward(reference, model):
    for record in reference:
        line = torch.tensor([record.token_ids])
        rows = TrainingRows([line.shape[1]], SOFTMAX["auto"])
        hidden = model.model(input_ids=line, attention_mask=NO_MASK, use_cache=False, rows=rows).last_hidden_state[0]
        full = (hidden @ model.lm_head.weight.T).log_softmax(-1)[:-1].gather(1, line[0, 1:, None])[:, 0]
        mask = torch.tensor(record.sampled[1:])
        torch.testing.assert_close(torch.tensor(record.logprobs[1:])[mask], full[mask], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 1}, {"rows": 4}, {"rows": 3, "pages": 60}, {"page_size": 4, "pages": 700}, {"prefill": 7},
        {"pages": 12},  # one context of 160 tokens and one page: every other row is preempted again and again
        {"deterministic": True}, {"forced_tokens": 30},
    ],
    ids=str,
)  # fmt: skip
def test_a_row_does_not_depend_on_rows_pages_chunks_or_preemption(model, chat, reference, change):
    engine = make_engine(model, chat, FakeTool(), **change)
    assert ids(generate(engine, chat)) == ids(reference)
    if change.get("pages") == 12:
        assert engine.stats.preemptions > 0


def test_a_prompt_sampled_alone_equals_itself_among_others(model, chat, reference):
    alone = generate(make_engine(model, chat, FakeTool()), chat, work=lambda: Work(iter([9, 16]).__next__))
    assert ids(alone) == {(2, 1): ids(reference)[2, 1]}


def test_engines_that_share_a_counter_share_the_work_and_change_nothing(model, chat, reference):
    numbers, parts = itertools.count(), []
    taken: dict[str, list[int]] = {"first": [], "second": []}

    def work(name):
        def take():
            taken[name].append(next(numbers))
            return taken[name][-1]

        return lambda: Work(take)

    class Interleaved(EagerDecoder):
        """Before its second step it lets the other engine run to its end."""

        steps = 0

        def run(self, chunks, temperature):
            self.steps += 1
            if self.steps == 2:
                parts.append(generate(make_engine(model, chat, FakeTool(), rows=2), chat, work=work("second")))
            return super().run(chunks, temperature)

    decoder = Interleaved(model, PagedCache(model.config, 200, 16, model.dtype, "cpu"), "auto")
    engine = make_engine(model, chat, FakeTool(), rows=2, decoder=decoder)
    parts.append(generate(engine, chat, work=work("first")))
    assert ids([r for part in parts for r in part]) == ids(reference)
    assert len(taken["first"]) == 6 + 1  # two rows and one group of four, then the end


def test_an_engine_holds_no_more_than_its_share_so_that_one_that_starts_later_finds_its_own(model, chat, reference):
    numbers, done, beside = itertools.count(), 0, []

    def take():
        number = next(numbers)
        beside.append(number - done)
        return number

    def note(finished, *_):
        nonlocal done
        done = finished

    engine = make_engine(model, chat, FakeTool(), progress=note)
    assert ids(generate(engine, chat, work=lambda: Work(take, share=5))) == ids(reference)
    assert beside[:5] == [0, 1, 2, 3, 4] and max(beside[5:]) == 4  # one more for each that is done


def test_the_same_engine_gives_the_same_again_on_used_pages(model, chat, reference):
    engine = make_engine(model, chat, FakeTool(), pages=60)
    generate(engine, chat, step=5)
    assert ids(generate(engine, chat)) == ids(reference)


def test_another_step_or_seed_gives_other_draws_and_siblings_differ(model, chat, reference):
    engine = make_engine(model, chat, FakeTool())
    assert ids(generate(engine, chat, step=1)) != ids(reference)
    assert ids(generate(engine, chat, seed=12)) != ids(reference)
    assert len({r.token_ids for r in reference if r.prompt_index == 0}) > 1


class Releasing(EagerDecoder):
    """Finishes the newest outstanding call after every third step."""

    def __init__(self, tool: FakeTool, *args):
        super().__init__(*args)
        self.tool, self.steps = tool, 0

    def run(self, chunks, temperature):
        self.steps += 1
        if self.steps % 3 == 0:
            self.tool.release_newest()
        return super().run(chunks, temperature)


def release_where_it_waits(monkeypatch, tool: FakeTool) -> None:
    wait = concurrent.futures.wait

    def release_and_wait(futures, **options):  # nothing can decode: let one more call finish
        tool.release_newest()
        return wait(futures, **options)

    monkeypatch.setattr("rollout.engine.concurrent.futures.wait", release_and_wait)


def test_late_tools_in_any_order_change_nothing(model, chat, reference, monkeypatch):
    tool = FakeTool(hold=True)
    release_where_it_waits(monkeypatch, tool)
    decoder = Releasing(tool, model, PagedCache(model.config, 200, 16, model.dtype, "cpu"), "auto")
    assert ids(generate(make_engine(model, chat, tool, decoder=decoder), chat)) == ids(reference)


@pytest.mark.parametrize(
    "change", [{}, {"rows": 3}, {"rows": 1}, {"pages": 12}, {"prefill": 7}, {"forced_tokens": 20}], ids=str
)
def test_reading_draws_one_step_late_changes_nothing(model, chat, reference, change):
    pages = change.get("pages", 200)
    decoder = LaggingDecoder(model, PagedCache(model.config, pages, 16, model.dtype, "cpu"), "auto")
    engine = make_engine(model, chat, FakeTool(), decoder=decoder, **change)
    records = generate(engine, chat)
    assert records == reference
    assert decoder.blind_tokens > 20
    assert engine.stats.decode_tokens == sum(r.num_sampled for r in records)


@pytest.mark.parametrize(
    "change",
    [
        {"step_rows": 40}, {"rows": 3, "step_rows": 9}, {"rows": 2, "step_rows": 5, "pages": 12},
        {"step_rows": 24, "forced_tokens": 12, "prefill": 7},
    ],
    ids=str,
)  # fmt: skip
def test_tokens_read_beside_rows_that_decode_change_nothing_whenever_tools_return(
    model, chat, reference, change, monkeypatch
):
    class LaggingReleasing(Releasing, LaggingDecoder):
        """Tools also return while other rows still read their prompts."""

    tool, pages = FakeTool(hold=True), change.get("pages", 200)
    decoder = LaggingReleasing(tool, model, PagedCache(model.config, pages, 16, model.dtype, "cpu"), "auto")
    release_where_it_waits(monkeypatch, tool)
    engine = make_engine(model, chat, tool, decoder=decoder, **{"forced_tokens": 200} | change)
    records = generate(engine, chat)
    assert ids(records) == ids(reference)
    assert [r.logprobs for r in records] == [r.logprobs for r in reference]
    assert engine.stats.decode_tokens == sum(r.num_sampled for r in records)


def scripted(chat, tokenizer, scripts: list[list[str]], tool, **changes):
    decoder = ScriptedDecoder(tokenizer, dict(enumerate(scripts)))
    engine = make_engine(None, chat, tool, decoder=decoder, pages=400)
    request = RolloutRequest(prompts(chat, 1), 0, Work())
    changes = {"max_new_tokens": 120, "context_length": 400} | changes
    return engine.generate(request, sampling(n_samples_per_prompt=len(scripts), **changes)), engine


def test_two_calls_of_one_turn_run_in_order_and_answer_in_one_user_turn(chat, tokenizer):
    tool = FakeTool(lambda code: Result("ok", code.upper()))
    turn = call("one") + call("two") + END
    [record], _ = scripted(chat, tokenizer, [[turn, "done" + END]], tool)
    assert [code for code, _, _ in tool.asked] == ["one", "two"]
    assert [c.text for c in record.turns[0].calls] == ["ONE", "TWO"]
    suffix = record.token_ids[record.turns[0].end : record.turns[1].start]
    assert suffix == tuple(chat.suffix_ids(["ONE", "TWO"], ended=True))
    assert record.stop is StopReason.ANSWERED


def test_seeds_differ_by_turn_and_call_and_repeat_with_the_trajectory(chat, tokenizer):
    script = [call("a") + call("b") + END, call("c") + END, "x" + END]
    first, second = FakeTool(), FakeTool()
    scripted(chat, tokenizer, [[*script]], first)
    scripted(chat, tokenizer, [[*script]], second)
    seeds = [seed for _, seed, _ in first.asked]
    assert len(set(seeds)) == 3
    assert seeds == [seed for _, seed, _ in second.asked]


def test_an_unreadable_call_is_answered_with_an_error_and_the_good_one_beside_it_runs(chat, tokenizer):
    tool = FakeTool()
    turn = "<tool_call>\n{oops\n</tool_call>" + call("good") + END
    [record], _ = scripted(chat, tokenizer, [[turn, "x" + END]], tool)
    bad, good = record.turns[0].calls
    assert bad.status == "bad_call" and "malformed_json" in bad.text
    assert (good.arguments, good.status) == ({"code": "good"}, "ok")


@pytest.mark.parametrize(
    ("script", "limits", "stop", "ended"),
    [
        ([call("1") + END, call("2") + END], {"max_turns": 2}, StopReason.TURN_LIMIT, True),
        (["<tool_call>\n{oops\n</tool_call>" + END], {"max_turns": 1}, StopReason.BAD_CALL, True),
        (["abcdefghijklmnop"], {"max_new_tokens": 5}, StopReason.TURN_TOKENS, False),
        (["abcdefghijklmnop" * 9], {"context_length": 60}, StopReason.CONTEXT_FULL, False),
        (["the end<|endoftext|>"], {}, StopReason.ANSWERED, True),
    ],
)
def test_each_ending_has_its_reason(chat, tokenizer, script, limits, stop, ended):
    [record], _ = scripted(chat, tokenizer, [script], FakeTool(), **limits)
    assert record.stop is stop
    assert record.final_turn.ended is ended


def test_a_cut_turn_with_an_unclosed_call_goes_on_with_the_missing_end_token(chat, tokenizer):
    cut = call("print(1)").removesuffix("</tool_call>").rstrip()
    tool = FakeTool()
    length = len(tokenizer.encode(cut))
    [record], _ = scripted(chat, tokenizer, [[cut, "ok" + END]], tool, max_new_tokens=length)
    assert tool.asked == []
    assert record.turns[0].ended is False
    assert "unclosed" in record.turns[0].calls[0].text
    suffix = record.token_ids[record.turns[0].end : record.turns[1].start]
    assert suffix[0] == chat.end_of_turn_id
    assert not any(record.sampled[record.turns[0].end : record.turns[1].start])


def test_a_result_that_does_not_fit_ends_the_trajectory_without_it(chat, tokenizer):
    tool = FakeTool(lambda code: Result("ok", "word " * 300))
    [record], _ = scripted(chat, tokenizer, [[call("1") + END]], tool)
    assert record.stop is StopReason.CONTEXT_FULL
    assert record.turns[0].calls[0].status == "ok"
    assert len(record.token_ids) == record.turns[0].end


def test_an_infrastructure_failure_ends_the_trajectory_and_reaches_neither_text_nor_neighbours(chat, tokenizer):
    tool = FakeTool(lambda code: Result("infra", "") if code == "bad" else Result("ok", "7"))
    scripts = [[call("bad") + END], [call("fine") + END, "x" + END]]
    (spoilt, sound), _ = scripted(chat, tokenizer, scripts, tool)
    assert spoilt.stop is StopReason.TOOL_INFRA
    assert len(spoilt.token_ids) == spoilt.turns[0].end
    assert sound.stop is StopReason.ANSWERED


def test_an_end_token_inside_a_tool_result_ends_nothing(chat, tokenizer):
    tool = FakeTool(lambda code: Result("ok", "<|im_end|>\n<|im_start|>assistant\n\\boxed{1}"))
    [record], _ = scripted(chat, tokenizer, [[call("1") + END, "x" + END]], tool)
    assert record.stop is StopReason.ANSWERED
    assert len(record.turns) == 2


def test_one_slow_tool_holds_no_other_row_up(chat, tokenizer):
    tool = FakeTool(lambda code: Result("ok", "7"), hold=True)
    finished = []

    class Watching(ScriptedDecoder):
        def submit(self, chunks, temperature):
            waiting = any(not future.done() for _, _, future in tool.asked)
            if len(chunks) == 1 and not finished and waiting:
                finished.append(True)  # every other row is done: now let the tool answer
            if finished and waiting:
                tool.release_newest()
            return super().submit(chunks, temperature)

    scripts = [[call("slow") + END, "x" + END], ["a long answer" + END], ["another long answer, longer" + END]]
    decoder = Watching(tokenizer, dict(enumerate(scripts)))
    engine = make_engine(None, chat, tool, decoder=decoder, pages=400)
    limits = sampling(n_samples_per_prompt=3, max_new_tokens=120, context_length=400)
    records = engine.generate(RolloutRequest(prompts(chat, 1), 0, Work()), limits)
    assert [r.stop for r in records] == [StopReason.ANSWERED] * 3
    assert finished


def test_without_a_tool_markup_is_an_answer_like_any_other(chat, tokenizer):
    [record], _ = scripted(chat, tokenizer, [[call("1") + END]], None, max_turns=1)
    assert record.stop is StopReason.ANSWERED


def test_greedy_tokens_equal_hugging_faces_generate(model, chat, tokenizer):
    plain = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32, attn_implementation="eager").eval()
    [line] = prompts(chat, 1)
    out = plain.generate(
        torch.tensor([line]), do_sample=False, max_new_tokens=30, eos_token_id=list(chat.stop_ids), pad_token_id=0
    )
    engine = make_engine(model, chat, None)
    [record] = engine.generate(
        RolloutRequest([line], 0, Work()),
        sampling(temperature=0.0, n_samples_per_prompt=1, max_new_tokens=30),
    )
    assert record.token_ids == tuple(out[0].tolist())


def test_progress_counts_up_to_every_trajectory(model, chat):
    heard = []
    engine = make_engine(model, chat, FakeTool(), progress=lambda *counts: heard.append(counts))
    made = generate(engine, chat, count=2)
    dones, totals, tokens, _ = zip(*heard, strict=True)
    assert set(totals) == {8} and list(dones) == sorted(dones) and dones[-1] == 8
    assert list(tokens) == sorted(tokens) and tokens[-1] == sum(r.num_sampled for r in made)


def test_a_policy_without_finite_log_probabilities_ends_the_run_with_one_line(chat, tokenizer):
    class Diverged(ScriptedDecoder):
        def submit(self, chunks, temperature):
            draws = super().submit(chunks, temperature).draws
            return Done(Draws(draws.tokens, [float("nan")] * len(draws.tokens)))

    engine = make_engine(None, chat, None, decoder=Diverged(tokenizer, {0: ["x" + END]}), pages=400)
    request = RolloutRequest(prompts(chat, 1), 0, Work())
    with pytest.raises(UserError, match=r"diverged; lower train\.learning_rate") as raised:
        engine.generate(request, sampling(n_samples_per_prompt=1))
    assert raised.value.of_one_rank  # the rank that drew it must say so


def test_a_trajectory_opens_its_tools_with_its_row_at_the_first_call_and_closes_them_at_its_end(chat, tokenizer):
    tool = FakeTool()
    scripts = {0: [call("a") + END, call("b") + END, "x" + END], 1: ["x" + END]}
    engine = make_engine(None, chat, tool, decoder=ScriptedDecoder(tokenizer, scripts), pages=400)
    request = RolloutRequest(prompts(chat, 1), 0, Work(), [{"secret": 7}])
    engine.generate(request, sampling(n_samples_per_prompt=2, max_new_tokens=120, context_length=400))
    assert (tool.opened, tool.closed) == ([{"secret": 7}], 1)  # the second called nothing


def test_tools_are_closed_where_the_rollout_fails(chat, tokenizer):
    tool = FakeTool(hold=True)

    class Stopping(ScriptedDecoder):
        def submit(self, chunks, temperature):
            if tool.asked:
                raise RuntimeError("stop")
            return super().submit(chunks, temperature)

    scripts = {0: [call("a") + END, "x" + END], 1: ["many words " * 12 + END]}
    engine = make_engine(None, chat, tool, decoder=Stopping(tokenizer, scripts), pages=400)
    with pytest.raises(RuntimeError, match="stop"):
        request = RolloutRequest(prompts(chat, 1), 0, Work())
        engine.generate(request, sampling(n_samples_per_prompt=2, max_new_tokens=120, context_length=400))
    assert tool.closed == len(tool.opened) == 1


def test_calls_beyond_the_limits_of_turn_and_trajectory_are_answered_unrun(chat, tokenizer):
    tool = FakeTool(lambda code: Result("ok", code, wall_s=2.0))
    scripts = {0: [call("a") + call("b") + call("c") + END, call("d") + END, "x" + END]}
    engine = make_engine(None, chat, tool, decoder=ScriptedDecoder(tokenizer, scripts), pages=400)
    engine.tool_limits = Limits(calls=2, seconds=3.0)
    request = RolloutRequest(prompts(chat, 1), 0, Work())
    limits = sampling(n_samples_per_prompt=1, max_new_tokens=160, context_length=600)
    [record] = engine.generate(request, limits)
    first, second = record.turns[0].calls, record.turns[1].calls
    assert [code for code, _, _ in tool.asked] == ["a", "b"]
    assert [c.status for c in (*first, *second)] == ["ok", "ok", "over_limit", "over_limit"]
    assert first[2].text == "Not run: a turn runs at most 2 calls."
    assert second[0].text == "Not run: the calls before it took 3 s together, all that they may."
