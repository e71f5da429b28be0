"""The shipped tiny GPT-OSS: it loads, it is small, its episodes are the chat's, and its habits are sloppy."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssForCausalLM

from reward import grade
from rollout.chat.harmony import HarmonyChat
from scripts import build_tiny_model, tiny_task
from scripts.tiny_tokenizer import HARMONY_CONTROLS, TOOL_SCHEMA, build_harmony_tokenizer
from tests.support.tiny import read

FOLDER = Path(__file__).resolve().parents[2] / "models" / "tiny_gpt_oss"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def chat(tokenizer):
    return HarmonyChat(tokenizer, [TOOL_SCHEMA])


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def test_the_whole_folder_is_under_one_megabyte():
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) < 1_000_000


def test_the_checkpoint_is_a_bfloat16_gpt_oss_with_sinks_windows_and_experts(model, tokenizer, chat):
    assert isinstance(model, GptOssForCausalLM)
    shape = model.config
    assert shape.vocab_size == len(tokenizer) and not shape.tie_word_embeddings
    assert shape.layer_types == ["sliding_attention", "full_attention"] * 2 and shape.sliding_window == 32
    assert (shape.num_local_experts, shape.num_experts_per_tok) == (4, 2)
    assert AutoModelForCausalLM.from_pretrained(FOLDER).dtype == torch.bfloat16
    assert set(model.generation_config.eos_token_id) == chat.stop_ids
    assert all(layer.self_attn.sinks.abs().sum() > 0 for layer in model.model.layers)


def test_the_shipped_tokenizer_is_the_one_its_builder_makes(tokenizer):
    built = build_harmony_tokenizer()
    assert built.get_vocab() == tokenizer.get_vocab()
    assert tokenizer.convert_tokens_to_ids(list(HARMONY_CONTROLS)) == list(range(9))
    assert {token.content for token in tokenizer.added_tokens_decoder.values()} == set(HARMONY_CONTROLS)


@pytest.mark.parametrize("kind", list(tiny_task.HARMONY_MIX))
def test_an_episode_is_its_whole_text_encoded_and_fits(tokenizer, chat, kind):
    rng = Random(kind)
    for _ in range(20):
        problem = tiny_task.draw_problem(rng)
        steps = tiny_task.trace(problem, kind, tiny_task.HARMONY)
        ids, written = build_tiny_model.episode(tokenizer, chat, tiny_task.HARMONY, problem, steps)
        assert tokenizer.encode(tokenizer.decode(ids)) == ids and len(ids) == len(written) < 125
        assert not any(written[: len(chat.prompt_ids([{"role": "user", "content": problem.prompt}]))])


def test_a_right_trace_is_answered_in_the_final_channel_and_every_other_kind_ends_wrong(tokenizer, chat):
    rng = Random(0)
    for problem in tiny_task.draw_problems(rng, 50):
        for kind in tiny_task.HARMONY_MIX:
            *calls, last = tiny_task.trace(problem, kind, tiny_task.HARMONY)
            for step in calls:
                [call] = chat.calls(tokenizer.encode(step.text + "<|call|>")).calls
                assert step.result == str(eval(call.arguments["code"].removeprefix("print")))
            said = chat.answer(tokenizer.encode(last.text + "<|return|>"))
            assert grade(said, problem.answer).correct == (kind == "good")


def play(model, chat, problem):
    """One greedy episode by Hugging Face's own `generate`; the tool answers sums. (calls made, the answer's text)"""
    ids, calls = chat.prompt_ids([{"role": "user", "content": problem["prompt"]}]), 0
    while True:
        turn = model.generate(torch.tensor([ids]), max_new_tokens=48, do_sample=False)[0, len(ids) :].tolist()
        items = chat.calls(turn).items
        if not items or calls == 3:
            return calls, chat.answer(turn)
        match = re.search(r'"print\((\d{2,4}(?:[*+]\d{2,4})*)\)"', chat.decode(turn))
        calls += 1
        ids = ids + turn + chat.reply_ids(turn, [str(eval(match.group(1))) if match else "Error"])


def test_the_shipped_model_uses_the_tool_but_its_greedy_answers_are_mostly_wrong(model, chat):
    played = [(problem, *play(model, chat, problem)) for problem in read("problems_heldout.jsonl")[:8]]
    assert sum(calls > 0 for _, calls, _ in played) >= 0.5 * len(played)
    assert sum(grade(text, p["answer"]).correct for p, _, text in played) <= 0.3 * len(played)
