"""openai-harmony itself against ours, where it is installed and GPT_OSS_TOKENIZER names the real tokenizer.

Its vocabulary file is rebuilt from that tokenizer (its checksum is OpenAI's), so nothing is fetched. Without either
its frozen answers in tests/cases are what is compared.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
from pathlib import Path

import pytest

from report.blobs import byte_characters
from rollout.chat.harmony import HarmonyChat
from tests.support.harmony_cases import HANDED, as_oracle, from_oracle, read
from tests.support.harmony_frozen import FROZEN
from tests.support.harmony_tokens import TOOLS, real_folder, real_tokenizer

NUM_PLAIN = 199998  # ids below are text, as in OpenAI's file
SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    harmony = pytest.importorskip("openai_harmony", reason="openai-harmony is not installed")
    vocabulary = json.loads((Path(real_folder()) / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    table = byte_characters()
    by_id = sorted((number, token) for token, number in vocabulary.items() if number < NUM_PLAIN)
    lines = [base64.b64encode(bytes(table[char] for char in token)) + b" %d\n" % number for number, token in by_id]
    content = b"".join(lines)
    assert hashlib.sha256(content).hexdigest() == SHA256
    folder = tmp_path_factory.mktemp("o200k")
    (folder / "o200k_base.tiktoken").write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
        yield harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def parsed(oracle, ids):
    """The oracle's messages in the form of the handed cases."""
    from openai_harmony import Role

    found = oracle.parse_messages_from_completion_tokens(ids, role=Role.ASSISTANT)
    return [
        [m.author.role.value, m.author.name, m.recipient, m.channel, m.content_type, m.content[0].text] for m in found
    ]


def rendered_prompt(oracle, case):
    import openai_harmony as harmony

    effort = harmony.ReasoningEffort(case["reasoning_effort"].capitalize())
    system = harmony.SystemContent.new().with_reasoning_effort(effort)
    developer = harmony.DeveloperContent.new()
    if case["system"]:
        developer = developer.with_instructions(case["system"])
    if case["with_tools"]:
        functions = [tool["function"] for tool in FROZEN["tools"]]
        developer = developer.with_function_tools(
            [harmony.ToolDescription.new(f["name"], f["description"], parameters=f["parameters"]) for f in functions]
        )
    said = [(harmony.Role.SYSTEM, system.with_conversation_start_date(case["current_date"]))]
    if case["system"] or case["with_tools"]:
        said.append((harmony.Role.DEVELOPER, developer))
    said += [(harmony.Role.USER, text) for text in case["users"]]
    messages = [harmony.Message.from_role_and_content(*pair) for pair in said]
    conversation = harmony.Conversation.from_messages(messages)
    return oracle.render_conversation_for_completion(conversation, harmony.Role.ASSISTANT)


def rendered_reply(oracle, case):
    """The tool's messages in the caller's name and channel."""
    import openai_harmony as harmony

    call = parsed(oracle, case["turn_ids"])[0]
    author = harmony.Author.new(harmony.Role.TOOL, call[2])
    ids = []
    for result in case["results"]:
        message = harmony.Message.from_author_and_content(author, result)
        ids += oracle.render(message.with_recipient("assistant").with_channel(call[3]))
    return ids + oracle.encode("<|start|>assistant", allowed_special="all")


def test_g7_the_stop_tokens_are_the_oracles(oracle):
    assert HarmonyChat(real_tokenizer(), TOOLS).stop_ids == set(oracle.stop_tokens_for_assistant_actions())


def test_the_frozen_cases_are_still_the_oracles(oracle):
    for case in HANDED.values():
        assert parsed(oracle, case["ids"]) == case["parsed"]
    for case in FROZEN["prompts"]:
        assert rendered_prompt(oracle, case) == case["ids"]
    for case in FROZEN["replies"]:
        assert rendered_reply(oracle, case) == case["ids"]


HEADERS = [
    "<|channel|>analysis", "<|channel|>commentary", "<|channel|>final", "", "<|channel|>analysis to=python code",
    "<|channel|>commentary to=functions.python <|constrain|>json", "<|channel|>commentary to=functions.python",
    " to=functions.python<|channel|>commentary json", " to=python<|channel|>analysis",
    "<|channel|>commentary to=functions.py.run<|constrain|>json", " to=functions.a<|channel|>commentary",
]  # fmt: skip
BODIES = [
    "", "x", '{"code": "print(4)"}', " to=functions.python json {}", "<|start|>", "<|channel|>final<|message|>",
    "é 数 🙂", "\n\n```py\n1\n```", "<|constrain|>", "assistant", "\\boxed{4}", "<|endoftext|>", "  ",
]  # fmt: skip


def test_g5_random_completions_are_read_as_the_oracle_reads_them(oracle):
    draw = random.Random(0)
    for _ in range(300):
        messages = [
            f"{draw.choice(HEADERS)}<|message|>{draw.choice(BODIES)}{draw.choice(BODIES)}"
            for _ in range(draw.randint(1, 4))
        ]
        text = "<|end|><|start|>assistant".join(messages) + draw.choice(["<|return|>", "<|call|>", "<|end|>", ""])
        ids = oracle.encode(text, allowed_special="all")
        ours = [as_oracle(m) for m in read(ids, real_tokenizer())]
        assert ours == [from_oracle(m) for m in parsed(oracle, ids)], text
