"""Trajectories on disk: one zstd-compressed Parquet file a step, `trajectories/step_N.parquet`.

Invariants: a file is complete or absent; its rows are in (prompt, sample) order; it holds enough to recompute
rewards, advantages and losses (`main.py audit`) and to sample a trajectory again (`main.py replay`). This file is the
only one that knows the format. `arguments` of a call is stored as JSON in ASCII and `text` as bytes (UTF-8, lone
surrogates passed through), since a model can write a string that is not valid Unicode and the run must keep exactly
what was run. Runs from before tools of the user's have the program's bytes, `code`, in place of `arguments`.
Parquet's checksum of each page is written and verified. Page headers and the footer have none: the columns that it
names are compared with `SCHEMA`; a count in them that a flipped bit changed can still go unseen.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from config import UserError
from rollout.records import RolloutRecord, Scored
from run.files import DamageError, write_whole


def _turns(arguments: tuple[str, pa.DataType]) -> pa.DataType:
    call = pa.struct([
        ("name", pa.string()), arguments, ("status", pa.string()), ("text", pa.binary()), ("seed", pa.int64()),
        ("wall_s", pa.float64()),
    ])  # fmt: skip
    turn = pa.struct([("start", pa.int32()), ("end", pa.int32()), ("ended", pa.bool_()), ("calls", pa.list_(call))])
    return pa.list_(turn)


_TURNS, _OLD_TURNS = _turns(("arguments", pa.string())), _turns(("code", pa.binary()))
SCHEMA = pa.schema([
    ("prompt_index", pa.int32()), ("sample_index", pa.int32()), ("policy_step", pa.int32()),
    ("token_ids", pa.list_(pa.int32())), ("sampled", pa.list_(pa.bool_())), ("logprobs", pa.list_(pa.float32())),
    ("entropies", pa.list_(pa.float32())),  # of sampled tokens alone; empty where the trajectory was not trained
    ("turns", _TURNS), ("stop", pa.string()), ("answer", pa.string()),
    ("reward", pa.float64()), ("reason", pa.string()), ("advantage", pa.float64()),
    # With the user's tools or reward alone: whether it counted as correct, and the data row as JSON.
    ("correct", pa.bool_()), ("problem", pa.string()),
])  # fmt: skip
OPTIONAL = {"entropies", "correct", "problem"}  # columns that a file may lack

NONE: Mapping[tuple[int, int], Sequence[float]] = MappingProxyType({})


class TrajectoryError(UserError, LookupError):
    """Trajectories that are not there; one line with the run, the step and the fix."""


def step_path(run_dir: Path, step: int) -> Path:
    return run_dir / "trajectories" / f"step_{step}.parquet"


def stored_steps(run_dir: Path) -> list[int]:
    """The steps whose trajectories are kept, in order."""
    names = (path.stem.removeprefix("step_") for path in (run_dir / "trajectories").glob("step_*.parquet"))
    return sorted(int(name) for name in names if name.isdigit())


def count_rows(run_dir: Path, step: int) -> int:
    """Raises DamageError."""
    path = step_path(run_dir, step)
    with _reading(path):
        return pq.read_metadata(path).num_rows


def spans(steps: Sequence[int]) -> str:
    """Ascending steps for people: `1 to 7, 9`."""
    starts = [i for i, step in enumerate(steps) if i == 0 or step != steps[i - 1] + 1]
    runs = [steps[a:b] for a, b in pairwise([*starts, len(steps)])]
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _damage(path, str(error).splitlines()[0]) from error


def _damage(path: Path, reason: str) -> DamageError:
    return DamageError(f"{path}: cannot be read ({reason}); remove it to go on without")


def write_step(
    run_dir: Path, step: int, records: Sequence[RolloutRecord], scored: Iterable[Scored], answers: Sequence[str],
    entropies: Mapping[tuple[int, int], Sequence[float]] = NONE, rows: Sequence[Mapping[str, Any]] | None = None,
) -> None:  # fmt: skip
    """Every record of the step, with null scores where sandbox or reward failed.

    answers: the reference of each prompt of the step, by prompt_index
    entropies: (prompt_index, sample_index) of a trained trajectory -> nats of each of its sampled tokens
    rows: with the user's tools or reward the data row of each prompt of the step
    """
    scores = {(s.record.prompt_index, s.record.sample_index): s for s in scored}
    found = [scores.get((r.prompt_index, r.sample_index)) for r in records]
    columns = [
        pa.array([r.prompt_index for r in records], pa.int32()),
        pa.array([r.sample_index for r in records], pa.int32()),
        pa.array([r.policy_step for r in records], pa.int32()),
        _lists([r.token_ids for r in records], "i", pa.int32()),
        _lists([r.sampled for r in records], "b", pa.int8()).cast(pa.list_(pa.bool_())),
        _lists([r.logprobs for r in records], "f", pa.float32()),
        _lists([entropies.get((r.prompt_index, r.sample_index), ()) for r in records], "f", pa.float32()),
        pa.array([[_turn(turn) for turn in r.turns] for r in records], _TURNS),
        pa.array([str(r.stop) for r in records], pa.string()),
        pa.array([answers[r.prompt_index].encode("utf-8", "backslashreplace") for r in records]).cast(pa.string()),
        pa.array([s and s.reward for s in found], pa.float64()),
        pa.array([s and s.reason for s in found], pa.string()),
        pa.array([s and s.advantage for s in found], pa.float64()),
    ]
    schema = SCHEMA if rows is not None else pa.schema([f for f in SCHEMA if f.name not in ("correct", "problem")])
    if rows is not None:
        columns.append(pa.array([s and s.correct for s in found], pa.bool_()))
        written = [json.dumps(row) for row in rows]  # escapes keep lone surrogates possible
        columns.append(pa.array([written[r.prompt_index] for r in records], pa.string()))
    write_table(run_dir, step, pa.Table.from_arrays(columns, schema=schema))


def write_table(run_dir: Path, step: int, table: pa.Table) -> None:
    """table: of `SCHEMA`."""
    path = step_path(run_dir, step)
    content = pa.BufferOutputStream()
    pq.write_table(table, content, compression="zstd", compression_level=1, write_page_checksum=True)
    write_whole(path, content.getvalue().to_pybytes())


def _lists(rows: Sequence[Sequence[Any]], code: str, kind: pa.DataType) -> pa.ListArray:
    """Rows of numbers as one list column, ten times faster than pyarrow's own walk over Python objects."""
    flat = array(code)
    for row in rows:
        flat.extend(row)
    offsets = array("i", [0, *accumulate(map(len, rows))])
    values = pa.Array.from_buffers(kind, len(flat), [None, pa.py_buffer(flat)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)


def _turn(turn: Any) -> dict[str, Any]:
    calls = [
        {
            "name": call.name, "arguments": json.dumps(call.arguments), "status": call.status,
            "text": call.text.encode("utf-8", "surrogatepass"), "seed": call.seed, "wall_s": call.wall_s,
        }
        for call in turn.calls
    ]  # fmt: skip
    return {"start": turn.start, "end": turn.end, "ended": turn.ended, "calls": calls}


def read_table(run_dir: Path, step: int, columns: list[str] | None = None) -> pa.Table:
    """A step's rows as an Arrow table of `SCHEMA`, or of some of its columns. Raises TrajectoryError, DamageError."""
    path = step_path(run_dir, step)
    if not path.exists():
        steps = stored_steps(run_dir)
        kept = f"kept are steps {spans(steps)}" if steps else "the run keeps none"
        raise TrajectoryError(f"{run_dir}: no trajectories of step {step}; {kept} (see log.keep_trajectories)")
    with _reading(path):
        # A file from before checksums has none to verify.
        held = set(pq.read_schema(path).names)
        names = [name for name in columns or SCHEMA.names if name not in OPTIONAL or name in held]
        table = pq.read_table(path, columns=names if columns else None, page_checksum_verification=True)
        fields = [SCHEMA.field(name) for name in names]
        old = [pa.field("turns", _OLD_TURNS) if field.name == "turns" else field for field in fields]
        if table.schema not in (pa.schema(fields), pa.schema(old)):
            raise _damage(path, "its columns are not those of trajectories")
    return table


def read_step(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """A step's rows as plain dictionaries, with the field names of `RolloutRecord` and `Scored`.

    Entropies are no field of theirs and stay behind. With the user's tools or reward `problem` is the data row. Raises
    TrajectoryError where the step is not kept, DamageError.
    """
    rows = read_table(run_dir, step, [name for name in SCHEMA.names if name != "entropies"]).to_pylist()
    for call in calls_of(rows):
        restore(call)
    for row in rows:
        if row.get("problem") is not None:
            row["problem"] = json.loads(row["problem"])
    return rows


def restore(call: dict[str, Any]) -> None:
    """A call as Arrow gives it into the fields of `ToolCall`, in place; one of an old run too."""
    if "code" in call:
        code = call.pop("code").decode("utf-8", "surrogatepass")
        call["arguments"] = {} if call["status"] == "bad_call" else {"code": code}
    else:
        call["arguments"] = json.loads(call["arguments"])
    call["text"] = call["text"].decode("utf-8", "surrogatepass")


def calls_of(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (call for row in rows for turn in row["turns"] for call in turn["calls"])
