"""The bytes behind token ids, so that a page can show each token by itself and join those that split a character.

Byte-level BPE tokenizers (Qwen, GPT-OSS, Llama 3) spell each byte of a token as one printable character; the table is
OpenAI's from GPT-2. Added tokens, control tokens among them, stand for their own text. A tokenizer of another kind
falls back to decoding each id by itself, which shows a split character as �.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


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
