"""Templates as pretrained models have them: without tools, all that render a prompt; with tools, Hermes-style."""

# ruff: noqa: E501  (templates are one string)

from __future__ import annotations

import copy

import pytest
from transformers import AddedToken

import main as program
from config import ModelConfig, ToolConfig
from rollout.chat.qwen3 import ChatTemplateError, Qwen3Chat
from tests.support.launch import ROOT, metrics, run
from tools import tool_schema

HERMES = ROOT / "models/templates/hermes.jinja"
HEADER = "{{ '<|start_header_id|>' + ROLE + '<|end_header_id|>\n\n' }}"
# Constructs of the official Llama 3, 3.1 and 3.2 templates: a default system turn with dates, trimmed contents,
# exceptions for odd roles, tools in the first user turn, results under a role of their own.
LLAMA_3 = (
    "{%- for message in messages %}{{- bos_token if loop.first else '' }}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
LLAMA_3_1 = (
    "{{- bos_token }}{%- set date = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}"
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: ' + date + '\n\n' }}"
    "{{- system + '<|eot_id|>' }}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' or message.role == 'ipython' %}"
    "{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + message.content | tojson + '<|eot_id|>' }}"
    "{%- elif message.role not in ('user', 'assistant') %}{{- raise_exception('Roles must alternate') }}"
    "{%- else %}{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
SMOLLM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_ASSISTANT = (  # a base model's: a prompt and nothing else
    "{% for message in messages %}{% if message['role'] != 'user' %}{{ raise_exception('user turns only') }}{% endif %}"
    "{{ 'Question: ' + message['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'Answer:' }}{% endif %}"
)
QUESTION = [{"role": "user", "content": "What is 2+2?"}]
TOOLS = [tool_schema(ToolConfig())]


@pytest.fixture
def llama_tokenizer(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    names = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer.add_special_tokens({"extra_special_tokens": [AddedToken(name, special=True) for name in names]})
    tokenizer.bos_token = "<|begin_of_text|>"
    return tokenizer


@pytest.mark.parametrize(
    ("template", "end"),
    [(LLAMA_3, "<|eot_id|>"), (LLAMA_3_1, "<|eot_id|>"), (SMOLLM, "<|im_end|>"), (NO_ASSISTANT, "<|im_end|>")],
    ids=["llama 3", "llama 3.1", "smollm2", "prompt alone"],
)
def test_without_tools_every_template_that_renders_a_prompt_works(llama_tokenizer, template, end):
    llama_tokenizer.chat_template = template
    chat = Qwen3Chat(llama_tokenizer)
    assert llama_tokenizer.convert_tokens_to_ids(end) == chat.end_of_turn_id
    text = llama_tokenizer.decode(chat.prompt_ids(QUESTION))
    assert "What is 2+2?" in text and text.endswith(("assistant<|end_header_id|>\n\n", "assistant\n", "Answer:"))
    assert chat.answer(chat.answer_ids("\\boxed{4}")) == "\\boxed{4}"
    with pytest.raises(ValueError, match="no tools"):
        chat.suffix_ids(["4"], ended=True)


@pytest.mark.parametrize("template", [LLAMA_3_1, SMOLLM, NO_ASSISTANT], ids=["llama 3.1", "smollm2", "prompt alone"])
def test_with_tools_a_template_that_cannot_show_them_is_refused_by_a_line_that_names_one_that_can(
    llama_tokenizer, template
):
    llama_tokenizer.chat_template = template
    with pytest.raises(ChatTemplateError, match=r"models/templates/hermes\.jinja"):
        Qwen3Chat(llama_tokenizer, TOOLS)


def test_the_shipped_template_carries_calls_and_results(llama_tokenizer):
    tokenizer = llama_tokenizer
    tokenizer.chat_template = HERMES.read_text()
    chat = Qwen3Chat(tokenizer, TOOLS)
    assert '"name": "python"' in tokenizer.decode(chat.prompt_ids(QUESTION))
    assert "<tool_response>\n4\n</tool_response>" in tokenizer.decode(chat.suffix_ids(["4"], ended=True))


def test_a_run_takes_the_template_that_its_config_names_and_its_copy_keeps_it(tmp_path, in_the_repository):
    settings = ["model.chat_template=models/templates/hermes.jinja", "train.steps=1", "train.check=false"]
    assert run(tmp_path / "run", *settings) == 0
    assert len(metrics(tmp_path / "run")) == 1
    copy = tmp_path / "run/checkpoints/step_1/chat_template.jinja"
    assert copy.read_text().strip() == HERMES.read_text().strip()


@pytest.mark.parametrize(("name", "words"), [("nowhere.jinja", "No such file"), ("models", "directory")])
def test_a_template_that_cannot_be_read_is_one_line(tmp_path, in_the_repository, capsys, name, words):
    assert run(tmp_path / "run", f"model.chat_template={name}") == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: model.chat_template='{name}'") and message.count("\n") == 1


def test_gpt_oss_takes_no_template(tmp_path, in_the_repository, capsys):
    words = ["--config", "configs/tiny_gpt_oss_cpu.json", "--run-dir", str(tmp_path / "run")]
    assert program.main([*words, "--set", f"model.chat_template={HERMES}"]) == 2
    assert "model.chat_template" in capsys.readouterr().err
    assert ModelConfig(path="m").chat_template == ""
