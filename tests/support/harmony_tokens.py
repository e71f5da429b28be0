"""A byte-level tokenizer with harmony's control tokens, and the real one where GPT_OSS_TOKENIZER names it."""

from __future__ import annotations

import functools
import os

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

CONTROLS = [
    "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>",
    "<|message|>", "<|call|>",
]  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "python",
            "description": "Run it.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "The program."}},
                "required": ["code"],
            },
        },
    }
]


def build_tokenizer(controls=CONTROLS, special=True) -> PreTrainedTokenizerFast:
    """One token per byte, and the control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, normalized=False, special=special) for text in controls])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|return|>", pad_token="<|endoftext|>")


def real_folder() -> str:
    path = os.environ.get("GPT_OSS_TOKENIZER")
    if not path:
        pytest.skip("GPT_OSS_TOKENIZER names no folder with the real GPT-OSS tokenizer")
    return path


@functools.cache
def real_tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(real_folder())
