"""What is written is what is read, in one complete Parquet file a step."""

from __future__ import annotations

import dataclasses
import struct

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout.records import RolloutRecord, ToolCall
from run import trajectories
from run.files import DamageError
from run.trajectories import (
    TrajectoryError,
    count_rows,
    read_step,
    read_table,
    step_path,
    stored_steps,
    write_step,
)
from tests.support.builders import record, scored


def with_call(made: RolloutRecord, **values) -> RolloutRecord:
    call = ToolCall(
        **({"name": "python", "arguments": {}, "status": "ok", "text": "", "seed": 1, "wall_s": 0.5} | values)
    )
    first, *rest = made.turns
    return dataclasses.replace(made, turns=(dataclasses.replace(first, calls=(call,)), *rest))


@pytest.fixture
def run(tmp_path):
    (tmp_path / "trajectories").mkdir()
    return tmp_path


def test_a_row_reads_back_as_the_record_and_its_score(run):
    made = with_call(record("PPAOA", prompt=1, sample=3), arguments={"code": "print(7)"}, text="7", seed=2**32 - 1)
    write_step(run, 5, [made], scored([made], [0.25]), ["x", "½"])
    [row] = read_step(run, 5)
    assert row["token_ids"] == list(made.token_ids)
    assert row["sampled"] == [0, 0, 1, 0, 1]
    assert row["logprobs"] == pytest.approx(made.logprobs)
    assert row["turns"] == [
        dataclasses.asdict(turn) | {"calls": [*map(dataclasses.asdict, turn.calls)]} for turn in made.turns
    ]
    assert (row["prompt_index"], row["sample_index"], row["policy_step"], row["stop"]) == (1, 3, 0, "answered")
    assert (row["answer"], row["reward"], row["reason"], row["advantage"]) == ("½", 1.0, "correct", 0.25)


def test_log_probs_of_single_precision_are_kept_to_the_bit(run):
    single = -0.1619434356689453
    made = dataclasses.replace(record("PA"), logprobs=(0.0, single))
    write_step(run, 1, [made], scored([made], [1.0]), ["7"])
    assert read_step(run, 1)[0]["logprobs"] == [0.0, single]


def test_a_spoilt_trajectory_has_no_score(run):
    sound, spoilt = record("PA", sample=0), record("PA", sample=1)
    write_step(run, 1, [sound, spoilt], scored([sound], [1.0]), ["7"])
    assert [row["reward"] for row in read_step(run, 1)] == [1.0, None]
    assert read_step(run, 1)[1]["advantage"] is None and read_step(run, 1)[1]["reason"] is None


def test_text_that_is_not_unicode_survives(run):
    made = with_call(record("PAOA"), arguments={"code": "print('\ud800')"}, text="\udfff 数")
    write_step(run, 1, [made], scored([made], [1.0]), ["\ud800"])
    [row] = read_step(run, 1)
    [call] = row["turns"][0]["calls"]
    assert (call["arguments"]["code"], call["text"]) == ("print('\ud800')", "\udfff 数")


def test_the_file_is_compressed(run):
    made = record("P" + "A" * 500)
    write_step(run, 1, [made], scored([made], [1.0]), ["7"])
    group = pq.read_metadata(step_path(run, 1)).row_group(0)
    assert {group.column(i).compression for i in range(group.num_columns)} == {"ZSTD"}


@pytest.fixture
def written(run):
    """A run with one step, and that step's file."""
    made = [with_call(record("PPAOA", sample=i), arguments={"code": "print(7)"}, text="7") for i in range(4)]
    write_step(run, 1, made, scored(made, [0.25] * 4), ["x"])
    return run, step_path(run, 1)


def test_no_flipped_bit_of_the_data_goes_unseen(written):
    run, path = written
    content, table = path.read_bytes(), read_table(run, 1)
    end = len(content) - 8 - struct.unpack("<I", content[-8:-4])[0]  # of the pages; the footer comes after
    seen = 0
    for place in range(4, end, 7):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        try:
            assert read_table(run, 1) == table  # a bit that says nothing about the rows
        except DamageError as error:
            seen += 1
            assert str(error).startswith(f"{path}: cannot be read (") and "\n" not in str(error)
    assert seen > end / 7 / 2


def test_a_file_with_a_column_of_another_name_is_damaged(written):
    run, path = written
    table = pq.read_table(path)
    pq.write_table(table.rename_columns([name.replace("reward", "rewasd") for name in table.column_names]), path)
    for columns in (None, ["token_ids", "reward"]):
        with pytest.raises(DamageError, match="remove it to go on without"):
            read_table(run, 1, columns)


def test_a_column_whose_name_is_no_text_is_damage_too(written):
    run, path = written
    path.write_bytes(path.read_bytes().replace(b"reward", b"rewar\xe4"))
    with pytest.raises(DamageError, match="remove it to go on without"):
        read_table(run, 1)


def test_a_file_from_before_checksums_and_entropies_is_still_read(written):
    run, path = written
    rows = read_step(run, 1)
    pq.write_table(pq.read_table(path).drop_columns(["entropies"]), path, compression="zstd")
    assert read_step(run, 1) == rows
    assert "entropies" not in read_table(run, 1).column_names


def test_a_step_that_is_not_kept_is_named_with_those_that_are(run):
    for step in (7, 8, 9, 12):
        write_step(run, step, [record("PA")], [], ["7"])
    with pytest.raises(TrajectoryError, match=r"no trajectories of step 3; kept are steps 7 to 9, 12 \("):
        read_step(run, 3)
    assert stored_steps(run) == [7, 8, 9, 12]
    assert count_rows(run, 7) == 1


def test_a_partial_file_does_not_count(run):
    (run / "trajectories/step_4.parquet.partial").write_bytes(b"PAR1")
    assert stored_steps(run) == []
    with pytest.raises(TrajectoryError, match="keeps none"):
        read_table(run, 4)


def test_a_run_from_before_the_users_tools_has_a_program_in_place_of_arguments(run):
    made = with_call(record("PAOA"), arguments={"code": "print(7)"}, text="7")
    write_step(run, 1, [made], scored([made], [1.0]), ["7"])
    path = trajectories.step_path(run, 1)
    rows = pq.read_table(path).to_pylist()
    for one in trajectories.calls_of(rows):
        del one["arguments"]
        one["code"] = b"print(7)"
    fields = [pa.field("turns", trajectories._OLD_TURNS) if f.name == "turns" else f for f in pq.read_schema(path)]
    pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema(fields)), path)
    [call] = trajectories.calls_of(read_step(run, 1))
    assert (call["name"], call["arguments"]) == ("python", {"code": "print(7)"}) and "code" not in call
