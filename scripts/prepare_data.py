"""Writes data/<name>.jsonl, one {"prompt", "answer"} a line, each prompt once: what the configs read.

    python scripts/prepare_data.py dapo-math-17k
    python scripts/prepare_data.py aime-2024 --source downloads/aime-2024.parquet
    python scripts/prepare_data.py dataset --source mine.csv --prompt-field problem --answer-field solution
    python scripts/prepare_data.py reasoning-gym --task chain_sum --count 2000

A source is a file (.json, .jsonl, .csv, .tsv, each also .gz, and .parquet), a folder of them, or a dataset of the hub.
Files are read as they are now, nothing is cached. Text stays text, and numbers keep the digits that the file holds;
only an exponent is spelled out (1.5e3 becomes 1500), since the grader reads none.

A row that cannot be graded is left out; the causes are counted, each with its first example: no text, a reference that
does not match itself in a box, answers to one prompt that the grader takes for different. A broken file is refused.
The public dapo-math-17k and aime-2024 files repeat each prompt (100 and 32 times) and wrap it in a request for a last
line `Answer: ...`; it is taken off, since only \\boxed{} is graded here.

Left out: guessing a delimiter or an encoding; finding the answer in a rationale (but for GSM8K's `####`).
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from config import UserError  # noqa: E402
from data import MAX_DIGITS, unmatchable  # noqa: E402
from reward import check_answer, clean, equal  # noqa: E402
from run.files import OUT, require_writable, say, write_whole  # noqa: E402
from scripts.rows import Number, Row, Source, read_rows  # noqa: E402

Problem = tuple[str, str, str]  # where it stands, prompt, reference

NO_PROMPT, NO_REFERENCE, TORN = (
    "without a prompt", "with an answer that cannot be graded", "prompts with contradictory answers",
)  # fmt: skip
EXACT_FLOAT = 2.0**53  # integers from here on may have lost digits when they became a float
_SURROGATE = re.compile("[\ud800-\udfff]")
_WRAPPER = re.compile(
    r"Solve the following math problem step by step\. The last line of your response should be of the form Answer: "
    r"[^\n]* is the answer to the problem\.\s*(.*?)\s*Remember to put your answer on its own line after \"Answer:\"\.",
    re.DOTALL,
)


class PrepareError(UserError, ValueError):
    """An option that has no effect, or a source that holds nothing usable."""


def unwrap(prompt: str) -> str:
    """The problem inside DAPO's request for an `Answer:` line; any other text as it is."""
    text = prompt.strip()
    wrapped = _WRAPPER.fullmatch(text)
    return wrapped[1] if wrapped else text


def last_line_answer(solution: Any) -> str:
    """GSM8K's reference: what follows `####`."""
    if not isinstance(solution, str) or "####" not in solution:
        raise ValueError(f"answer {solution!r:.80}: has no '####' before the final number")
    return solution.rpartition("####")[2].strip()


@dataclass(frozen=True)
class Recipe(Source):
    """A source and how its prompts and answers are cleaned."""

    clean_prompt: Callable[[str], str] = str.strip
    clean_answer: Callable[[Any], Any] = lambda answer: answer


_DAPO = Recipe("BytedTsinghua-SIA/DAPO-Math-17k", "prompt", "reward_model.ground_truth", clean_prompt=unwrap)
SOURCES = {
    "dapo-math-17k": _DAPO,
    "aime-2024": replace(_DAPO, path="BytedTsinghua-SIA/AIME-2024"),
    "aime-2025": Recipe("math-ai/aime25", "problem", "answer", split="test"),
    "gsm8k": Recipe("openai/gsm8k", "question", "answer", subset="main", clean_answer=last_line_answer),
}


class Ledger:
    """What was read, and what was left out by group and cause, each cause with its first example."""

    def __init__(self) -> None:
        self.read = 0
        self.groups: Counter[str] = Counter()
        self.causes: dict[str, list[str]] = {}  # the examples

    def leave_out(self, group: str, cause: str, example: str) -> None:
        self.groups[group] += 1
        self.causes.setdefault(cause, []).append(example)

    def __str__(self) -> str:
        return ", ".join(f"{count} {group}" for group, count in self.groups.items()) or "nothing else"

    def examples(self) -> list[str]:
        return [f"{len(all_)} left out, {cause}; the first: {all_[0]}" for cause, all_ in self.causes.items()]


def problems_of(source: Recipe, rows: Iterable[Row], ledger: Ledger) -> Iterator[Problem]:
    """Prompt and reference of each row that has both."""
    cleaned: dict[str, str] = {}  # most rows repeat a prompt
    for where, row in rows:
        ledger.read += 1
        value, answer = _value(row, source.prompt), _value(row, source.answer)
        try:
            text = _prompt_text(value)
            if text not in cleaned:
                cleaned[text] = source.clean_prompt(text)
        except ValueError as error:
            ledger.leave_out(NO_PROMPT, _cause("prompt", error), f"{where}, {value!r:.80}")
            continue
        try:
            yield where, cleaned[text], _reference(source.clean_answer(answer))
        except ValueError as error:
            ledger.leave_out(NO_REFERENCE, _cause("answer", error), f"{where}, {answer!r:.80}")


def _cause(name: str, error: ValueError) -> str:
    return f"{name} {str(error).rpartition(': ')[2]}"  # what the rows have in common, without the value


def _value(row: dict[str, Any], name: str) -> Any:
    value: Any = row
    for part in [name] if name in row else name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _prompt_text(value: Any) -> str:
    """A prompt is text, or a conversation of one user turn; system turns belong in data.system_prompt."""
    if isinstance(value, list):
        turns = [turn.get("content") for turn in value if isinstance(turn, dict) and turn.get("role") == "user"]
        if len(turns) != 1:
            raise ValueError("prompt: needs one user turn")
        value = turns[0]
    if not isinstance(value, str) or isinstance(value, Number) or not value.strip():
        raise ValueError("prompt: must be text")
    return _whole(value, "prompt")


def _reference(answer: Any) -> str:
    """The answer as text that can be graded, every digit kept. Raises ValueError."""
    if isinstance(answer, float) and EXACT_FLOAT <= abs(answer) < float("inf"):
        raise ValueError("answer: is a float of 2^53 or more, which may have lost digits; store integers or text")
    if isinstance(answer, Number) and "e" in answer.lower():
        answer = Decimal(answer)
        if abs(answer.adjusted()) > MAX_DIGITS:
            raise ValueError(f"answer: has more than {MAX_DIGITS} digits before or after the point")
    elif isinstance(answer, str):
        _whole(answer, "answer")
    return check_answer(answer)


def _whole(text: str, name: str) -> str:
    if _SURROGATE.search(text):
        raise ValueError(f"{name}: holds half of a surrogate pair; write whole characters")
    return text


def reasoning_gym_rows(task: str, count: int, seed: int) -> Iterator[Row]:
    """Generated problems, nothing is downloaded. Graded by equality in a box, not by the task's own scorer."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise PrepareError("reasoning-gym is not installed; pip install -r requirements/math.txt") from error
    try:
        dataset = reasoning_gym.create_dataset(task, size=count, seed=seed)
    except ValueError as error:
        raise PrepareError(f"--task {task}: {error}") from error
    for number, row in enumerate(itertools.islice(dataset, count), start=1):
        yield f"row {number}", row


def distinct(problems: Iterable[Problem], ledger: Ledger) -> dict[str, tuple[str, str]]:
    """Each prompt once, in the order of first appearance: where it stands, and its answer as first spelled.

    A prompt with two answers that the grader takes for different is left out.
    """
    kept: dict[str, tuple[str, str]] = {}
    torn: set[str] = set()
    for where, prompt, answer in problems:
        at, reference = kept.setdefault(prompt, (where, answer))
        if answer != reference and prompt not in torn and not equal(clean(answer), clean(reference)):
            torn.add(prompt)
            example = f"{prompt!r:.60}: {reference!r:.40} in {at}, {answer!r:.40} in {where}"
            ledger.leave_out(TORN, "answers to one prompt differ", example)
    return {prompt: value for prompt, value in kept.items() if prompt not in torn}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="Writes problems as data/<name>.jsonl, each prompt once.")
    made.add_argument("name", choices=[*SOURCES, "dataset", "reasoning-gym"])
    made.add_argument("--source", help="file, folder or hub name instead of the usual place; needed for `dataset`")
    made.add_argument("--out", type=Path, help="file to write; default: data/<name>.jsonl")
    made.add_argument("--prompt-field", help="column of the problem; dots reach into nested columns")
    made.add_argument("--answer-field", help="column of the reference answer")
    made.add_argument("--subset", help="the dataset's configuration; of a local folder: the folder inside it")
    made.add_argument("--split", help="default: train (aime-2025: test); of a local folder: by the names of its files")
    made.add_argument("--task", help="reasoning-gym: the task's name, e.g. chain_sum")
    made.add_argument("--count", type=int, help="reasoning-gym: problems to draw (default 2000)")
    made.add_argument("--seed", type=int, help="reasoning-gym: default 0")
    return made


def chosen_source(args: argparse.Namespace) -> Recipe:
    """Raises PrepareError for an option that has no effect here or that is missing."""
    generated = ("task", "count", "seed")
    fetched = ("source", "prompt_field", "answer_field", "subset", "split")
    for option in fetched if args.name == "reasoning-gym" else generated:
        if getattr(args, option) is not None:
            raise PrepareError(f"--{option.replace('_', '-')}: has no effect on {args.name}; leave it out")
    if args.name == "reasoning-gym":
        if not args.task:
            raise PrepareError("reasoning-gym: name the task with --task, e.g. --task chain_sum")
        if args.count is not None and args.count < 1:
            raise PrepareError(f"--count {args.count}: must be at least 1")
        return Recipe(args.task, "question", "answer")
    for option in fetched:
        if getattr(args, option) == "":
            raise PrepareError(f"--{option.replace('_', '-')}: is empty; name one or leave it out")
    if args.name == "dataset" and not (args.source and args.prompt_field and args.answer_field):
        raise PrepareError("dataset: name --source, --prompt-field and --answer-field")
    source = SOURCES.get(args.name) or Recipe(args.source, args.prompt_field, args.answer_field)
    named = {"path": args.source, "prompt": args.prompt_field, "answer": args.answer_field}
    return replace(source, **{name: value for name, value in named.items() if value})


def prepare(args: argparse.Namespace) -> list[str]:
    """Writes the file; returns the lines that say what happened."""
    source = chosen_source(args)
    name = re.sub(r"\W+", "_", args.task or args.name)
    path = args.out or ROOT / "data" / f"{name}.jsonl"
    require_writable(path, OUT)
    if path.exists() and Path(source.path).exists() and path.samefile(source.path):
        raise PrepareError(f"--out {path}: is the source itself; name another file")
    if args.name == "reasoning-gym":
        rows = reasoning_gym_rows(args.task, 2000 if args.count is None else args.count, args.seed or 0)
    else:
        rows = read_rows(source, args.subset, args.split)
    ledger = Ledger()
    problems = distinct(problems_of(source, rows, ledger), ledger)
    if not ledger.read:
        raise PrepareError(f"{source.path}: holds no row")
    if not problems:
        examples = "; ".join(["", *ledger.examples()])
        raise PrepareError(f"{args.name}: none of {ledger.read} rows can be used ({ledger}){examples}")
    lines = (json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, (_, answer) in problems.items())
    write_whole(path, "".join(lines), OUT)
    said = f"{path}: {len(problems)} distinct problems of {ledger.read} rows; left out: {ledger}"
    doubt = unmatchable(problems.values())
    return [said, *ledger.examples(), *([f"warning: {doubt}"] if doubt else [])]


def main(argv: list[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path or an answer that the console cannot show
    try:
        for line in prepare(parser().parse_args(argv)):
            say(line)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
