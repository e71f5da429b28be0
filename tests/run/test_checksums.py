"""A checksum notices whatever happens to a file, however it is cut among threads."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest

from run import tensorfiles


@pytest.mark.parametrize("place", [0, 63, 64, 199, 200, None])
def test_a_checksum_sees_any_byte_of_a_file_of_several_segments_and_its_end(tmp_path, monkeypatch, place):
    monkeypatch.setattr(tensorfiles, "SEGMENT", 64)
    content = bytearray(range(201))
    (tmp_path / "whole").write_bytes(content)
    if place is None:
        del content[192:]  # a whole segment
    else:
        content[place] ^= 1
    (tmp_path / "damaged").write_bytes(content)
    assert tensorfiles.checksum(tmp_path / "whole") != tensorfiles.checksum(tmp_path / "damaged")


def test_an_empty_file_has_one(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "zero").write_bytes(b"\0")
    assert tensorfiles.checksum(tmp_path / "empty") != tensorfiles.checksum(tmp_path / "zero")


@pytest.mark.parametrize("sizes", [[0], [1] * 130, [63, 1, 64, 65], [200, 3, 129], [128]], ids=str)
def test_a_file_summed_up_as_it_is_written_has_the_checksum_it_would_be_read_with(tmp_path, monkeypatch, sizes):
    monkeypatch.setattr(tensorfiles, "SEGMENT", 64)
    monkeypatch.setattr(tensorfiles, "ALONE", 8)
    rest = content = bytes(i % 251 for i in range(sum(sizes)))
    with tensorfiles.SummedFile(tmp_path / "file") as file:
        for size in sizes:
            assert file.write(memoryview(rest[:size])) == size
            rest = rest[size:]
        found = file.checksum()
    assert (tmp_path / "file").read_bytes() == content
    assert found == tensorfiles.checksum(tmp_path / "file")


def test_what_is_written_at_once_is_summed_up_by_other_threads_meanwhile(tmp_path, monkeypatch):
    threads = set()

    class Digest:
        def update(self, piece):
            threads.add(threading.current_thread())

    monkeypatch.setattr(tensorfiles, "_digest", Digest)
    with tensorfiles.SummedFile(tmp_path / "file") as file:
        file.write(bytes(tensorfiles.ALONE + 1))
        assert threads and threading.current_thread() not in threads


def test_a_disk_that_takes_a_part_gets_the_rest_and_a_full_one_is_an_error(tmp_path):
    class Slow(io.BytesIO):
        def write(self, data):
            return super().write(data[:3])

    with tensorfiles.SummedFile(tmp_path / "file") as file:
        file._file = slow = Slow()
        file.write(b"eight by")
        assert slow.getvalue() == b"eight by"
    with pytest.raises(OSError, match="No space left"), tensorfiles.SummedFile(Path("/dev/full")) as file:
        file.write(b"anything")
