"""A packed step gives back its tokens, log-probabilities, scores and calls."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import math
import struct

import pytest

from report.blobs import pack_json, pack_step, used_tokens
from rollout.records import ToolCall
from run.trajectories import read_table, write_step
from tests.support.builders import record, scored


@pytest.fixture
def table(tmp_path):
    (tmp_path / "trajectories").mkdir()
    first, second = record("PPAOA", sample=0), record("PAAA", sample=1, first_id=12)
    call = ToolCall(name="python", arguments={"code": "1\ud800"}, status="error", text="</script>", seed=1, wall_s=0.5)
    first = dataclasses.replace(first, turns=(dataclasses.replace(first.turns[0], calls=(call,)), first.turns[1]))
    write_step(tmp_path, 1, [first, second], scored([first], [0.5]), ["7"])
    return read_table(tmp_path, 1)


def unpack(text: str) -> bytes:
    return gzip.decompress(base64.b64decode(text))


def test_a_step_gives_back_its_arrays(table):
    vocabulary = used_tokens([table])
    raw = unpack(pack_step(table, vocabulary))
    [size] = struct.unpack_from("<I", raw)
    header = json.loads(raw[4 : 4 + size])
    places = struct.unpack_from("<9H", raw, 4 + size)
    surprise = struct.unpack_from("<9H", raw, 4 + size + 18)
    assert (4 + size) % 4 == 0 and header["wide"] == 2
    assert [vocabulary[place].as_py() for place in places] == [10, 11, 12, 13, 14, 12, 13, 14, 15]
    assert surprise == (0, 0, 200, 0, 400, 0, 100, 200, 300)
    first, second = header["rows"]
    call = ["python", {"code": "1\ud800"}, "error", "</script>", 0.5]
    turns = [[2, 3, 1, [call]], [4, 5, 1, []]]
    assert first == [0, 0, 5, "answered", "7", 1.0, "correct", 0.5, turns, True]
    assert second[5:8] == [None, None, None] and second[9] is False


def test_entropies_stand_at_the_sampled_tokens_of_what_was_trained(tmp_path):
    (tmp_path / "trajectories").mkdir()
    trained, other = record("PPAOA", sample=0), record("PAAA", sample=1, first_id=12)
    known = {(0, 0): [0.25, 70.0], (1, 2): [9.0]}
    write_step(tmp_path, 1, [other, trained], scored([trained], [0.5]), ["7"], known)
    table = read_table(tmp_path, 1)
    assert table.column("entropies").to_pylist() == [[], [0.25, 70.0]]
    none = 65535
    assert entropies_of(table) == (none,) * 4 + (none, none, 250, none, 65534)
    assert entropies_of(table.drop_columns(["entropies"])) == (none,) * 9  # a run from before they were kept
    write_step(tmp_path, 1, [other], [], ["7"], {(0, 1): [math.nan, 0.0, math.inf]})
    assert entropies_of(read_table(tmp_path, 1)) == (none, none, 0, none)


def entropies_of(table) -> tuple[int, ...]:
    raw = unpack(pack_step(table, used_tokens([table])))
    count = sum(map(len, table.column("token_ids").to_pylist()))
    return struct.unpack_from(f"<{count}H", raw, len(raw) - 2 * count)


def test_many_distinct_tokens_take_wider_places(tmp_path):
    (tmp_path / "trajectories").mkdir()
    long = record("P" + "A" * 70_000, first_id=0)
    long = dataclasses.replace(long, logprobs=(0.0, *[-0.5] * 70_000))
    write_step(tmp_path, 1, [long], scored([long], [1.0]), ["7"])
    table = read_table(tmp_path, 1)
    raw = unpack(pack_step(table, used_tokens([table])))
    [size] = struct.unpack_from("<I", raw)
    assert json.loads(raw[4 : 4 + size])["wide"] == 4
    assert struct.unpack_from("<70001I", raw, 4 + size)[-1] == 70_000


def test_a_very_unlikely_token_is_shown_as_far_as_the_number_goes(tmp_path):
    (tmp_path / "trajectories").mkdir()
    made = dataclasses.replace(record("PA"), logprobs=(0.0, -1e4))
    write_step(tmp_path, 1, [made], scored([made], [1.0]), ["7"])
    table = read_table(tmp_path, 1)
    assert unpack(pack_step(table, used_tokens([table])))[-2:] == b"\xff\xff"


def test_no_steps_use_no_tokens():
    assert used_tokens([]).to_pylist() == []


def test_data_holds_no_character_that_html_reads():
    text = pack_json({"x": "</script><!--&"})
    assert not set(text) & set("<>&\"'")
