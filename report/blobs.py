"""Trajectories packed for the page: a gzip of raw arrays a step, which the browser unpacks when the step is opened.

A step's bytes, little-endian: length of the header (uint32), the header (JSON, padded to 4 bytes), one vocabulary
place a token (uint16, or uint32 beyond 65,536 distinct tokens), one log-probability a token (uint16, thousandths of a
nat below 0; 0 where not sampled), one entropy a token (uint16, thousandths of a nat; 65535 where none is known: not
sampled, in a trajectory that was not trained, not finite, or of a run from before entropies were kept).

Token ids travel with the bytes behind them, so that the page can show each token by itself and join those that split
a character. Byte-level BPE tokenizers (Qwen, GPT-OSS, Llama 3) spell each byte of a token as one printable character;
the table is OpenAI's from GPT-2. Added tokens, control tokens among them, stand for their own text. A tokenizer of
another kind falls back to decoding each id by itself, which shows a split character as �.
"""

from __future__ import annotations

import base64
import gzip
import json
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from run.trajectories import restore

GZIP_LEVEL = 6
UNKNOWN = 65535


def pack(raw: bytes) -> str:
    """Bytes as text that stands in an HTML data block: gzip, then base64."""
    return base64.b64encode(gzip.compress(raw, GZIP_LEVEL, mtime=0)).decode("ascii")


def pack_json(value: Any) -> str:
    return pack(_json(value))


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")  # escapes keep lone surrogates possible


def used_tokens(tables: Iterable[pa.Table]) -> pa.Array:
    """Distinct token ids of all steps, ascending, int32."""
    empty = pa.array([], pa.int32())
    distinct = pc.unique(pa.concat_arrays([empty, *(pc.unique(_flat(table, "token_ids")) for table in tables)]))
    return distinct.take(pc.sort_indices(distinct))


def pack_step(table: pa.Table, vocabulary: pa.Array) -> str:
    """One step of `run.trajectories.SCHEMA`; vocabulary: `used_tokens` of all steps."""
    wide = pa.uint16() if len(vocabulary) <= 1 << 16 else pa.uint32()
    places = pc.index_in(_flat(table, "token_ids"), value_set=vocabulary).cast(wide)
    surprise = pc.min_element_wise(pc.round(pc.multiply(_flat(table, "logprobs"), -1000.0)), 65535.0).cast(pa.uint16())
    header = _json({"wide": wide.bit_width // 8, "rows": [_row(row) for row in _light(table).to_pylist()]})
    header += b" " * (-len(header) % 4)
    parts = [struct.pack("<I", len(header)), header, _bytes(places), _bytes(surprise), _bytes(_entropies(table))]
    return pack(b"".join(parts))


def _entropies(table: pa.Table) -> pa.Array:
    """Of every token, uint16."""
    sampled = _flat(table, "sampled")
    unknown = pa.array([UNKNOWN], pa.uint16()).take(pa.nulls(len(sampled), pa.int64()).fill_null(0))
    if "entropies" not in table.column_names:
        return unknown
    recorded = pc.greater(pc.list_value_length(table.column("entropies")), 0).fill_null(False).combine_chunks()
    row = pc.list_parent_indices(table.column("sampled")).combine_chunks()
    nats = _flat(table, "entropies")
    bounded = pc.max_element_wise(pc.min_element_wise(pc.multiply(nats, 1000.0), UNKNOWN - 1.0), 0.0)
    values = pc.if_else(pc.is_finite(nats), pc.round(bounded), float(UNKNOWN)).cast(pa.uint16())
    return pc.replace_with_mask(unknown, pc.and_(sampled, recorded.take(row)), values)


def _light(table: pa.Table) -> pa.Table:
    """Without the long columns; the number of tokens instead."""
    lengths = pc.list_value_length(table.column("token_ids"))
    long = {"token_ids", "sampled", "logprobs", "entropies"}
    return table.drop_columns(sorted(long & set(table.column_names))).append_column("length", lengths)


def _row(row: dict[str, Any]) -> list[Any]:
    turns = [
        [turn["start"], turn["end"], int(turn["ended"]), [_call(call) for call in turn["calls"]]]
        for turn in row["turns"]
    ]
    return [
        row["prompt_index"], row["sample_index"], row["length"], row["stop"], row["answer"], row["reward"],
        row["reason"], row["advantage"], turns, _is_correct(row),
    ]  # fmt: skip


def _is_correct(row: dict[str, Any]) -> bool:
    """As reward.function said; by the box rule, rewards above 0 are right answers."""
    said = row.get("correct")
    return bool((row["reward"] or 0.0) > 0 if said is None else said)


def _call(call: dict[str, Any]) -> list[Any]:
    restore(call)
    return [call["name"], call["arguments"], call["status"], call["text"], call["wall_s"]]


def _flat(table: pa.Table, name: str) -> pa.Array:
    return pc.list_flatten(table.column(name)).combine_chunks()


def _bytes(values: pa.Array) -> bytes:
    """The values of an array without nulls, as they lie in memory."""
    width = values.type.bit_width // 8
    buffer = values.buffers()[1]
    return buffer.to_pybytes()[values.offset * width : (values.offset + len(values)) * width]


def byte_characters() -> dict[str, int]:
    """The character that spells each byte in a byte-level vocabulary -> that byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    spelled = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    return spelled | {chr(256 + number): byte for number, byte in enumerate(others)}


def token_bytes(tokenizer: Any, ids: Sequence[int]) -> tuple[list[bytes], list[int]]:
    """The bytes of each id, and the places in `ids` of added tokens.

    tokenizer: a fast Hugging Face tokenizer; ids that it does not know give the bytes of `<id>`
    """
    added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
    table = byte_characters()
    texts = tokenizer.convert_ids_to_tokens(list(ids))
    found = []
    for number, text in zip(ids, texts, strict=True):
        if number in added or text is None:
            found.append((added.get(number) or f"<{number}>").encode("utf-8"))
        elif all(char in table for char in text):
            found.append(bytes(table[char] for char in text))
        else:
            found.append(tokenizer.decode([number]).encode("utf-8"))
    return found, [place for place, number in enumerate(ids) if number in added]
