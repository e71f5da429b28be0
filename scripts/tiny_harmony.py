"""The tiny GPT-OSS's tokenizer and the tiny task in harmony markup: siblings of `tiny_tokenizer` and `tiny_task.QWEN`.

Control tokens bear harmony's names, all special as in the real tokenizer. The system and developer messages that
`rollout.chat.harmony_prompt` writes with the default date and the Python tool's schema are one token each, so a prompt
takes 27; another date costs bytes.
"""

from __future__ import annotations

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from rollout.chat.harmony import DEFAULT_DATE
from rollout.chat.harmony_prompt import developer_text, system_text
from scripts.tiny_task import Dialect
from scripts.tiny_tokenizer import MAX_LENGTH, TOOL_SCHEMA, build_backend

# Ids 0 to 8; in the real tokenizer they lie from 199998 on, in this order but with reserved ones between.
CONTROLS = (
    "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>",
    "<|message|>", "<|call|>",
)  # fmt: skip

EFFORTS = ("low", "medium", "high")

_NEXT = "<|end|><|start|>assistant"
HARMONY = Dialect(
    call_begin=f"<|channel|>analysis<|message|>Use Python.{_NEXT}<|channel|>commentary to=functions.python "
    '<|constrain|>json<|message|>{"code": "',
    call_end='"}',
    answer_begin="<|channel|>final<|message|>",
    aside_begin="<|channel|>analysis<|message|>",
    turn_end="<|call|>",
    answer_end="<|return|>",
)
# The shipped model's habits: see `tiny_task.SLOPPY_MIX`. Only harmony has a wrong channel to answer in.
SLOPPY_MIX = {
    "good": 0.13,
    "no_box": 0.40,
    "wrong_channel": 0.14,
    "no_tool": 0.15,
    "wrong_expression": 0.08,
    "short_copy": 0.03,
    "forgotten_call": 0.07,
}

_TASK_PHRASES = (
    "assistant", "user", "analysis", "commentary", "final", "json", "functions.python to=assistant",
    " to=functions.python ", "Use Python.", '{"code": "', "print(", ')"}',
    "What is ", "Let x be ", ". What is x", "The answer is ", "\\boxed{", "}.",
)  # fmt: skip


def build_tokenizer() -> PreTrainedTokenizerFast:
    systems = {system_text(effort, DEFAULT_DATE, tools) for effort in EFFORTS for tools in (True, False)}
    known = {"system", *systems, "developer", developer_text("", [TOOL_SCHEMA]), *_TASK_PHRASES}
    controls = [AddedToken(name, special=True, normalized=False) for name in CONTROLS]
    backend = build_backend(controls, sorted(known, key=lambda phrase: (-len(phrase), phrase)))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|startoftext|>", eos_token="<|return|>", pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False, model_max_length=MAX_LENGTH,
    )  # fmt: skip
