"""Writes data/<name>.jsonl, one {"prompt", "answer"} a line, each prompt once: what the configs read.

    python scripts/prepare_data.py dapo-math-17k
    python scripts/prepare_data.py aime-2024 --source downloads/aime-2024.parquet
    python scripts/prepare_data.py dataset --source organisation/name --prompt-field problem --answer-field solution
    python scripts/prepare_data.py reasoning-gym --task chain_sum --count 2000

Rows that cannot be graded are left out and counted: no text, a reference that does not match itself in a box, a prompt
whose copies contradict each other. The public dapo-math-17k and aime-2024 files repeat each prompt (100 and 32 times)
and wrap it in a request for a last line `Answer: ...`, which is taken off, since only \\boxed{} is graded here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from config import UserError  # noqa: E402
from reward import check_answer  # noqa: E402

BATCH_ROWS = 10_000
_WRAPPER = re.compile(
    r"Solve the following math problem step by step\. The last line of your response should be of the form Answer: "
    r"[^\n]* is the answer to the problem\.\s*(.*?)\s*Remember to put your answer on its own line after \"Answer:\"\.",
    re.DOTALL,
)


class PrepareError(UserError, ValueError):
    """A source that cannot be read or holds nothing usable."""


@dataclass(frozen=True)
class Source:
    """Where rows come from. Fields may be dotted: `reward_model.ground_truth`."""

    path: str  # hub name, or a local folder or file (.parquet, .json, .jsonl, .csv)
    prompt: str
    answer: str
    subset: str | None = None
    split: str = "train"
    clean_prompt: Callable[[str], str] = str.strip
    clean_answer: Callable[[Any], Any] = lambda answer: answer


def unwrap(prompt: str) -> str:
    """The problem inside DAPO's request for an `Answer:` line; any other text as it is."""
    text = prompt.strip()
    wrapped = _WRAPPER.fullmatch(text)
    return wrapped[1] if wrapped else text


def last_line_answer(solution: Any) -> Any:
    """GSM8K's reference: what follows `####`."""
    return solution.rpartition("####")[2].strip() if isinstance(solution, str) and "####" in solution else None


_DAPO = Source("BytedTsinghua-SIA/DAPO-Math-17k", "prompt", "reward_model.ground_truth", clean_prompt=unwrap)
SOURCES = {
    "dapo-math-17k": _DAPO,
    "aime-2024": replace(_DAPO, path="BytedTsinghua-SIA/AIME-2024"),
    "aime-2025": Source("math-ai/aime25", "problem", "answer", split="test"),
    "gsm8k": Source("openai/gsm8k", "question", "answer", subset="main", clean_answer=last_line_answer),
}


def read_rows(source: Source) -> Iterator[dict[str, Any]]:
    """Every row of the source, through Hugging Face `datasets`. Raises PrepareError."""
    from datasets import load_dataset

    path = Path(source.path)
    try:
        if path.is_file():
            kind = {".jsonl": "json"}.get(path.suffix, path.suffix.removeprefix("."))
            data = load_dataset(kind, data_files=str(path), split="train")
        else:
            data = load_dataset(source.path, source.subset, split=source.split)
    except (OSError, ValueError, ConnectionError) as error:
        why = str(error).splitlines()[0]
        raise PrepareError(f"{path}: cannot be loaded: {why}; download it and name the file with --source") from error
    columns = sorted({source.prompt.partition(".")[0], source.answer.partition(".")[0]})
    missing = [name for name in columns if name not in data.column_names]
    if missing:
        raise PrepareError(f"{source.path}: no column {missing[0]!r} (has {', '.join(data.column_names)})")
    for batch in data.select_columns(columns).iter(batch_size=BATCH_ROWS):
        for values in zip(*(batch[name] for name in columns), strict=True):
            yield dict(zip(columns, values, strict=True))


def problems_of(source: Source, rows: Iterable[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Prompt and answer of each row; an empty prompt where it is no text."""
    cleaned: dict[str, str] = {}  # most rows repeat a prompt
    for row in rows:
        text = _message_text(_field(row, source.prompt))
        if text not in cleaned:
            cleaned[text] = source.clean_prompt(text)
        yield cleaned[text], source.clean_answer(_field(row, source.answer))


def _field(row: Any, name: str) -> Any:
    for part in name.split("."):
        row = row.get(part) if isinstance(row, dict) else None
    return row


def _message_text(value: Any) -> str:
    """A prompt is text, or a conversation of one user turn; system turns belong in data.system_prompt."""
    if isinstance(value, list):
        turns = [turn["content"] for turn in value if isinstance(turn, dict) and turn.get("role") == "user"]
        value = turns[0] if len(turns) == 1 else ""
    return value if isinstance(value, str) else ""


def reasoning_gym_rows(task: str, count: int, seed: int) -> Iterator[tuple[str, Any]]:
    """Generated problems, nothing is downloaded. Graded by equality in a box, not by the task's own scorer."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise PrepareError("reasoning-gym is not installed; pip install -r requirements/math.txt") from error
    try:
        dataset = reasoning_gym.create_dataset(task, size=count, seed=seed)
    except ValueError as error:
        raise PrepareError(f"--task {task}: {error}") from error
    for row in itertools.islice(dataset, count):
        yield row["question"].strip(), row["answer"]


def distinct(problems: Iterable[tuple[str, Any]]) -> tuple[dict[str, str], Counter[str]]:
    """Each prompt once, in the order of first appearance, with its answer; and what was counted on the way."""
    kept: dict[str, str] = {}
    contradicted: set[str] = set()
    counts: Counter[str] = Counter()
    for prompt, answer in problems:
        counts["read"] += 1
        if not prompt:
            counts["without a prompt"] += 1
            continue
        try:
            reference = check_answer(answer)
        except ValueError:
            counts["with an answer that cannot be graded"] += 1
            continue
        if kept.setdefault(prompt, reference) != reference:
            contradicted.add(prompt)
    counts["prompts with contradictory answers"] = len(contradicted)
    return {prompt: answer for prompt, answer in kept.items() if prompt not in contradicted}, counts


def write(path: Path, problems: dict[str, str]) -> None:
    """Complete or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        for prompt, answer in problems.items():
            file.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")
    os.replace(partial, path)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="Writes problems as data/<name>.jsonl, each prompt once.")
    made.add_argument("name", choices=[*SOURCES, "dataset", "reasoning-gym"])
    made.add_argument("--source", help="hub name, folder or file instead of the usual place; needed for `dataset`")
    made.add_argument("--out", type=Path, help="file to write; default: data/<name>.jsonl")
    made.add_argument("--prompt-field", help="column of the problem; dots reach into nested columns")
    made.add_argument("--answer-field", help="column of the reference answer")
    made.add_argument("--subset", help="the dataset's configuration")
    made.add_argument("--split", help="default: train (aime-2025: test)")
    made.add_argument("--task", help="reasoning-gym: the task's name, e.g. chain_sum")
    made.add_argument("--count", type=int, default=2000, help="reasoning-gym: problems to draw (default 2000)")
    made.add_argument("--seed", type=int, default=0, help="reasoning-gym: default 0")
    return made


def chosen_source(args: argparse.Namespace) -> Source:
    if args.name == "dataset" and not (args.source and args.prompt_field and args.answer_field):
        raise PrepareError("dataset: name --source, --prompt-field and --answer-field")
    source = SOURCES.get(args.name) or Source(args.source, args.prompt_field, args.answer_field)
    named = {
        "path": args.source, "prompt": args.prompt_field, "answer": args.answer_field, "subset": args.subset,
        "split": args.split,
    }  # fmt: skip
    return replace(source, **{field: value for field, value in named.items() if value})


def prepare(args: argparse.Namespace) -> str:
    """Writes the file; returns the line that says what happened."""
    name = re.sub(r"\W+", "_", args.task if args.name == "reasoning-gym" and args.task else args.name)
    path = args.out or ROOT / "data" / f"{name}.jsonl"
    if args.name == "reasoning-gym":
        if not args.task:
            raise PrepareError("reasoning-gym: name the task with --task, e.g. --task chain_sum")
        problems, counts = distinct(reasoning_gym_rows(args.task, args.count, args.seed))
    else:
        source = chosen_source(args)
        problems, counts = distinct(problems_of(source, read_rows(source)))
    if not problems:
        raise PrepareError(f"{args.name}: none of {counts['read']} rows can be used ({_words(counts)})")
    write(path, problems)
    return f"{path}: {len(problems)} distinct problems of {counts['read']} rows; left out: {_words(counts)}"


def _words(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items() if name != "read" and count) or "nothing else"


def main(argv: list[str] | None = None) -> int:
    try:
        print(prepare(parser().parse_args(argv)))
    except PrepareError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
