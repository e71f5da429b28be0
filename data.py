"""Problems: read, checked, rendered to prompts and put in order.

`load_problems` checks a JSONL file line by line. `ProblemStream` gives the problems of any step as a pure function of
(seed, step), so the data cursor is the step counter itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from config import ConfigError, DataConfig, UserError
from reward import check_answer, clean, equal

ROLES = ("system", "user", "assistant")
MAX_DIGITS = 1000  # before or after the point; a number with a longer exponent stays a float


class DataError(UserError, ValueError):
    """A data file that cannot be used; one line with file, line, field and the fix."""


@dataclass(frozen=True, slots=True)
class Problem:
    prompt: str  # of a list of messages: each with its role, for people and for telling problems apart
    answer: str  # the reference; with reward.function what the row has, or ""
    line: int  # in the file, from 1
    hint: str = ""  # the field data.hint_field, where that is set
    row: Mapping[str, Any] = field(default_factory=dict)  # the whole line, numbers as Python reads JSON
    messages: tuple[Mapping[str, str], ...] = ()  # where the prompt is a list of them


def load_problems(
    path: str | Path, config: DataConfig, setting: str = "data.path", box_rule: bool = True
) -> list[Problem]:
    """Reads and checks every line; blank lines are skipped. Raises DataError at the first bad one.

    setting: the setting that names the file, for the error where it cannot be read
    box_rule: every line needs a reference; without (reward.function), a prompt is enough, also a list of messages
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        fix = f"cannot be read: {error.strerror}; scripts/prepare_data.py writes the files of data/"
        raise ConfigError(setting, str(path), fix) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}; convert the file") from error
    lines = enumerate(text.split("\n"), start=1)
    problems = [_parse_line(path, number, line, config, box_rule) for number, line in lines if line.strip()]
    if not problems:
        raise DataError(f"{path}: holds no problem; write one JSON object a line")
    return problems


def _parse_line(path: str | Path, number: int, line: str, config: DataConfig, box_rule: bool) -> Problem:
    where = f"{path}, line {number}"
    try:
        row = json.loads(line, parse_float=_exact)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg} at column {error.colno}); write one object a line") from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; thousands of brackets
        raise DataError(f"{where}: cannot be read ({str(error)[:60]}); write long numbers as strings") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: a {type(row).__name__}, not an object; write {{...}}")
    for setting in ("prompt_field", "answer_field", "hint_field"):
        name = getattr(config, setting)
        if name and name not in row and (box_rule or setting != "answer_field"):
            raise DataError(f"{where}: field {name!r} is missing; add it or set data.{setting} (has {', '.join(row)})")
    prompt, answer = row[config.prompt_field], row.get(config.answer_field, "")
    hint = row[config.hint_field] if config.hint_field else ""
    messages: tuple[Mapping[str, str], ...] = ()
    if isinstance(prompt, list) and not box_rule:
        messages = _messages(f"{where}: field {config.prompt_field!r}", prompt)
        prompt = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
    if not isinstance(prompt, str) or not prompt.strip():
        raise DataError(f"{where}: field {config.prompt_field!r} is {prompt!r}; it must be a non-empty string")
    if not isinstance(hint, str):
        raise DataError(f"{where}: field {config.hint_field!r} is {hint!r}; it must be a string")
    for name, text in ((config.prompt_field, prompt), (config.answer_field, str(answer)), (config.hint_field, hint)):
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise DataError(f"{where}: field {name!r} holds half of a surrogate pair; write whole characters")
    kept = json.loads(line)
    if not box_rule:
        text = answer if isinstance(answer, str) else json.dumps(kept[config.answer_field])
        return Problem(prompt, text, number, hint, kept, messages)
    try:
        return Problem(prompt, check_answer(answer), number, hint, kept)
    except ValueError as error:
        raise DataError(f"{where}: field {config.answer_field!r}: {error}") from error


def _messages(where: str, prompt: list[Any]) -> tuple[Mapping[str, str], ...]:
    """The messages of a prompt. Raises DataError."""
    for message in prompt:
        good = isinstance(message, dict) and message.keys() == {"role", "content"}
        if not good or message["role"] not in ROLES or not isinstance(message["content"], str):
            raise DataError(
                f'{where} has a message {message!r:.80}; write {{"role": ..., "content": "text"}} with a role of '
                f"{', '.join(ROLES)}"
            )
    if not prompt or prompt[-1]["role"] != "user" or any(m["role"] == "system" for m in prompt[1:]):
        raise DataError(f"{where}: messages end with one of the user, and only the first may be of the system; fix it")
    return tuple(prompt)


def _exact(text: str) -> float | Decimal:
    """A float where it holds every digit of the text, else the decimal number itself."""
    value, exact = float(text), Decimal(text)
    held = math.isinf(value) or abs(exact.adjusted()) > MAX_DIGITS or Decimal(repr(value)) == exact
    return value if held else exact


def duplicates(problems: Sequence[Problem], path: str) -> str | None:
    """A warning with counts where a prompt occurs more than once; None where all are distinct."""
    counts = Counter(problem.prompt for problem in problems)
    if len(counts) == len(problems):
        return None
    first = {problem.prompt: problem.answer for problem in reversed(problems)}
    other = (problem for problem in problems if not equal(clean(first[problem.prompt]), clean(problem.answer)))
    torn = len({problem.prompt for problem in other})
    text = (
        f"{path}: {len(problems)} rows hold {len(counts)} distinct prompts (the commonest {max(counts.values())} "
        "times); scripts/prepare_data.py writes each once"
    )
    return text + (f"; {torn} {'prompt has' if torn == 1 else 'prompts have'} contradictory answers" if torn else "")


# References that match themselves in a box, but hardly any response.
_UNMATCHED = {
    r"####": "a rationale; store what follows ####",
    r"\\boxed|\\fbox|\\framebox": "holds a box; store what it holds",
    r"(?<!\\)\\[(\[]|\*\*|`|</?[A-Za-z]+>": "holds markup; store the bare value",
    r"(?i)\banswers?\b\s*(?:is|are|:|=)": "a sentence; store the bare value",
    r"(?:\b[A-Za-z']+\s+){7}[A-Za-z]": "a sentence; store the bare value",
    r"(?s)\A(?!.*\\begin)(?=.*=)(?=.*\n)": "a rationale of several lines; store its last value",
    r"^\s*[+-]?[0-9.]+[eE][+-]?[0-9]+\s*$": "an exponent is not read as a number; write the number out",
    r"^\s*[+-]?[0-9]{1,3}(?:[ _'][0-9]{3})+(?:\.[0-9]*)?\s*$": "digits are grouped by commas or not at all",
    r"(?i)^\s*(?:nan|null|none|n/a|na|<na>|#n/a|#ref!|#value!|-|\?)\s*$": "a mark for a missing answer",
}


def unmatchable(references: Iterable[tuple[str, str]]) -> str | None:
    """A warning where hardly any response can equal a reference, with the first; None where all are plain.

    references: of each where it stands ("line 7"), and its text
    """
    found = [(where, text, why) for where, text in references if (why := _why_unmatchable(text))]
    if not found:
        return None
    where, text, why = found[0]
    count = "1 reference" if len(found) == 1 else f"{len(found)} references"
    return f"hardly any response can match {count}; the first: {where}, {text!r:.80}: {why}"


def _why_unmatchable(text: str) -> str | None:
    for pattern, why in _UNMATCHED.items():
        if re.search(pattern, text):
            return why
    kept = clean(text)
    if kept.isascii() and kept.isprintable():
        return None
    words = any(unicodedata.category(char)[0] == "L" and not char.isascii() for char in kept)  # of another language
    for char in kept:
        category = unicodedata.category(char)
        alike = unicodedata.normalize("NFKC", char) != char or category in ("Nd", "Nl", "No", "Pd")
        if category[0] == "C" or (not char.isascii() and (alike or (not words and category[0] in "MPS"))):
            name = unicodedata.name(char, "a control character")
            return f"holds {name} (U+{ord(char):04X}); write what a model writes, in ASCII"
    return None


def distinct(problems: Sequence[Problem]) -> list[Problem]:
    """The first row of each prompt: an evaluation counts every problem once."""
    firsts: dict[str, Problem] = {}
    for problem in problems:
        firsts.setdefault(problem.prompt, problem)
    return list(firsts.values())


def render_prompts(
    problems: Sequence[Problem], render: Callable[[Problem], list[int]], limit: int, over_long: str, path: str
) -> tuple[list[Problem], list[list[int]]]:
    """Token ids of every prompt, with the chat template and the tool schema.

    limit: most prompt tokens that leave room for one sampled token within rollout.context_length
    over_long: "refuse" raises DataError at the first longer prompt; "drop" leaves them out
    """
    kept, prompts = [], []
    for problem in problems:
        ids = render(problem)
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
    whole_rows: bool = False  # with reward.function, which reads the whole row

    def digest(self) -> str:
        """Of prompts and answers (or whole rows) in their order: a data cursor into others means nothing."""
        digest = hashlib.blake2b(digest_size=16)
        for problem, prompt in zip(self.problems, self.prompts, strict=True):
            read = json.dumps(problem.row, sort_keys=True) if self.whole_rows else problem.answer
            digest.update(repr((list(prompt), read)).encode())
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
