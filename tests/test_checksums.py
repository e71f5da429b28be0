"""A checksum notices whatever happens to a file, however it is cut among threads."""

from __future__ import annotations

import pytest

from runtime import checksums


@pytest.mark.parametrize("place", [0, 63, 64, 199, 200, None])
def test_a_checksum_sees_any_byte_of_a_file_of_several_segments_and_its_end(tmp_path, monkeypatch, place):
    monkeypatch.setattr(checksums, "SEGMENT", 64)
    content = bytearray(range(201))
    (tmp_path / "whole").write_bytes(content)
    if place is None:
        del content[192:]  # a whole segment
    else:
        content[place] ^= 1
    (tmp_path / "damaged").write_bytes(content)
    assert checksums.checksum(tmp_path / "whole") != checksums.checksum(tmp_path / "damaged")


def test_an_empty_file_has_one(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "zero").write_bytes(b"\0")
    assert checksums.checksum(tmp_path / "empty") != checksums.checksum(tmp_path / "zero")
