"""Tokens give the bytes that they stand for, one by one."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from report.blobs import byte_characters, token_bytes
from tests.support.runs import TINY

TEXT = 'What is "é 数 😀"?\n\t<b>&amp;\u2028'


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


def test_each_byte_has_its_own_character():
    table = byte_characters()
    assert sorted(table.values()) == list(range(256))
    assert table["Ġ"] == 32 and table["Ċ"] == 10


def test_the_bytes_of_tokens_join_to_the_text(tokenizer):
    ids = tokenizer.encode(TEXT)
    found, added = token_bytes(tokenizer, ids)
    assert b"".join(found).decode() == TEXT
    assert added == []


def test_added_tokens_stand_for_their_text_and_are_named(tokenizer):
    ids = tokenizer.encode("<|im_start|>a<tool_call>")
    found, added = token_bytes(tokenizer, ids)
    assert found == [b"<|im_start|>", b"a", b"<tool_call>"]
    assert added == [0, 2]


def test_an_id_outside_the_vocabulary_shows_its_number(tokenizer):
    assert token_bytes(tokenizer, [314159])[0] == [b"<314159>"]
