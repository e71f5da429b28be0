"""Harmony turns with their parse, and the oracle that reads them."""

from __future__ import annotations

import json
from pathlib import Path

from rollout.chat.harmony_turns import CONTROLS, Message, read_messages
from tests.support.harmony_tokens import build_tokenizer

HANDED = json.loads((Path(__file__).parents[1] / "cases" / "harmony.json").read_text(encoding="utf-8"))


TOKENIZER = build_tokenizer()


def read(text_or_ids, tokenizer=TOKENIZER) -> list[Message]:
    ids = text_or_ids
    if isinstance(ids, str):
        ids = tokenizer.encode(ids, add_special_tokens=False)
    controls = {tokenizer.convert_tokens_to_ids(name): name for name in CONTROLS}
    return read_messages(ids, controls, lambda part: tokenizer.decode(list(part), skip_special_tokens=False))


def as_oracle(message: Message) -> list:
    """role, name, recipient, channel, content type, text."""
    return [message.role, None, message.recipient, message.channel, message.content_type, message.body]


def from_oracle(message: list) -> list:
    return [*message[:4], message[4] and message[4].removeprefix("<|constrain|>"), message[5]]
