"""The shipped tiny checkpoint: it loads, it is small, its problems are right, and its habits are sloppy."""

import json
import os
import re
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from scripts import tiny_task, tiny_tokenizer
from tests.support.tiny import FOLDER, read

CONTROLS = [
    ("<|endoftext|>", True), ("<|im_start|>", True), ("<|im_end|>", True), ("<tool_call>", False),
    ("</tool_call>", False), ("<tool_response>", False), ("</tool_response>", False), ("<think>", False),
    ("</think>", False),
]  # fmt: skip
SUFFIX = "\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def prompt_ids(tokenizer, prompt):
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tools=[tiny_tokenizer.TOOL_SCHEMA], add_generation_prompt=True,
        return_dict=False,
    )  # fmt: skip


def solve(prompt):
    """The answer by reading the question, without the builder's code."""
    match = re.fullmatch(r"What is (\d\d)\*(\d\d)\+(\d\d)\?|Let x be (\d\d)\*(\d\d)\. What is x\+(\d\d)\?", prompt)
    a, b, c = (int(text) for text in match.groups() if text)
    return str(a * b + c)


def test_the_whole_folder_is_under_one_megabyte():
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) < 1_000_000


def test_the_checkpoint_is_a_tied_bfloat16_qwen3_that_the_auto_classes_load(model, tokenizer):
    assert isinstance(model, Qwen3ForCausalLM)
    assert model.config.vocab_size == len(tokenizer)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert AutoModelForCausalLM.from_pretrained(FOLDER).dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id, tokenizer.pad_token_id] == [2, 0]


def test_the_control_tokens_are_qwen3s_and_nothing_else_is_an_added_token(tokenizer):
    added = [(token.content, token.special) for _, token in sorted(tokenizer.added_tokens_decoder.items())]
    assert added == CONTROLS
    assert tokenizer.convert_tokens_to_ids([name for name, _ in CONTROLS]) == list(range(9))


def test_a_prompt_with_the_tool_takes_at_most_30_tokens_and_decodes_to_the_rendered_template(tokenizer):
    for problem in read("problems_heldout.jsonl"):
        ids = prompt_ids(tokenizer, problem["prompt"])
        assert len(ids) <= 30
        text = tokenizer.decode(ids)
        assert json.dumps(tiny_tokenizer.TOOL_SCHEMA) in text
        assert text.endswith(f"<|im_start|>user\n{problem['prompt']}<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.skipif("QWEN3_TOKENIZER" not in os.environ, reason="set QWEN3_TOKENIZER to a Qwen3 tokenizer folder")
def test_template_split_and_flags_are_those_of_the_real_qwen3_tokenizer(tokenizer):
    real = AutoTokenizer.from_pretrained(os.environ["QWEN3_TOKENIZER"])
    assert tokenizer.chat_template == real.chat_template
    assert (tokenizer.eos_token, tokenizer.pad_token) == (real.eos_token, real.pad_token)
    flags = {token.content: token.special for token in real.added_tokens_decoder.values()}
    assert [(name, flags[name]) for name, _ in CONTROLS] == CONTROLS
    split = json.loads(real.backend_tokenizer.to_str())["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    assert split == tiny_tokenizer.QWEN_SPLIT


def test_the_shipped_tokenizer_is_the_one_its_builder_makes(tokenizer):
    built = tiny_tokenizer.build_tokenizer((FOLDER / "chat_template.jinja").read_text(encoding="utf-8"))
    assert built.get_vocab() == tokenizer.get_vocab()
    assert built.chat_template == tokenizer.chat_template


@pytest.mark.parametrize("kind", list(tiny_task.SLOPPY_MIX))
def test_an_episode_piece_by_piece_has_the_ids_of_its_whole_text(tokenizer, kind):
    rng = Random(kind)
    for _ in range(20):
        problem = tiny_task.draw_problem(rng)
        ids = prompt_ids(tokenizer, problem.prompt)
        text = tokenizer.decode(ids)
        for step in tiny_task.trace(problem, kind):
            pieces = [step.text + "<|im_end|>", *([SUFFIX.format(step.result)] if step.result is not None else [])]
            for piece in pieces:
                ids, text = ids + tokenizer.encode(piece), text + piece
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(text) == ids
        assert len(ids) < 110


def test_text_outside_the_task_survives_encoding_and_decoding(tokenizer):
    for text in (
        "Traceback (most recent call last):\n  x = 1\n\n\nNameError: né 数 🙂",
        "pythonic user\n print(1)\r\n\t",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_right_trace_calls_the_tool_as_often_as_the_problem_asks_and_every_other_kind_ends_wrong():
    rng = Random(0)
    for problem in tiny_task.draw_problems(rng, 200):
        for kind in tiny_task.SLOPPY_MIX:
            *calls, last = tiny_task.trace(problem, kind)
            for step in calls:
                expression = re.search(r"print\(([\d*+]+)\)", step.text).group(1)
                assert step.result == str(eval(expression))
            assert last.result is None
            assert (f"\\boxed{{{problem.answer}}}" in last.text) == (kind == "good")
            if kind == "good":
                assert len(calls) == problem.calls


def test_the_problems_are_many_distinct_and_rightly_answered():
    train, heldout = read("problems.jsonl"), read("problems_heldout.jsonl")
    assert len(train) >= 2000 and len(heldout) == 128
    assert len({problem["prompt"] for problem in train + heldout}) == len(train) + len(heldout)
    for problem in train + heldout:
        assert set(problem) == {"prompt", "answer"}
        assert problem["answer"] == solve(problem["prompt"])
    two_calls = sum(problem["prompt"].startswith("Let x") for problem in train)
    assert 0.4 < two_calls / len(train) < 0.6


def play(model, tokenizer, problem, generator):
    """One episode by plain full forwards; the tool answers sums and products. Returns (calls made, final text)."""
    ids, calls = prompt_ids(tokenizer, problem["prompt"]), 0
    while True:
        turn = []
        while len(turn) < 48 and turn[-1:] != [tokenizer.eos_token_id]:
            logits = model(torch.tensor([ids + turn]), use_cache=False, logits_to_keep=1).logits[0, -1]
            if generator is None:
                turn.append(int(logits.argmax()))
            else:
                turn.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
        text = tokenizer.decode(turn)
        if "<tool_call>" not in text or calls == 3:
            return calls, text
        match = re.search(r'"print\((\d{2,4}(?:[*+]\d{2,4})*)\)"', text)
        calls += 1
        ids = ids + turn + tokenizer.encode(SUFFIX.format(eval(match.group(1)) if match else "Error"))


def test_the_shipped_model_uses_the_tool_but_is_mostly_wrong_sampled_and_greedy(model, tokenizer):
    problems = read("problems_heldout.jsonl")[:24]
    generator = torch.Generator().manual_seed(0)
    for source in (generator, None):
        played = [(problem, *play(model, tokenizer, problem, source)) for problem in problems]
        assert sum(calls > 0 for _, calls, _ in played) >= 0.5 * len(played)
        assert sum(f"\\boxed{{{p['answer']}}}" in text for p, _, text in played) <= 0.3 * len(played)
