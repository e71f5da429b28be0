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
import csv
import gzip
import io
import itertools
import json
import os
import re
import sys
import zlib
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

Row = tuple[str, dict[str, Any]]  # where it stands ("line 7"), and its columns
Problem = tuple[str, str, str]  # where it stands, prompt, reference

KINDS = {".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
SUFFIXES = ".json, .jsonl, .csv or .tsv, each also with .gz, or .parquet"
NO_PROMPT, NO_REFERENCE, TORN = (
    "without a prompt", "with an answer that cannot be graded", "prompts with contradictory answers",
)  # fmt: skip
EXACT_FLOAT = 2.0**53  # integers from here on may have lost digits when they became a float
BATCH_ROWS = 10_000
_SPLITS = {
    "train": "train", "training": "train", "validation": "validation", "valid": "validation", "val": "validation",
    "dev": "validation", "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
_WRAPPER = re.compile(
    r"Solve the following math problem step by step\. The last line of your response should be of the form Answer: "
    r"[^\n]* is the answer to the problem\.\s*(.*?)\s*Remember to put your answer on its own line after \"Answer:\"\.",
    re.DOTALL,
)


class PrepareError(UserError, ValueError):
    """A source that cannot be read or holds nothing usable."""


class Number(str):
    """A number of a JSON file, as it is written there."""


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
class Source:
    """Where rows come from. Columns may be dotted: `reward_model.ground_truth`."""

    path: str  # hub name, or a local file or folder
    prompt: str
    answer: str
    subset: str | None = None  # this and `split` are the hub's; what the user asks for goes to `read_rows`
    split: str = "train"
    clean_prompt: Callable[[str], str] = str.strip
    clean_answer: Callable[[Any], Any] = lambda answer: answer


_DAPO = Source("BytedTsinghua-SIA/DAPO-Math-17k", "prompt", "reward_model.ground_truth", clean_prompt=unwrap)
SOURCES = {
    "dapo-math-17k": _DAPO,
    "aime-2024": replace(_DAPO, path="BytedTsinghua-SIA/AIME-2024"),
    "aime-2025": Source("math-ai/aime25", "problem", "answer", split="test"),
    "gsm8k": Source("openai/gsm8k", "question", "answer", subset="main", clean_answer=last_line_answer),
}


# Sources: every row with its place.


def read_rows(source: Source, subset: str | None = None, split: str | None = None) -> Iterator[Row]:
    """Every row of the source. Raises PrepareError.

    subset, split: what the user asks for; None takes a local file whole, and the source's own on the hub
    """
    path = Path(source.path)
    if path.is_file():
        if subset is not None:
            raise PrepareError(f"--subset {subset}: {path} is a file, which has none; leave it out")
        if split is not None and _split_of(Path(path.name)) != _SPLITS.get(split, split):
            raise PrepareError(
                f"--split {split}: {path} is one file, of split {_split_of(Path(path.name))} by its name; leave it out"
            )
        yield from _file_rows(path, source)
    elif path.is_dir():
        for file in _folder_files(path, subset, source.subset, split or source.split):
            for where, row in _file_rows(file, source):
                yield f"{file.relative_to(path)}, {where}", row
    else:
        yield from _hub_rows(source, subset or source.subset, split or source.split)


def _folder_files(folder: Path, subset: str | None, usual: str | None, split: str) -> list[Path]:
    """The files of one split, told by their names as on the hub; without a split in its name a file is `train`."""
    if subset is not None and not (folder / subset).is_dir():
        raise PrepareError(f"--subset {subset}: {folder} has no folder of this name")
    inner = folder / (subset or usual or "")
    folder = inner if inner.is_dir() else folder
    files = [Path(place, name).relative_to(folder) for place, _, names in os.walk(folder) for name in names]
    known = [file for file in files if _kind(file) and not any(part.startswith(".") for part in file.parts)]
    data = [file for file in known if file.name not in ("dataset_infos.json", "dataset_info.json", "state.json")]
    if not data:
        raise PrepareError(f"{folder}: cannot be loaded: holds no {SUFFIXES}")
    chosen = sorted(file for file in data if _split_of(file) == _SPLITS.get(split, split))
    if not chosen:
        has = ", ".join(sorted({_split_of(file) for file in data}))
        raise PrepareError(f"--split {split}: {folder} has no file of it (has {has})")
    kinds = sorted({file.suffix.lower() for file in chosen})
    if len(kinds) > 1:
        raise PrepareError(f"{folder}: holds {' and '.join(kinds)} files; name one of them with --source")
    return [folder / file for file in chosen]


def _split_of(file: Path) -> str:
    stem = file.name.partition(".")[0]
    if shard := re.fullmatch(r"(\w+)-\d{5}-of-\d{5}", stem):
        return _SPLITS.get(shard[1], shard[1])
    words = re.split(r"[\W_\d]+", f"{file.parent}/{stem}".lower())
    return next((_SPLITS[word] for word in reversed(words) if word in _SPLITS), "train")


def _kind(path: Path) -> str | None:
    name = path.name.lower()
    kind = KINDS.get(Path(name.removesuffix(".gz")).suffix)
    return None if kind == "parquet" and name.endswith(".gz") else kind


def _file_rows(path: Path, source: Source) -> Iterator[Row]:
    kind = _kind(path)
    try:
        if kind is None:
            raise PrepareError(f"{path}: cannot be loaded: its name must end in {SUFFIXES}; convert or rename it")
        if kind == "parquet":
            yield from _parquet_rows(path, source)
        elif kind in ("csv", "tsv"):
            yield from _table_rows(path, _text(path), "\t" if kind == "tsv" else ",", source)
        else:
            yield from _with_columns(path, _json_rows(path, _text(path), kind == "jsonl"), source)
    except OSError as error:
        raise PrepareError(f"{path}: cannot be read: {error.strerror or error}") from error


def _text(path: Path) -> str:
    content = _unpacked(path)
    if content[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in content[:4]:
        raise PrepareError(f"{path}, line 1: UTF-16 or UTF-32; convert it, e.g. iconv -f UTF-16 -t UTF-8")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, byte = content.count(b"\n", 0, error.start) + 1, content[error.start]
        raise PrepareError(f"{path}, line {line}: not UTF-8 (byte 0x{byte:02x}, or cut there); convert it") from error
    if not text.strip():
        raise PrepareError(f"{path}, line 1: the file is empty")
    return text


def _unpacked(path: Path) -> bytes:
    parts: list[bytes] = []
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"  # the content decides, not the name
        file.seek(0)
        stream = gzip.GzipFile(fileobj=file) if packed else file
        try:
            while part := stream.read(1 << 16):
                parts.append(part)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            line = sum(part.count(b"\n") for part in parts) + 1
            raise PrepareError(f"{path}, line {line}: the gzip data are cut or damaged; fetch it again") from error
    return b"".join(parts)


_JSON = json.JSONDecoder(parse_int=Number, parse_float=Number)
_BLANK = re.compile(r"\s*")


def _json_rows(path: Path, text: str, by_line: bool) -> Iterator[Row]:
    """Objects one after the other, and lists of them. by_line: each ends in the line in which it begins"""
    for first, chunk in enumerate(text.split("\n") if by_line else [text], start=1):
        line, end = first, 0
        while end < len(chunk):
            begin = _BLANK.match(chunk, end).end()  # type: ignore[union-attr]  # matches at least nothing
            line += chunk.count("\n", end, begin)
            if begin == len(chunk):
                break
            try:
                value, end = _JSON.raw_decode(chunk, begin)
            except (json.JSONDecodeError, RecursionError) as error:
                why = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else "too deep"
                line += chunk.count("\n", begin, error.pos) if isinstance(error, json.JSONDecodeError) else 0
                raise PrepareError(f"{path}, line {line}: not JSON, or cut ({why})") from error
            for index, row in enumerate(value if isinstance(value, list) else [value], start=1):
                where = f"line {line}, row {index}" if isinstance(value, list) else f"line {line}"
                if not isinstance(row, dict):
                    raise PrepareError(f"{path}, {where}: {row!r:.40} is not an object; write {{...}}")
                yield where, row
            line += chunk.count("\n", begin, end)


def _table_rows(path: Path, text: str, delimiter: str, source: Source) -> Iterator[Row]:
    """Cells as they are written; a quoted cell may span lines. Every row needs as many cells as the header."""
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header: list[str] = []
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise PrepareError(f"{path}, line {line}: not {delimiter!r}-separated, or cut ({error})") from error
        if cells is None:
            return
        if not header:
            header = cells
            _require_columns(path, header, source)
        elif cells:  # not a blank line
            if len(cells) != len(header):
                why = f"{len(cells)} cells below {len(header)} names; quote cells with a {delimiter!r}, or it is cut"
                raise PrepareError(f"{path}, line {line}: {why}")
            yield f"line {line}", dict(zip(header, cells, strict=True))


def _parquet_rows(path: Path, source: Source) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        with path.open("rb") as file:
            table = parquet.ParquetFile(file)
            columns = _require_columns(path, table.schema_arrow.names, source)
            yield from _arrow_rows(table.iter_batches(BATCH_ROWS, columns=columns))
    except (OSError, OverflowError, pyarrow.ArrowException) as error:
        raise PrepareError(f"{path}: cannot be loaded: {_first_line(error)}; fetch it again") from error


def _hub_rows(source: Source, subset: str | None, split: str) -> Iterator[Row]:
    """Through Hugging Face `datasets`, which keeps what it fetched by the commit of the dataset."""
    name, fix = source.path, "download it and name the file with --source"
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or _kind(Path(name)):
        raise PrepareError(f"{name}: cannot be loaded: no such file or folder, nor a hub name (organisation/name)")
    try:
        from datasets import load_dataset

        data = load_dataset(name, subset, split=split)
    except Exception as error:  # whatever hub, network and a dataset's files can raise
        raise PrepareError(f"{name}: cannot be loaded: {_first_line(error)}; {fix}") from error
    columns = _require_columns(name, data.column_names, source)
    yield from _arrow_rows(data.select_columns(columns).with_format("arrow").iter(BATCH_ROWS))


def _arrow_rows(batches: Iterable[Any]) -> Iterator[Row]:
    from pyarrow import string, types

    number = itertools.count(1)
    for batch in batches:
        # 0.1 of four bytes is 0.10000000149011612 as a Python float
        columns = [c.cast(string()) if types.is_float32(c.type) else c for c in batch.columns]
        for values in zip(*(column.to_pylist() for column in columns), strict=True):
            yield f"row {next(number)}", dict(zip(batch.schema.names, values, strict=True))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _with_columns(path: Path, rows: Iterable[Row], source: Source) -> Iterator[Row]:
    """Rows of objects, whose columns are known once all are read; refused at the end where one is in none of them."""
    seen: dict[str, None] = {}
    for where, row in rows:
        seen.update(dict.fromkeys(row))
        yield where, row
    if seen:
        _require_columns(path, list(seen), source)


def _require_columns(path: Path | str, present: list[str], source: Source) -> list[str]:
    """The columns that hold prompt and answer."""
    columns = sorted({name if name in present else name.partition(".")[0] for name in (source.prompt, source.answer)})
    for name in columns:
        if name not in present:
            raise PrepareError(f"{path}: no column {name!r} (has {', '.join(present)})")
        if present.count(name) > 1:
            raise PrepareError(f"{path}: {present.count(name)} columns are named {name!r}; rename all but one")
    return columns


# Problems: a prompt and a reference that can be graded, each prompt once.


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


def problems_of(source: Source, rows: Iterable[Row], ledger: Ledger) -> Iterator[Problem]:
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
            ledger.leave_out(NO_PROMPT, str(error), f"{where}, {value!r:.80}")
            continue
        try:
            yield where, cleaned[text], _reference(source.clean_answer(answer))
        except ValueError as error:
            ledger.leave_out(NO_REFERENCE, str(error).rpartition(": ")[2], f"{where}, answer {answer!r:.80}")


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
            raise ValueError("a conversation needs one user turn")
        value = turns[0]
    if not isinstance(value, str) or isinstance(value, Number) or not value.strip():
        raise ValueError("a prompt is text")
    _require_whole(value)
    return value


def _reference(answer: Any) -> str:
    """The answer as text that can be graded, every digit kept. Raises ValueError."""
    if isinstance(answer, float) and EXACT_FLOAT <= abs(answer) < float("inf"):
        raise ValueError("a float of 2^53 or more may have lost digits; store integers or text")
    if isinstance(answer, Number) and "e" in answer.lower():
        answer = Decimal(answer)
        if abs(answer.adjusted()) > MAX_DIGITS:
            raise ValueError(f"a number of more than {MAX_DIGITS} digits")
    elif isinstance(answer, str):
        _require_whole(answer)
    return check_answer(answer)


def _require_whole(text: str) -> None:
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError("half of a surrogate pair; write whole characters")


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
        if prompt not in torn and not equal(clean(answer), clean(reference)):
            torn.add(prompt)
            example = f"{prompt!r:.60}: {reference!r:.40} in {at}, {answer!r:.40} in {where}"
            ledger.leave_out(TORN, "contradictory answers", example)
    return {prompt: value for prompt, value in kept.items() if prompt not in torn}


# The command.


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


def chosen_source(args: argparse.Namespace) -> Source:
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
        return Source(args.task, "question", "answer")
    for option in fetched:
        if getattr(args, option) == "":
            raise PrepareError(f"--{option.replace('_', '-')}: is empty; name one or leave it out")
    if args.name == "dataset" and not (args.source and args.prompt_field and args.answer_field):
        raise PrepareError("dataset: name --source, --prompt-field and --answer-field")
    source = SOURCES.get(args.name) or Source(args.source, args.prompt_field, args.answer_field)
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
    try:
        for line in prepare(parser().parse_args(argv)):
            say(line)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
