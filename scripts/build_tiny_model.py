"""Builds models/tiny_qwen3: tokenizer, problems, and a Qwen3 of 0.33 million weights with sloppy habits.

    python -m scripts.build_tiny_model [--out DIR] [--seed N]

Two stages of supervised training on one thread (a minute and a half): first right digits only, with and without the
box, until the model copies numbers without slips; then the sloppy mix of `tiny_task`, so that most sampled answers and
all greedy ones are wrong for reasons which reinforcement learning mends in a few dozen steps. Copying itself is never
left to reinforcement learning, which is bad at it. Seeded: the same machine writes the same bytes.

Three choices make so small a model copy reliably. The weights start at a deviation of 0.1, near 1/sqrt(hidden); the
usual 0.02 suits wide models. Qwen3 normalises queries and keys, so with 32 dimensions per head an attention logit is
at most sqrt(32) = 5.7 at the start, too flat to single out one key of a hundred: the norm weights start at 2, which
allows 4 times that. And with a rope base of 100 every dimension turns visibly within an episode.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from scripts.tiny_task import Problem, Step, draw_kind, draw_problem, draw_problems, trace
from scripts.tiny_tokenizer import CONTROLS, MAX_LENGTH, TOOL_SCHEMA, build_tokenizer

HOME = Path(__file__).resolve().parents[1] / "models" / "tiny_qwen3"
TRAINING_PROBLEMS, HELDOUT_PROBLEMS = 2048, 128
COPY_STEPS, SLOPPY_STEPS = 700, 150
BATCH = 24
PAD = CONTROLS.index("<|endoftext|>")
IGNORED = -100  # target of a token that the model does not have to predict

Line = tuple[list[int], list[bool]]  # token ids of one episode; True where the assistant wrote the token


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=96, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1,
        head_dim=32, intermediate_size=256, tie_word_embeddings=True, max_position_embeddings=MAX_LENGTH,
        initializer_range=0.1,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        dtype="bfloat16",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).float()
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.self_attn.q_norm.weight, 2.0)
        torch.nn.init.constant_(layer.self_attn.k_norm.weight, 2.0)
    return model


def episode(tokenizer: PreTrainedTokenizerFast, problem: Problem, steps: list[Step]) -> Line:
    """The token line of a rollout: prompt, then each turn with its end token and the suffix that the chat appends."""
    messages = [{"role": "user", "content": problem.prompt}]
    ids = tokenizer.encode(
        str(tokenizer.apply_chat_template(messages, tools=[TOOL_SCHEMA], add_generation_prompt=True, tokenize=False))
    )
    written = [False] * len(ids)
    for step in steps:
        turn = tokenizer.encode(step.text + "<|im_end|>")
        ids, written = ids + turn, written + [True] * len(turn)
        if step.result is not None:
            suffix = tokenizer.encode(
                f"\n<|im_start|>user\n<tool_response>\n{step.result}\n</tool_response><|im_end|>\n"
                "<|im_start|>assistant\n"
            )
            ids, written = ids + suffix, written + [False] * len(suffix)
    return ids, written


def collate(lines: list[Line]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded inputs [B, T] and next-token targets [B, T], which are IGNORED outside the assistant's tokens."""
    width = max(len(ids) for ids, _ in lines)
    inputs = torch.full((len(lines), width), PAD)
    targets = torch.full((len(lines), width), IGNORED)
    for row, (ids, written) in enumerate(lines):
        inputs[row, : len(ids)] = torch.tensor(ids)
        targets[row, : len(ids) - 1] = torch.where(torch.tensor(written), torch.tensor(ids), IGNORED)[1:]
    return inputs, targets


def train(model: PreTrainedModel, draw: Callable[[], Line], steps: int, rate: float, name: str) -> None:
    """Supervised training on drawn episodes; the rate rises over 20 steps and falls linearly to a twentieth."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    start = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min((step + 1) / 20, max(1 - step / steps, 0.05))
        inputs, targets = collate([draw() for _ in range(BATCH)])
        # Pads stand on the right, so the causal mask alone keeps them from every real token.
        logits = model(input_ids=inputs, use_cache=False).logits
        chosen = targets != IGNORED
        loss = torch.nn.functional.cross_entropy(logits[chosen], targets[chosen])
        exact = (logits.argmax(-1) == targets)[chosen].float().mean().item()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 25 == 0:
            seconds = time.monotonic() - start
            print(
                f"{name} {step + 1:4d}/{steps}  loss {loss.item():.3f}  exact {exact:.3f}  {seconds:.0f} s", flush=True
            )


def write_problems(path: Path, problems: Iterable[Problem]) -> None:
    lines = [json.dumps({"prompt": p.prompt, "answer": str(p.answer)}) + "\n" for p in problems]
    path.write_text("".join(lines), encoding="utf-8")


def build(out: Path, seed: int) -> None:
    torch.set_num_threads(1)  # more threads cost time at this size, and one thread makes the bytes repeat
    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    problems = draw_problems(Random(f"{seed} problems"), TRAINING_PROBLEMS + HELDOUT_PROBLEMS)
    write_problems(out / "problems.jsonl", problems[:TRAINING_PROBLEMS])
    write_problems(out / "problems_heldout.jsonl", problems[TRAINING_PROBLEMS:])
    heldout = set(problems[TRAINING_PROBLEMS:])
    tokenizer = build_tokenizer((HOME / "chat_template.jinja").read_text(encoding="utf-8"))
    tokenizer.save_pretrained(out)
    model = build_model(tokenizer)
    rng = Random(f"{seed} traces")

    def draw(choose_kind: Callable[[Random], str]) -> Line:
        while (problem := draw_problem(rng)) in heldout:
            pass
        return episode(tokenizer, problem, trace(problem, choose_kind(rng)))

    train(model, lambda: draw(lambda rng: rng.choice(["good", "no_box"])), COPY_STEPS, 2e-3, "copy  ")
    train(model, lambda: draw(draw_kind), SLOPPY_STEPS, 1e-3, "sloppy")
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
    )
    model.bfloat16().save_pretrained(out)
    print(f"wrote {out}: {sum(file.stat().st_size for file in out.iterdir())} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds the tiny Qwen3 checkpoint, its tokenizer and its problems.")
    parser.add_argument("--out", type=Path, default=HOME, help="folder to write (default: models/tiny_qwen3)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    build(arguments.out, arguments.seed)


if __name__ == "__main__":
    main()
