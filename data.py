"""Problems: read, checked, rendered to prompts and put in order.

`load_problems` checks a JSONL file line by line. `ProblemStream` gives the problems of any step as a pure function of
(seed, step), so the data cursor is the step counter itself.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from config import ConfigError, DataConfig, UserError
from reward import check_answer


class DataError(UserError, ValueError):
    """A data file that cannot be used; one line with file, line, field and the fix."""


@dataclass(frozen=True, slots=True)
class Problem:
    prompt: str
    answer: str
    line: int  # in the file, from 1
    hint: str = ""  # the field data.hint_field, where that is set


def load_problems(path: str | Path, config: DataConfig, setting: str = "data.path") -> list[Problem]:
    """Reads and checks every line; blank lines are skipped. Raises DataError at the first bad one.

    setting: the setting that names the file, for the error where it cannot be read
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        fix = f"cannot be read: {error.strerror}; scripts/prepare_data.py writes the files of data/"
        raise ConfigError(setting, str(path), fix) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}; convert the file") from error
    lines = enumerate(text.split("\n"), start=1)
    problems = [_parse_line(path, number, line, config) for number, line in lines if line.strip()]
    if not problems:
        raise DataError(f"{path}: holds no problem; write one JSON object a line")
    return problems


def _parse_line(path: str | Path, number: int, line: str, config: DataConfig) -> Problem:
    where = f"{path}, line {number}"
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg} at column {error.colno}); write one object a line") from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; thousands of brackets
        raise DataError(f"{where}: cannot be read ({str(error)[:60]}); write long numbers as strings") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: a {type(row).__name__}, not an object; write {{...}}")
    for setting in ("prompt_field", "answer_field", "hint_field"):
        name = getattr(config, setting)
        if name and name not in row:
            raise DataError(f"{where}: field {name!r} is missing; add it or set data.{setting} (has {', '.join(row)})")
    prompt, answer = row[config.prompt_field], row[config.answer_field]
    hint = row[config.hint_field] if config.hint_field else ""
    if not isinstance(prompt, str) or not prompt.strip():
        raise DataError(f"{where}: field {config.prompt_field!r} is {prompt!r}; it must be a non-empty string")
    if not isinstance(hint, str):
        raise DataError(f"{where}: field {config.hint_field!r} is {hint!r}; it must be a string")
    for name, text in ((config.prompt_field, prompt), (config.answer_field, str(answer)), (config.hint_field, hint)):
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise DataError(f"{where}: field {name!r} holds half of a surrogate pair; write whole characters")
    try:
        return Problem(prompt, check_answer(answer), number, hint)
    except ValueError as error:
        raise DataError(f"{where}: field {config.answer_field!r}: {error}") from error


def duplicates(problems: Sequence[Problem], path: str) -> str | None:
    """A warning with counts where a prompt occurs more than once; None where all are distinct."""
    counts = Counter(problem.prompt for problem in problems)
    if len(counts) == len(problems):
        return None
    answers = {(problem.prompt, problem.answer) for problem in problems}
    text = (
        f"{path}: {len(problems)} rows hold {len(counts)} distinct prompts (the commonest {max(counts.values())} "
        "times); scripts/prepare_data.py writes each once"
    )
    torn = sum(count > 1 for count in Counter(prompt for prompt, _ in answers).values())
    return text + (f"; {torn} {'prompt has' if torn == 1 else 'prompts have'} contradictory answers" if torn else "")


def distinct(problems: Sequence[Problem]) -> list[Problem]:
    """The first row of each prompt: an evaluation counts every problem once."""
    firsts: dict[str, Problem] = {}
    for problem in problems:
        firsts.setdefault(problem.prompt, problem)
    return list(firsts.values())


def render_prompts(
    problems: Sequence[Problem], render: Callable[[str], list[int]], limit: int, over_long: str, path: str
) -> tuple[list[Problem], list[list[int]]]:
    """Token ids of every prompt, with the chat template and the tool schema.

    limit: most prompt tokens that leave room for one sampled token within rollout.context_length
    over_long: "refuse" raises DataError at the first longer prompt; "drop" leaves them out
    """
    kept, prompts = [], []
    for problem in problems:
        ids = render(problem.prompt)
        if len(ids) <= limit:
            kept.append(problem)
            prompts.append(ids)
        elif over_long == "refuse":
            raise DataError(
                f"{path}, line {problem.line}: the prompt has {len(ids)} tokens, {limit} fit beside one sampled "
                "token; raise rollout.context_length, shorten it, or set data.over_long_prompts to 'drop'"
            )
    if not kept:
        raise DataError(f"{path}: all {len(problems)} prompts are longer than {limit} tokens")
    return kept, prompts


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The problems of a run with their rendered prompts, index by index."""

    problems: Sequence[Problem]
    prompts: Sequence[list[int]]
    teacher_prompts: Sequence[list[int]] = ()  # with teacher.privilege, what the teacher reads in their place

    def digest(self) -> str:
        """Of prompts and answers in their order: a data cursor into others means nothing."""
        digest = hashlib.blake2b(digest_size=16)
        for problem, prompt in zip(self.problems, self.prompts, strict=True):
            digest.update(repr((list(prompt), problem.answer)).encode())
        return digest.hexdigest()


class ProblemStream:
    """The endless order of problems: each epoch visits every problem once, shuffled by (seed, epoch) alone."""

    def __init__(self, num_problems: int, seed: int, shuffle: bool):
        self._size, self._seed, self._shuffle = num_problems, seed, shuffle
        self._epoch, self._order = -1, list(range(num_problems))

    def indices(self, step: int, count: int) -> list[int]:
        """Problems of step `step` (from 0) when every step takes `count`; a step may span two epochs."""
        return [self._at(position) for position in range(step * count, (step + 1) * count)]

    def refill(self, step: int, round_: int, count: int, used: Sequence[int]) -> list[int]:
        """Up to `count` problems beside the `used` ones of the step, a function of (seed, step, round) alone.

        They do not change the order of `indices`, so the cursor stays the step counter.
        """
        free = sorted(set(range(self._size)) - set(used))
        return random.Random(f"{self._seed} {step} refill {round_}").sample(free, min(count, len(free)))

    def epoch(self, step: int, count: int) -> float:
        """Passes over the data made before step `step`."""
        return step * count / self._size

    def _at(self, position: int) -> int:
        epoch, offset = divmod(position, self._size)
        if self._shuffle and epoch != self._epoch:
            self._order = list(range(self._size))
            random.Random(f"{self._seed} {epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._order[offset]
