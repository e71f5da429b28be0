"""Problems in, packed training batches out.

`load_problems` checks a JSONL file line by line; `ProblemStream` gives the problems of any step as a pure function of
(seed, step), so that the data cursor is the step counter itself; `collate` deals scored records to ranks and packs
them into micro-batches. Masks and lengths come from the records, never from pad or end ids; the weights, and which
records share an update, are `update/minibatch.py`'s.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from config import ConfigError, DataConfig, UserError
from reward import check_answer
from rollout.records import RolloutRecord, Scored


class DataError(UserError, ValueError):
    """A data file that cannot be used; one line with file, line, field and the mend."""


@dataclass(frozen=True, slots=True)
class Problem:
    prompt: str
    answer: str
    line: int  # in the file, from 1
    hint: str = ""  # the field data.hint_field, where that is set


def load_problems(path: str | Path, config: DataConfig, setting: str = "data.path") -> list[Problem]:
    """Reads and checks every line; blank lines are skipped. Raises DataError at the first bad one.

    setting: which one named the file, for the error where it cannot be read
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        mend = f"cannot be read: {error.strerror}; scripts/prepare_data.py writes the files of data/"
        raise ConfigError(setting, str(path), mend) from error
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
    """A warning with counts where a prompt stands more than once; None where each is distinct."""
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
    """Token ids of every prompt, measured with the template and the tool schema in place.

    limit: most prompt tokens, so that one can still be sampled within rollout.context_length
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

        They are visits out of turn: the order of `indices` does not move, so the cursor stays the step counter.
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


@dataclass(frozen=True, slots=True)
class ResponseTokenBatch:
    """Packed rows for one forward. N tokens of all rows, M of them predict a sampled token.

    The last token of a row predicts nothing and is left out: a record of T tokens takes T - 1 places.
    """

    input_ids: Tensor  # [1, N]
    position_ids: Tensor  # [1, N], from 0 in each row
    lengths: tuple[int, ...]  # tokens of each row; they sum to N
    prompts: tuple[int, ...]  # prompt_index of each row
    predictors: Tensor  # [M] places in the line whose next token was sampled
    targets: Tensor  # [M] those next tokens
    behaviour_logprobs: Tensor  # [M] fp32, as recorded while sampling
    advantages: Tensor  # [M] fp32, the row's for each of its tokens
    weights: Tensor  # [M] fp32, the row's for each of its tokens; global denominators are in it
    rows: Tensor  # [M] the row of each
    turns: Tensor  # [M] the assistant turn of each, from 0
    since_tool: Tensor  # [M] sampled tokens since the last tool result; -1 in the first turn
    routes: Tensor | None = None  # [N, layers * k] uint8, as recorded; None without experts

    @classmethod
    def from_rollout(
        cls, records: Sequence[RolloutRecord], advantages: Sequence[float], weights: Sequence[float]
    ) -> ResponseTokenBatch:
        """advantages, weights: one of each record, given to each of its sampled tokens."""
        ids: list[int] = []
        positions: list[int] = []
        predictors: list[int] = []
        targets: list[int] = []
        behaviour: list[float] = []
        row_of: list[int] = []
        turn_of: list[int] = []
        since_tool: list[int] = []
        for row, record in enumerate(records):
            base = len(ids)
            ids.extend(record.token_ids[:-1])
            positions.extend(range(len(record.token_ids) - 1))
            for number, turn in enumerate(record.turns):
                count = turn.end - turn.start
                predictors.extend(range(base + turn.start - 1, base + turn.end - 1))
                targets.extend(record.token_ids[turn.start : turn.end])
                behaviour.extend(record.logprobs[turn.start : turn.end])
                row_of.extend([row] * count)
                turn_of.extend([number] * count)
                since_tool.extend(range(count) if number else [-1] * count)
        rows = torch.tensor(row_of)
        return cls(
            input_ids=torch.tensor([ids]),
            position_ids=torch.tensor([positions]),
            lengths=tuple(len(record.token_ids) - 1 for record in records),
            prompts=tuple(record.prompt_index for record in records),
            predictors=torch.tensor(predictors),
            targets=torch.tensor(targets),
            behaviour_logprobs=torch.tensor(behaviour, dtype=torch.float32),
            advantages=torch.tensor(advantages, dtype=torch.float32)[rows],
            weights=torch.tensor(weights, dtype=torch.float32)[rows],
            rows=rows,
            turns=torch.tensor(turn_of),
            since_tool=torch.tensor(since_tool),
            routes=_routes(records),
        )

    def to(self, device: torch.device) -> ResponseTokenBatch:
        tensors = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        moved: dict[str, Any] = {
            n: t.to(device, non_blocking=True) for n, t in tensors.items() if isinstance(t, Tensor)
        }
        return dataclasses.replace(self, **moved)


def _routes(records: Sequence[RolloutRecord]) -> Tensor | None:
    if not all(record.routes for record in records):
        return None
    rows = [torch.frombuffer(bytearray(r.routes), dtype=torch.uint8).view(len(r.token_ids) - 1, -1) for r in records]
    return torch.cat(rows)


def collate(
    scored: Sequence[Scored], weights: Sequence[float], max_tokens: int, world_size: int, leave_out_equal: bool
) -> list[list[ResponseTokenBatch]]:
    """Micro-batches of every rank, equal in number: [world_size][micro-batches].

    scored: all records of an update, every rank's, in (prompt, sample) order; each rank calls this with the same list
    weights: of each record's sampled tokens, denominators included
    max_tokens: most tokens in a micro-batch
    leave_out_equal: records of advantage 0 stay out of the forward, since they add exactly nothing to the gradient
        (unless `loss.needs_every_row`)
    A rank with nothing to train runs a batch of weight 0, since every rank must join the reduction.
    """
    weighted = list(zip(scored, weights, strict=True))
    active = [(s, w) for s, w in weighted if s.advantage != 0.0 or not leave_out_equal]
    active.sort(key=lambda pair: (-len(pair[0].record.token_ids), pair[0].record.prompt_index))
    shares: list[list[tuple[Scored, float]]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for item, weight in active:
        rank = loads.index(min(loads))
        shares[rank].append((item, weight))
        loads[rank] += len(item.record.token_ids)
    packed = [_pack(share, max_tokens) for share in shares]
    count = max(1, *map(len, packed))
    shortest = min((s.record for s in scored), key=lambda r: len(r.token_ids))
    idle = ResponseTokenBatch.from_rollout([shortest], [0.0], [0.0])
    return [groups + [idle] * (count - len(groups)) for groups in packed]


def _pack(items: Sequence[tuple[Scored, float]], max_tokens: int) -> list[ResponseTokenBatch]:
    """Rows of similar length together, longest first, at most `max_tokens` in each micro-batch."""
    groups: list[list[tuple[Scored, float]]] = []
    room = 0
    for item in items:
        length = len(item[0].record.token_ids) - 1
        if length > room:
            groups.append([])
            room = max_tokens
        groups[-1].append(item)
        room -= length
    return [
        ResponseTokenBatch.from_rollout([s.record for s, _ in g], [s.advantage for s, _ in g], [w for _, w in g])
        for g in groups
    ]
