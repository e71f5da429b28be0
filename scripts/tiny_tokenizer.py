"""The tiny models' tokenizers: the family's control tokens, bytes, and one token for each fixed phrase of the task.

The unchanged Qwen3 chat template costs hundreds of byte tokens; with its fixed phrases as single tokens a prompt takes
26. Phrases are ordinary vocabulary (a pre-tokenizer split that comes before Qwen3's own, whole pieces looked up before
any merge), not added tokens: so only control tokens can ever be control tokens, whatever text is encoded. The phrases
of the system turn are cut from the rendered template, hence follow it and the tool schema.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from config import ToolConfig
from rollout.chat.harmony import DEFAULT_DATE
from rollout.chat.harmony_prompt import developer_text, system_text
from tools import tool_schema

TOOL_SCHEMA = tool_schema(ToolConfig())  # what the trainer renders

# Ids 0 to 8, names and flags as in the Qwen3 tokenizer (there from 151643 on): the first three are special.
CONTROLS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>",
    "</tool_response>", "<think>", "</think>",
)  # fmt: skip
NUM_SPECIAL = 3
# Ids 0 to 8; in the real GPT-OSS tokenizer they lie from 199998 on, in this order but with reserved ones between.
HARMONY_CONTROLS = (
    "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>",
    "<|message|>", "<|call|>",
)  # fmt: skip
MAX_LENGTH = 1024  # tokens; a long episode takes about 100

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TASK_PHRASES = (
    "user\n", "assistant\n", "\n\n", '\n{"name": "python", "arguments": {"code": "', "print(", ')"}}\n',
    "What is ", "Let x be ", ". What is x", "The answer is ", "\\boxed{", "}.",
)  # fmt: skip

HARMONY_PHRASES = (
    "assistant", "user", "analysis", "commentary", "final", "json", "functions.python to=assistant",
    " to=functions.python ", "Use Python.", '{"code": "', "print(", ')"}',
    "What is ", "Let x be ", ". What is x", "The answer is ", "\\boxed{", "}.",
)  # fmt: skip

# Words of the tool's error messages: a failed call should not cost the model a hundred byte tokens.
ERROR_LINES = (
    "Traceback (most recent call last):\n",
    'File "<python>", line 1, in <module>',
    " SyntaxError: invalid syntax. Perhaps you forgot a comma? '(' was never closed unmatched ')'",
    " NameError: name 'x' is not defined",
    " TypeError ValueError ZeroDivisionError TimeoutError: the program did not end within seconds",
    " Error: the tool call cannot be read: not valid JSON, no output, decimal integer literal, leading zeros",
)


def render_system_turn(template: str) -> str:
    """What the template puts before the user turn when the tool is offered."""
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=template)
    text = str(bare.apply_chat_template([{"role": "user", "content": ""}], tools=[TOOL_SCHEMA], tokenize=False))
    return text[: text.index("<|im_start|>user")]


def phrases(template: str) -> list[str]:
    """Fixed phrases, longest first: those between the control tokens of the system turn, and the task's own."""
    between = re.split("|".join(map(re.escape, CONTROLS)), render_system_turn(template))
    system = [piece for piece in between if piece.strip()]
    return sorted({*system, *TASK_PHRASES}, key=lambda phrase: (-len(phrase), phrase))


def _byte_level(text: str) -> str:
    """Text in the printable alphabet of byte-level BPE, as vocabularies hold it."""
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return "".join(piece for piece, _ in pieces)


def _words() -> list[str]:
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated")
    return [word for line in ERROR_LINES for word, _ in split.pre_tokenize_str(line)]


def build_backend(controls: Sequence[AddedToken], known: Sequence[str]) -> Tokenizer:
    """controls: ids 0, 1, ...; known: phrases of one token each, longest first"""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [control.content for control in controls]
    tokens = [*names, *alphabet, *map(_byte_level, known), *map(_byte_level, _words())]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    split = "|".join([*map(re.escape, known), QWEN_SPLIT])
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(list(controls))
    return backend


def build_tokenizer(template: str) -> PreTrainedTokenizerFast:
    controls = [AddedToken(t, special=i < NUM_SPECIAL, normalized=False) for i, t in enumerate(CONTROLS)]
    backend = build_backend(controls, phrases(template))
    backend.normalizer = normalizers.NFC()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"], chat_template=template, clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH,
    )  # fmt: skip


def build_harmony_tokenizer() -> PreTrainedTokenizerFast:
    """GPT-OSS's: system and developer messages with the default date are one token each, so a prompt takes 27."""
    systems = {
        system_text(effort, DEFAULT_DATE, tools) for effort in ("low", "medium", "high") for tools in (True, False)
    }
    known = {"system", *systems, "developer", developer_text("", [TOOL_SCHEMA]), *HARMONY_PHRASES}
    controls = [AddedToken(name, special=True, normalized=False) for name in HARMONY_CONTROLS]
    backend = build_backend(controls, sorted(known, key=lambda phrase: (-len(phrase), phrase)))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|startoftext|>", eos_token="<|return|>", pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False, model_max_length=MAX_LENGTH,
    )  # fmt: skip
