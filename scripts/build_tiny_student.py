"""Builds models/tiny_student: the tiny Qwen3 again, but of a model that has never seen a tool call.

    python -m scripts.build_tiny_student [--out DIR] [--seed N]

The same shape, initial scale and tokenizer as models/tiny_qwen3, trained from nothing on two kinds of episode, neither
with a call of its own: it answers at once with the digits of the problem's three numbers in a box, or it reads calls
and results that stand there already and boxes the last result. So it can copy numbers and write a box, it has never
had to write any token of a call, and asked a problem it boxes the three numbers: it scores 0. Copying is learnt here,
since learning it from a teacher's probabilities takes too many steps. Half a minute on one thread. Seeded: the same
machine writes the same bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

import torch
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from scripts.build_tiny_model import HOME, Line, build_model, episode, train
from scripts.tiny_task import Step, draw_problem, trace

STEPS = 300


def last_turn(line: Line) -> Line:
    """The episode with all turns but the last as if somebody else had written them."""
    ids, written = line
    start = len(written) - written[::-1].index(False)
    return ids, [False] * start + written[start:]


def build(out: Path, seed: int) -> None:
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)  # one thread makes the bytes repeat
    torch.manual_seed(seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(HOME)
    model = build_model(tokenizer)
    rng = Random(f"{seed} student traces")

    def draw() -> Line:
        problem = draw_problem(rng)
        if rng.random() < 0.5:
            return episode(
                tokenizer, problem, [Step(f"The answer is \\boxed{{{problem.a}{problem.b}{problem.c}}}.", None)]
            )
        return last_turn(episode(tokenizer, problem, trace(problem, "good")))

    train(model, draw, STEPS, 2e-3, "student")
    model.bfloat16().save_pretrained(out)
    print(f"wrote {out}: {sum(file.stat().st_size for file in out.iterdir())} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds the tiny student, which has never seen a tool call.")
    parser.add_argument("--out", type=Path, default=HOME.parent / "tiny_student", help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    build(arguments.out, arguments.seed)


if __name__ == "__main__":
    main()
