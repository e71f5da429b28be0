"""Builds the tiny models: tokenizer and a third of a million weights with sloppy habits. One thread, a minute or two.

    python -m scripts.build_tiny_model [tiny_qwen3 | tiny_gpt_oss | tiny_student] [--out DIR] [--seed N]

tiny_qwen3, tiny_gpt_oss: two stages of supervised training: first right digits only, with and without the box, until
the model copies numbers without slips; then the sloppy mix of the dialect, so that most sampled answers and all greedy
ones are wrong for reasons that reinforcement learning fixes in a few dozen steps. Copying itself is never left to
reinforcement learning, which is bad at it. tiny_qwen3 comes with the problems; tiny_gpt_oss trains on them and has
every trait of its family: attention sinks, layers that see the last 32 tokens alone, four experts of which each token
takes two, biases, an untied head.

tiny_student: tiny_qwen3's shape, initial scale and tokenizer, trained from nothing on two kinds of episode, neither
with a call of its own: it answers at once with the digits of the problem's three numbers in a box, or it reads calls
and results that stand there already and boxes the last result. So it can copy numbers and write a box, has never
written a token of a call, and asked a problem it boxes the three numbers: it scores 0. Copying is learnt here, since
learning it from a teacher's probabilities takes too many steps.

Seeded: the same machine writes the same bytes. Three choices make so small a model copy reliably. The weights start at
a deviation of 0.1, near 1/sqrt(hidden); the usual 0.02 suits wide models. Qwen3 normalises queries and keys, so with
32 dimensions per head an attention logit is at most sqrt(32) = 5.7 at the start, too flat to single out one key of a
hundred: the norm weights start at 2, which allows 4 times that. And with a rope base of 100 every dimension turns
visibly within an episode.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from random import Random

import torch
from transformers import (
    GenerationConfig,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

from rollout.chat.formats import Chat
from rollout.chat.harmony import HarmonyChat
from rollout.chat.qwen3 import Qwen3Chat
from scripts.tiny_task import (
    HARMONY,
    HARMONY_MIX,
    QWEN,
    SLOPPY_MIX,
    Dialect,
    Problem,
    Step,
    draw_kind,
    draw_problem,
    draw_problems,
    trace,
)
from scripts.tiny_tokenizer import MAX_LENGTH, TOOL_SCHEMA, build_harmony_tokenizer, build_tokenizer

MODELS = Path(__file__).resolve().parents[1] / "models"
TRAINING_PROBLEMS, HELDOUT_PROBLEMS = 2048, 128
SLOPPY_STEPS = 150
BATCH = 24
PAD = 0  # right of each sequence, where nothing reads it
IGNORED = -100  # target of a token that the model does not have to predict

Line = tuple[list[int], list[bool]]  # token ids of one episode; True where the assistant wrote the token


def build_qwen3(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
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


def build_gpt_oss(tokenizer: PreTrainedTokenizerFast) -> GptOssForCausalLM:
    config = GptOssConfig(
        vocab_size=len(tokenizer), hidden_size=96, num_hidden_layers=4, num_attention_heads=3, num_key_value_heads=1,
        head_dim=32, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=32,
        tie_word_embeddings=False, max_position_embeddings=MAX_LENGTH, initializer_range=0.1,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
        dtype="bfloat16",
    )  # fmt: skip
    return GptOssForCausalLM(config).float()


def episode(
    tokenizer: PreTrainedTokenizerFast, chat: Chat, dialect: Dialect, problem: Problem, steps: list[Step]
) -> Line:
    """The token ids of a rollout, put together by the chat itself."""
    ids = chat.prompt_ids([{"role": "user", "content": problem.prompt}])
    written = [False] * len(ids)
    for step in steps:
        turn = tokenizer.encode(step.text + (dialect.answer_end if step.result is None else dialect.turn_end))
        reply = [] if step.result is None else chat.reply_ids(turn, [step.result])
        ids, written = ids + turn + reply, written + [True] * len(turn) + [False] * len(reply)
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


def train_sloppy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, chat: Chat, dialect: Dialect, mix: Mapping[str, float],
    copy_steps: int, seed: int, heldout: set[str],
) -> None:  # fmt: skip
    """The two stages. heldout: prompts that are not trained on"""
    rng = Random(f"{seed} traces")

    def draw(choose_kind: Callable[[], str]) -> Line:
        while (problem := draw_problem(rng)).prompt in heldout:
            pass
        return episode(tokenizer, chat, dialect, problem, trace(problem, choose_kind(), dialect))

    train(model, lambda: draw(lambda: rng.choice(["good", "no_box"])), copy_steps, 2e-3, "copy  ")
    train(model, lambda: draw(lambda: draw_kind(rng, mix)), SLOPPY_STEPS, 1e-3, "sloppy")


def tiny_qwen3(out: Path, seed: int) -> PreTrainedModel:
    problems = draw_problems(Random(f"{seed} problems"), TRAINING_PROBLEMS + HELDOUT_PROBLEMS)
    write_problems(out / "problems.jsonl", problems[:TRAINING_PROBLEMS])
    write_problems(out / "problems_heldout.jsonl", problems[TRAINING_PROBLEMS:])
    heldout = {problem.prompt for problem in problems[TRAINING_PROBLEMS:]}
    tokenizer = build_tokenizer((MODELS / "tiny_qwen3" / "chat_template.jinja").read_text(encoding="utf-8"))
    tokenizer.save_pretrained(out)
    model = build_qwen3(tokenizer)
    train_sloppy(model, tokenizer, Qwen3Chat(tokenizer, [TOOL_SCHEMA]), QWEN, SLOPPY_MIX, 700, seed, heldout)
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ends[1], do_sample=True)
    return model


def tiny_gpt_oss(out: Path, seed: int) -> PreTrainedModel:
    lines = (MODELS / "tiny_qwen3" / "problems_heldout.jsonl").read_text(encoding="utf-8").splitlines()
    heldout = {json.loads(line)["prompt"] for line in lines}
    tokenizer = build_harmony_tokenizer()
    tokenizer.save_pretrained(out)
    chat, model = HarmonyChat(tokenizer, [TOOL_SCHEMA]), build_gpt_oss(tokenizer)
    train_sloppy(model, tokenizer, chat, HARMONY, HARMONY_MIX, 300, seed, heldout)
    model.generation_config = GenerationConfig(
        eos_token_id=sorted(chat.stop_ids), pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    return model


def tiny_student(_: Path, seed: int) -> PreTrainedModel:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODELS / "tiny_qwen3")
    chat, model = Qwen3Chat(tokenizer, [TOOL_SCHEMA]), build_qwen3(tokenizer)
    rng = Random(f"{seed} student traces")

    def draw() -> Line:
        problem = draw_problem(rng)
        if rng.random() < 0.5:
            answer = Step(f"The answer is \\boxed{{{problem.a}{problem.b}{problem.c}}}.", None)
            return episode(tokenizer, chat, QWEN, problem, [answer])
        ids, written = episode(tokenizer, chat, QWEN, problem, trace(problem, "good"))
        start = len(written) - written[::-1].index(
            False
        )  # of the last turn: the others as if another had written them
        return ids, [False] * start + written[start:]

    train(model, draw, 300, 2e-3, "student")
    return model


BUILDERS = {"tiny_qwen3": tiny_qwen3, "tiny_gpt_oss": tiny_gpt_oss, "tiny_student": tiny_student}


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds a tiny checkpoint, its tokenizer and its problems.")
    parser.add_argument("model", nargs="?", choices=BUILDERS, default="tiny_qwen3")
    parser.add_argument("--out", type=Path, help="folder to write (default: models/MODEL)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    out: Path = arguments.out or MODELS / arguments.model
    out.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()
    torch.set_num_threads(1)  # more threads cost time at this size, and one thread makes the bytes repeat
    torch.manual_seed(arguments.seed)
    BUILDERS[arguments.model](out, arguments.seed).bfloat16().save_pretrained(out)
    print(f"wrote {out}: {sum(file.stat().st_size for file in out.iterdir())} bytes")


if __name__ == "__main__":
    main()
