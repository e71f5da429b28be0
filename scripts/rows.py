"""Every row of a file, a folder of files or a dataset of the hub, with its place: what prepare_data.py prepares.

Files are read as they are when they are asked for: .json, .jsonl, .csv and .tsv, each also packed by gzip, with the
standard library; .parquet with pyarrow. Nothing is cached but what `datasets` keeps of the hub. A path is only a path,
whatever characters it holds. Cells are text, and numbers of JSON keep the characters that the file holds.

Errors: SourceError, one line with the file, the line where there is one, and the fix.
Left out: guessing a delimiter or an encoding, archives, spreadsheets.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config import UserError

Row = tuple[str, dict[str, Any]]  # where it stands ("line 7"), and its columns

KINDS = {".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
SUFFIXES = ".json, .jsonl, .csv or .tsv, each also with .gz, or .parquet"
BATCH_ROWS = 10_000
_SPLITS = {
    "train": "train", "training": "train", "validation": "validation", "valid": "validation", "val": "validation",
    "dev": "validation", "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip


class SourceError(UserError, ValueError):
    """A source that cannot be read."""


class Number(str):
    """A number of a JSON file, as it is written there."""


@dataclass(frozen=True)
class Source:
    """Where rows come from. Columns may be dotted: `reward_model.ground_truth`."""

    path: str  # hub name, or a local file or folder
    prompt: str
    answer: str
    subset: str | None = None  # this and `split` are the hub's; what the user asks for goes to `read_rows`
    split: str = "train"


def read_rows(source: Source, subset: str | None = None, split: str | None = None) -> Iterator[Row]:
    """Every row of the source. Raises SourceError.

    subset, split: what the user asks for; None takes a local file whole, and the source's own on the hub
    """
    path = Path(source.path)
    if path.is_file():
        if subset is not None:
            raise SourceError(f"--subset {subset}: {path} is a file, which has none; leave it out")
        if split is not None and _split_of(Path(path.name)) != _SPLITS.get(split, split):
            raise SourceError(
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
    """The files of one split, named as on the hub: a file without a split in its name belongs to `train`.

    subset: the folder inside that the user asks for; usual: the one that is taken where it exists
    """
    if subset is not None and not (folder / subset).is_dir():
        raise SourceError(f"--subset {subset}: {folder} has no folder of this name")
    inner = folder / (subset or usual or "")
    folder = inner if inner.is_dir() else folder
    files = [Path(place, name).relative_to(folder) for place, _, names in os.walk(folder) for name in names]
    known = [file for file in files if _kind(file) and not any(part.startswith(".") for part in file.parts)]
    data = [file for file in known if file.name not in ("dataset_infos.json", "dataset_info.json", "state.json")]
    if not data:
        raise SourceError(f"{folder}: cannot be loaded: holds no {SUFFIXES}")
    chosen = sorted(file for file in data if _split_of(file) == _SPLITS.get(split, split))
    if not chosen:
        has = ", ".join(sorted({_split_of(file) for file in data}))
        raise SourceError(f"--split {split}: {folder} has no file of it (has {has})")
    kinds = sorted({file.suffix.lower() for file in chosen})
    if len(kinds) > 1:
        raise SourceError(f"{folder}: holds {' and '.join(kinds)} files; name one of them with --source")
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
            raise SourceError(f"{path}: cannot be loaded: its name must end in {SUFFIXES}; convert or rename it")
        if kind == "parquet":
            yield from _parquet_rows(path, source)
        elif kind in ("csv", "tsv"):
            yield from _table_rows(path, _text(path), "\t" if kind == "tsv" else ",", source)
        else:
            yield from _with_columns(path, _json_rows(path, _text(path), kind == "jsonl"), source)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from error


def _text(path: Path) -> str:
    content = _unpacked(path)
    if content[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in content[:4]:
        raise SourceError(f"{path}, line 1: UTF-16 or UTF-32; convert it, e.g. iconv -f UTF-16 -t UTF-8")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, byte = content.count(b"\n", 0, error.start) + 1, content[error.start]
        raise SourceError(f"{path}, line {line}: not UTF-8 (byte 0x{byte:02x}, or cut there); convert it") from error
    if not text.strip():
        raise SourceError(f"{path}, line 1: the file is empty")
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
            raise SourceError(f"{path}, line {line}: the gzip data are cut or damaged; fetch it again") from error
    return b"".join(parts)


_JSON = json.JSONDecoder(parse_int=Number, parse_float=Number)
_VALUE = re.compile(r"\S")


def _json_rows(path: Path, text: str, by_line: bool) -> Iterator[Row]:
    """Objects one after the other, and lists of them. by_line: each ends in the line in which it begins"""
    for first, chunk in enumerate(text.split("\n") if by_line else [text], start=1):
        for line, value in _json_values(path, chunk, first):
            listed = isinstance(value, list)
            for index, row in enumerate(value if listed else [value], start=1):
                where = f"line {line}, row {index}" if listed else f"line {line}"
                if not isinstance(row, dict):
                    raise SourceError(f"{path}, {where}: {row!r:.40} is not an object; write {{...}}")
                yield where, row


def _json_values(path: Path, text: str, line: int) -> Iterator[tuple[int, Any]]:
    """Each value with the line in which it begins, where the text begins in `line`."""
    end = 0
    while rest := _VALUE.search(text, end):
        line += text.count("\n", end, rest.start())
        try:
            value, end = _JSON.raw_decode(text, rest.start())
        except json.JSONDecodeError as error:
            line += text.count("\n", rest.start(), error.pos)
            why = f"{error.msg} at column {error.colno}"
            raise SourceError(f"{path}, line {line}: not JSON, or cut ({why})") from error
        except RecursionError as error:
            raise SourceError(f"{path}, line {line}: not JSON, or cut (too deep)") from error
        yield line, value
        line += text.count("\n", rest.start(), end)


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
            raise SourceError(f"{path}, line {line}: not {delimiter!r}-separated, or cut ({error})") from error
        if cells is None:
            return
        if not cells:  # a blank line
            continue
        if not header:
            header = cells
            _require_columns(path, header, source)
            continue
        if len(cells) != len(header):
            why = f"{len(cells)} cells below {len(header)} names; quote cells with a {delimiter!r}, or it is cut"
            raise SourceError(f"{path}, line {line}: {why}")
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
        raise SourceError(f"{path}: cannot be loaded: {_first_line(error)}; fetch it again") from error


def _hub_rows(source: Source, subset: str | None, split: str) -> Iterator[Row]:
    """Through Hugging Face `datasets`, which keeps what it fetched by the commit of the dataset."""
    name, fix = source.path, "download it and name the file with --source"
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or _kind(Path(name)):
        raise SourceError(f"{name}: cannot be loaded: no such file or folder, nor a hub name (organisation/name)")
    try:
        from datasets import load_dataset

        data = load_dataset(name, subset, split=split)
    except Exception as error:  # whatever hub, network and a dataset's files can raise
        raise SourceError(f"{name}: cannot be loaded: {_first_line(error)}; {fix}") from error
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
            raise SourceError(f"{path}: no column {name!r} (has {', '.join(present)})")
        if present.count(name) > 1:
            raise SourceError(f"{path}: {present.count(name)} columns are named {name!r}; rename all but one")
    return columns
