"""The tool-call parser on every handed case, on tags inside code and thinking, and on arbitrary text."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.chat.toolcall import Call, CallError, CallErrorCode, ToolSchemas, parse_calls

CASES = Path(__file__).parents[2] / "cases"
PYTHON = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run Python code and return what it prints.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}
SCHEMAS = ToolSchemas([PYTHON])


def read_cases(name):
    return [json.loads(line) for line in (CASES / name).read_text(encoding="utf-8").splitlines()]


HANDED = read_cases("toolcall_qwen3.jsonl") + read_cases("toolcall_qwen3_policy.jsonl")


def call(code, name="python"):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'code': code}})}\n</tool_call>"


def outcome(text, schemas=SCHEMAS):
    """Code of each call and code name of each error, in order."""
    items = parse_calls(text, schemas).items
    return [item.arguments["code"] if isinstance(item, Call) else item.code.value for item in items]


@pytest.mark.parametrize("case", HANDED, ids=[case["id"] for case in HANDED])
def test_handed_case_gives_its_calls_and_its_error(case):
    parsed = parse_calls(case["text"], SCHEMAS)
    assert [{"name": c.name, "arguments": c.arguments} for c in parsed.calls] == case.get("calls", [])
    allowed = case["error"].split("|") if "error" in case else []
    assert len(parsed.errors) == len(allowed[:1])
    assert all(error.code.value in allowed for error in parsed.errors)


def test_calls_and_errors_keep_the_order_in_which_they_were_written():
    bad = "<tool_call>\n{'name': 'python'}\n</tool_call>"
    text = call("1") + bad + call("2") + call("3", name="bash") + "\n<tool_call>\n{"
    parsed = parse_calls(text, SCHEMAS)
    assert outcome(text) == ["1", "malformed_json", "2", "unknown_tool", "unclosed"]
    assert [c.arguments["code"] for c in parsed.calls] == ["1", "2"]
    assert [e.code.value for e in parsed.errors] == ["malformed_json", "unknown_tool", "unclosed"]


@pytest.mark.parametrize(
    "code",
    ["s = '</think>'", "s = '<think>'", "s = '</tool_call>'", "s = '<tool_call>{}</tool_call>'", "'<|im_end|>'"],
)
@pytest.mark.parametrize("before", ["", "<think>\nhm\n</think>\n\n", "hm\n</think>\n\n"])
def test_tags_inside_the_code_are_code(code, before):
    assert outcome(before + call(code) + call("2")) == [code, "2"]


@pytest.mark.parametrize(
    "thinking",
    [
        "<think>" + call("1") + "</think>",
        "<think>\n" + call("1") + "\n",
        call("1") + "\n</think>",
        "so " + call("1") + "\n</think> " + call("2") + "</think>",
        "<think>a<think>b</think>" + call("1") + "</think>",
        "<think>" + call("s = '</think>'") + call("1") + "</think>",
        "answer <think>" + call("1") + "</think>",
        "<think><tool_call></think>",
        "Try <tool_call> now.</think>",
        "<think>\nTry <tool_call> now.\n</think>\nDone </tool_call>",
    ],
)
def test_nothing_inside_thinking_is_a_call(thinking):
    assert outcome(thinking) == []


def test_a_call_after_a_tag_mentioned_in_thinking_still_runs():
    assert outcome("I could use <tool_call> here.\n</think>\n" + call("1")) == ["1"]
    assert outcome("<think>I could use <tool_call> here.\n</think>\n" + call("1")) == ["1"]
    assert outcome('<tool_call>{"na\n</think>\n' + call("1")) == ["1"]


def test_a_string_that_reaches_into_the_next_block_joins_nothing():
    assert outcome('<tool_call>"</tool_call> <tool_call>"</tool_call>') == ["malformed_json"] * 2
    missing_quote = '<tool_call>{"name": "python", "arguments": {"code": "1}}</tool_call>\n'
    assert outcome(missing_quote + call("2")) == ["malformed_json", "2"]


def test_an_end_of_thinking_inside_a_garbled_call_does_not_swallow_its_error():
    assert outcome("<tool_call>\n{\"name\": \"python\", 'x': '</think>'}\n</tool_call>") == ["malformed_json"]
    assert outcome('<tool_call>\n{"name": "python", "arguments": {"code": "s = \'</think>') == ["unclosed"]


def wrap(body):
    return f"<tool_call>{body}</tool_call>"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ('{"name": "python", "arguments": {"code": "1"', "malformed_json"),
        ('{"name": "python", "arguments": {"code": "1"}} {}', "malformed_json"),
        ('```json\n{"name": "python", "arguments": {"code": "1"}}\n```', "malformed_json"),
        ('{"name": "python", "arguments": {"code": "\\\'1\\\'"}}', "malformed_json"),
        (f'{{"name": "python", "arguments": {{"code": {"1" * 5000}}}}}', "malformed_json"),
        ('<tool_call>{"name": "python", "arguments": {"code": "1"}}', "malformed_json"),
        ('"a" "b"', "malformed_json"),
        ("null", "not_an_object"),
        ('[{"name": "python", "arguments": {"code": "1"}}]', "not_an_object"),
        ('{"name": null, "arguments": {"code": "1"}}', "missing_name"),
        ('{"name": "", "arguments": {"code": "1"}}', "missing_name"),
        ('{"name": ["python"], "arguments": {"code": "1"}}', "missing_name"),
        ("{}", "missing_name"),
        ('{"name": "Python", "arguments": {"code": "1"}}', "unknown_tool"),
        ('{"name": "bash"}', "unknown_tool"),
        ('{"name": "python", "arguments": null}', "bad_arguments"),
        ('{"name": "python", "arguments": ["1"]}', "bad_arguments"),
        ('{"name": "python", "arguments": {"code": 1}}', "bad_arguments"),
        ('{"name": "python", "arguments": {"code": NaN}}', "bad_arguments"),
        ('{"name": "python", "arguments": {"Code": "1"}}', "bad_arguments"),
        ('{"name": "python", "arguments": {"code": "\\ud800"}}', "bad_arguments"),
        ('{"name": "python", "arguments": "\\"{}\\""}', "bad_arguments"),
        ('{"name": "python", "arguments": "{\\"code\\": \\"1\\"} x"}', "bad_arguments"),
        ('{"name": "python", "arguments": ""}', "bad_arguments"),
    ],
)
def test_a_call_that_cannot_be_read_names_its_fault(body, code):
    parsed = parse_calls(wrap(body), SCHEMAS)
    assert parsed.calls == () and [error.code.value for error in parsed.errors] == [code]
    assert str(parsed.errors[0]).startswith(code + ": ") and "python" in str(parsed.errors[0])


def test_messages_tell_the_model_what_to_write_and_stay_short():
    missing = str(parse_calls(wrap('{"name": "python"}'), SCHEMAS).errors[0])
    assert '{"name": "python", "arguments": {"code": "..."}}' in missing
    unknown = str(parse_calls(wrap(json.dumps({"name": "b" * 9999})), SCHEMAS).errors[0])
    assert "bbb" in unknown and "known: python" in unknown
    field = parse_calls(wrap('{"name": "python", "arguments": {"code": 1}}'), SCHEMAS).errors[0]
    assert '"code" must be of type string' in field.message
    for text in (missing, unknown, str(field)):
        assert len(text) < 200


def test_arguments_are_checked_by_the_types_of_the_schema():
    parameters = {"properties": {"n": {"type": "integer"}, "b": {"type": "boolean"}, "x": {"type": "number"}, "a": {}}}
    schemas = ToolSchemas([{"function": {"name": "f", "parameters": parameters}}])
    good = wrap('{"name": "f", "arguments": {"n": 1, "b": true, "x": 1.5, "a": null, "free": [1]}}')
    assert [c.arguments["free"] for c in parse_calls(good, schemas).calls] == [[1]]
    for arguments in ('{"n": true}', '{"n": 1.5}', '{"b": 0}', '{"x": false}', '{"x": "1"}'):
        parsed = parse_calls(wrap(f'{{"name": "f", "arguments": {arguments}}}'), schemas)
        assert [e.code for e in parsed.errors] == [CallErrorCode.BAD_ARGUMENTS]


def test_arguments_nested_to_any_depth_never_raise():
    for depth in (10, 300, 600, 900, 940, 960, 980, 990, 1000, 5000):
        for inner in ("1", '"\\ud800"'):
            nested = "[" * depth + inner + "]" * depth
            assert len(outcome(wrap(f'{{"name": "python", "arguments": {{"code": "1", "x": {nested}}}}}'))) == 1
    assert outcome(wrap('{"name": "python", "arguments": {"code": "1", "x": {"\\udfff": 1}}}')) == ["bad_arguments"]


def test_without_tools_every_call_is_an_error():
    errors = parse_calls(call("1"), ToolSchemas([])).errors
    assert [e.code.value for e in errors] == ["unknown_tool"] and "known: none" in errors[0].message


def test_long_garbage_is_read_in_one_pass():
    for unit in ("<tool_call>", '<tool_call>{"', "<tool_call>x</think>", "<tool_call>{}", "<think>", "</think>"):
        parse_calls(unit * 20_000, SCHEMAS)
        assert len(parse_calls((unit + "</tool_call>") * 2_000, SCHEMAS).calls) == 0
    assert outcome(call("1") * 300) == ["1"] * 300


@pytest.mark.parametrize("unit", ["</think><tool_call>{", "<tool_call>x</think>", '<tool_call>{"</think>'])
@pytest.mark.parametrize(("before", "after"), [("", ""), ("", "</tool_call>"), ("</tool_call>", "</think>")])
def test_a_hundred_thousand_broken_calls_cost_no_more_each_than_one(unit, before, after):
    """No assertion on time: with a scan from the start (or to a far end tag) for each call this takes minutes."""
    assert parse_calls(before + unit * 100_000 + after, SCHEMAS).calls == ()


def test_the_place_of_a_json_error_is_counted_from_its_own_call():
    text = "line\n" * 50 + wrap('{"name": x}')
    assert "at character 10;" in str(parse_calls(text, SCHEMAS).errors[0])


TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "\n", '{"name": "python", "arguments": {"code": "1"}}']
TAGS += ["{", "}", '"', "\\", ",", "[", "]", "x", "1", "\0", "\ud800", '{"name": "python", "arguments": ']


@given(st.lists(st.sampled_from(TAGS), max_size=40).map("".join))
@settings(max_examples=1000, deadline=None)
def test_any_text_parses_and_whatever_runs_was_closed_outside_thinking(text):
    parsed = parse_calls(text, SCHEMAS)
    assert all(isinstance(item, Call | CallError) for item in parsed.items)
    assert len(parsed.items) <= text.count("<tool_call>")
    assert len(parsed.calls) <= text.count("</tool_call>")
    assert all(isinstance(c.arguments["code"], str) for c in parsed.calls)
    assert parse_calls(f"<think>{text.replace('</think>', '')}", SCHEMAS).items == ()


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=4))
@settings(max_examples=300, deadline=None)
def test_well_formed_calls_come_back_exactly(codes):
    assert outcome("so\n" + "\n".join(map(call, codes))) == codes
    assert outcome("<think>x</think>" + "then".join(map(call, codes)) + "\n") == codes


@pytest.mark.slow
def test_a_hundred_thousand_fuzzed_turns_parse_without_an_exception():
    draw = random.Random(0)
    texts = [case["text"] for case in HANDED if len(case["text"]) < 1000]
    pieces = [
        *TAGS,
        *'{}[]"\\,:0',
        "\\u",
        "\\ud800",
        '"code"',
        '"arguments"',
        '"name"',
        "null",
        "-1e999",
        "<|im_end|>",
    ]
    calls = errors = 0
    for _ in range(100_000):
        text = draw.choice(texts) + draw.choice(["", "", draw.choice(texts)])
        for _ in range(draw.randrange(5)):
            at = draw.randrange(len(text) + 1)
            text = text[:at] + draw.choice(pieces) + text[at + draw.randrange(4) :]
        parsed = parse_calls(text, SCHEMAS)
        calls, errors = calls + len(parsed.calls), errors + len(parsed.errors)
        for item in parsed.items:
            if isinstance(item, Call):
                assert item.name == "python" and item.arguments["code"].encode() is not None
            else:
                assert len(str(item)) < 300
        assert parse_calls("<think>" + text.replace("/", ""), SCHEMAS).items == ()
    assert calls > 10_000 and errors > 10_000, "the fuzz must reach both"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"query": "x"}, None),
        ({"query": "x", "top": None}, None),
        ({"query": "x", "mode": "b", "either": 3}, None),
        ({}, '"query" is required; write {"name": "search", "arguments": {"query": "..."}}'),
        ({"query": "x", "top": "3"}, '"top" must be of type integer'),
        ({"query": "x", "mode": "c"}, '"mode" must be one of ["a", "b"]'),
        ({"query": "x", "either": []}, '"either" must be of type integer or string'),
    ],
)
def test_arguments_of_a_users_tool_are_checked_by_its_schema_and_the_hint_names_that_tool(arguments, words):
    fields = {
        "query": {"type": "string"}, "top": {"type": "integer", "nullable": True},
        "mode": {"type": "string", "enum": ["a", "b"]}, "either": {"type": ["integer", "string"]},
    }  # fmt: skip
    parameters = {"type": "object", "properties": fields, "required": ["query"]}
    python = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
    both = [("python", python), ("search", parameters)]
    schemas = ToolSchemas([{"type": "function", "function": {"name": n, "parameters": p}} for n, p in both])
    text = f"<tool_call>{json.dumps({'name': 'search', 'arguments': arguments})}</tool_call>"
    [item] = parse_calls(text, schemas).items
    assert item.arguments == arguments if words is None else words in str(item)
