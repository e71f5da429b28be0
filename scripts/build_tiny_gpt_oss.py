"""Builds models/tiny_gpt_oss: tokenizer and a GPT-OSS of 0.3 million weights with sloppy habits.

    python -m scripts.build_tiny_gpt_oss [--out DIR] [--seed N]

The task, the problems (models/tiny_qwen3/problems*.jsonl) and the two stages are those of `build_tiny_model`; markup
and habits are `tiny_harmony`'s. Every family trait is there: attention sinks, layers that see the last 32 tokens
alone, four experts of which each token takes two, biases, an untied head. Seeded: the same machine writes the same
bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from transformers import GenerationConfig, GptOssConfig, GptOssForCausalLM, PreTrainedTokenizerFast

from rollout.chat.harmony import HarmonyChat
from scripts.build_tiny_model import HOME as TINY_QWEN3
from scripts.build_tiny_model import Line, train
from scripts.tiny_harmony import HARMONY, SLOPPY_MIX, build_tokenizer
from scripts.tiny_task import Problem, draw_kind, draw_problem, trace
from scripts.tiny_tokenizer import MAX_LENGTH, TOOL_SCHEMA

HOME = TINY_QWEN3.with_name("tiny_gpt_oss")
COPY_STEPS, SLOPPY_STEPS = 300, 150


def build_model(tokenizer: PreTrainedTokenizerFast) -> GptOssForCausalLM:
    config = GptOssConfig(
        vocab_size=len(tokenizer), hidden_size=96, num_hidden_layers=4, num_attention_heads=3, num_key_value_heads=1,
        head_dim=32, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=32,
        tie_word_embeddings=False, max_position_embeddings=MAX_LENGTH, initializer_range=0.1,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
        dtype="bfloat16",
    )  # fmt: skip
    return GptOssForCausalLM(config).float()


def episode(tokenizer: PreTrainedTokenizerFast, chat: HarmonyChat, problem: Problem, kind: str) -> Line:
    """The token line of a rollout, put together by the chat itself."""
    ids = chat.prompt_ids([{"role": "user", "content": problem.prompt}])
    written = [False] * len(ids)
    for step in trace(problem, kind, HARMONY):
        turn = tokenizer.encode(step.text + ("<|return|>" if step.result is None else "<|call|>"))
        reply = [] if step.result is None else chat.reply_ids(turn, [step.result])
        ids, written = ids + turn + reply, written + [True] * len(turn) + [False] * len(reply)
    return ids, written


def build(out: Path, seed: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    chat = HarmonyChat(tokenizer, [TOOL_SCHEMA])
    model = build_model(tokenizer)
    lines = (TINY_QWEN3 / "problems_heldout.jsonl").read_text(encoding="utf-8").splitlines()
    heldout = {json.loads(line)["prompt"] for line in lines}
    rng = Random(f"{seed} traces")

    def draw(choose_kind: Callable[[Random], str]) -> Line:
        while (problem := draw_problem(rng)).prompt in heldout:
            pass
        return episode(tokenizer, chat, problem, choose_kind(rng))

    train(model, lambda: draw(lambda rng: rng.choice(["good", "no_box"])), COPY_STEPS, 2e-3, "copy  ")
    train(model, lambda: draw(lambda rng: draw_kind(rng, SLOPPY_MIX)), SLOPPY_STEPS, 1e-3, "sloppy")
    model.generation_config = GenerationConfig(
        eos_token_id=sorted(chat.stop_ids), pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    model.bfloat16().save_pretrained(out)
    print(f"wrote {out}: {sum(file.stat().st_size for file in out.iterdir())} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds the tiny GPT-OSS checkpoint and its tokenizer.")
    parser.add_argument("--out", type=Path, default=HOME, help="folder to write (default: models/tiny_gpt_oss)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    build(arguments.out, arguments.seed)


if __name__ == "__main__":
    main()
