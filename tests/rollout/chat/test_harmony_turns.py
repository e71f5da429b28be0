"""Harmony turns on ids: the handed cases, which openai-harmony answered, and broken shapes that a model may draw."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.chat.harmony_turns import CONTROLS, read_calls
from rollout.chat.toolcall import Call, CallErrorCode, ToolSchemas
from tests.support.harmony_cases import HANDED, TOKENIZER, as_oracle, from_oracle, read
from tests.support.harmony_tokens import TOOLS, real_tokenizer

# What runs, of the handed cases: name -> programs; an error code where the call cannot.
WANTED = {
    "analysis+call": ["print(4)"],
    "recipient in role (HF template form)": ["print(4)"],
    "no constrain, code": ["print(4)"],
    "fake call in CoT": [],
    "preamble+call": ["1"],
    "dotted name": [CallErrorCode.UNKNOWN_TOOL],
}
SCHEMAS = ToolSchemas(TOOLS, named=False)
CALL = '<|channel|>commentary to=functions.python <|constrain|>json<|message|>{"code": "1"}<|call|>'
ANSWER = "<|channel|>final<|message|>\\boxed{4}<|return|>"


def items(text) -> list:
    """Programs of calls, codes of errors, in order."""
    found = read_calls(read(text), SCHEMAS).items
    return [item.arguments["code"] if isinstance(item, Call) else item.code for item in found]


@pytest.mark.parametrize("name", HANDED)
def test_g5_handed_completions_have_the_oracles_messages_and_lose_no_call(name):
    case = HANDED[name]
    assert [as_oracle(m) for m in read(case["text"])] == [from_oracle(m) for m in case["parsed"]]
    assert items(case["text"]) == WANTED[name]


@pytest.mark.parametrize("name", HANDED)
def test_g5_the_real_tokenizers_ids_give_the_same_messages(name):
    tokenizer, case = real_tokenizer(), HANDED[name]
    assert [as_oracle(m) for m in read(case["ids"], tokenizer)] == [from_oracle(m) for m in case["parsed"]]


def test_a_call_that_opens_the_completion_is_found():
    assert items(CALL) == ["1"]
    assert items(' to=functions.python<|channel|>commentary json<|message|>{"code": "2"}<|call|>') == ["2"]


def test_two_calls_of_one_completion_keep_their_order():
    assert items(CALL + "<|start|>assistant" + CALL.replace('"1"', '"2"')) == ["1", "2"]


ERRORS = {
    "cut": (CALL.removesuffix("<|call|>"), CallErrorCode.UNCLOSED),
    "returned": (CALL.replace("<|call|>", "<|return|>"), CallErrorCode.UNCLOSED),
    "no recipient": ("<|channel|>analysis<|message|>hm<|call|>", CallErrorCode.MISSING_NAME),
    "two recipients": (
        "<|channel|>commentary to=functions.python to=python<|message|>{}<|call|>",
        CallErrorCode.MISSING_NAME,
    ),
    "another role": ("<|end|><|start|>user" + CALL, CallErrorCode.MISSING_NAME),
    "no such tool": (CALL.replace("python", "browser"), CallErrorCode.UNKNOWN_TOOL),
    "no namespace it has": (CALL.replace("functions.", "tools."), CallErrorCode.UNKNOWN_TOOL),
    "not JSON": (CALL.replace('{"code": "1"}', "print(1)"), CallErrorCode.MALFORMED_JSON),
    "text after it": (CALL.replace('"1"}', '"1"} ok'), CallErrorCode.MALFORMED_JSON),
    "no body": ("<|channel|>commentary to=functions.python<|call|>", CallErrorCode.MALFORMED_JSON),
    "a list": (CALL.replace('{"code": "1"}', '["1"]'), CallErrorCode.NOT_AN_OBJECT),
    "a number": (CALL.replace('"1"', "1"), CallErrorCode.BAD_ARGUMENTS),
    "no code": (CALL.replace('"code"', '"cmd"'), CallErrorCode.BAD_ARGUMENTS),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_read_with_certainty_is_an_error_that_says_how(name):
    text, code = ERRORS[name]
    [item] = read_calls(read(text), SCHEMAS).items
    assert item.code == code
    assert '"code"' in str(item) or "functions.python" in str(item), "the model is shown what to write"


def test_a_built_in_tools_program_is_the_bare_text():
    text = "<|channel|>analysis to=python code<|message|>x = '''a\nb'''\nprint(x)<|call|>"
    assert items(text) == ["x = '''a\nb'''\nprint(x)"]
    assert items(text.replace(" code", "")) == ["x = '''a\nb'''\nprint(x)"]
    assert items('<|channel|>analysis to=python json<|message|>{"code": "1"}<|call|>') == ["1"]


def test_real_line_breaks_in_the_json_string_stand_for_themselves():
    assert items(CALL.replace('"1"', '"a = 1\nprint(a)"')) == ["a = 1\nprint(a)"]


@pytest.mark.parametrize(
    "text",
    [
        ANSWER,
        "<|channel|>analysis<|message|>to=functions.python<|end|><|start|>assistant" + ANSWER,
        "<|channel|>analysis<|message|>" + CALL.replace("<|call|>", "<|end|><|start|>assistant") + ANSWER,
        CALL.replace("<|call|>", "<|end|>") + "<|start|>assistant" + ANSWER,
        "<|channel|>commentary to=functions.python",  # cut inside the header: no call has begun
        "<|channel|>analysis<|message|>hm",
        "",
    ],
)
def test_these_hold_no_call(text):
    assert items(text) == []


def test_g7_an_end_of_message_does_not_end_the_turns_reading():
    first, second = read("<|channel|>analysis<|message|>hm<|end|><|start|>assistant" + ANSWER)
    assert (first.end, second.end) == ("<|end|>", "<|return|>") and second.is_answer and not first.is_answer


def test_control_tokens_inside_a_body_are_its_text():
    [message] = read("<|channel|>final<|message|>x<|start|>y<|channel|>z<|message|>w<|return|>")
    assert message.body == "x<|start|>y<|channel|>z<|message|>w" and message.is_answer


@pytest.mark.parametrize(
    "text",
    [
        ANSWER.replace("final", "analysis"),
        ANSWER.replace("final", "commentary"),
        ANSWER.replace("<|channel|>final", ""),
        ANSWER.replace("<|channel|>final", "final"),
        ANSWER.replace("<|return|>", ""),
        ANSWER.replace("<|return|>", "<|call|>"),
        ANSWER.replace("final", "final to=functions.python"),
        "<|end|><|start|>user" + ANSWER,
        "<|channel|>analysis<|message|>a<|end|>" + ANSWER,  # no <|start|>: it belongs to no message
    ],
)
def test_only_the_assistants_returned_final_message_is_an_answer(text):
    assert not any(message.is_answer for message in read(text))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([*CONTROLS, "assistant", "final", " to=functions.python", "analysis", "{", '"', "x"])))
def test_whatever_is_drawn_is_read_and_every_message_that_ends_as_a_call_is_answered(pieces):
    messages = read([i for piece in pieces for i in TOKENIZER.encode(piece, add_special_tokens=False)])
    found = read_calls(messages, SCHEMAS).items
    assert len(found) >= sum(message.end == "<|call|>" for message in messages)
    assert all(message.end for message in messages[:-1])
