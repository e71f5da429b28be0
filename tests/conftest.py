"""Fixtures: tiny models of each family, and the shipped one with its chat, with our attention, on CPU, one thread."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports triton: its kernels then run in the interpreter
    os.environ["TRITON_INTERPRET"] = "1"

from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssConfig, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.utils import logging as transformers_logging

from config import ToolConfig
from modeling.attention import IMPLEMENTATION
from modeling.experts import IMPLEMENTATION as EXPERTS
from rollout.chat.qwen3 import Qwen3Chat
from tests.support.engines import FakeTool, generate, make_engine
from tools import tool_schema

transformers_logging.disable_progress_bar()
torch.set_num_threads(1)

ROOT = Path(__file__).parents[1]
TINY = ROOT / "models/tiny_qwen3"
VOCABULARY = 315
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
FAMILIES = {
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=False),
    "llama": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=False),
    # every other layer sees the last 8 tokens alone
    "gpt_oss": lambda: GptOssConfig(
        **SHAPE,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        rope_parameters={"rope_type": "default", "rope_theta": 150000.0},
    ),
}


def make_model(family: str = "qwen3", dtype: torch.dtype = torch.float32, implementation: str = IMPLEMENTATION):
    """The same random weights for every call with the same family; a little spread so that logits differ."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(
            FAMILIES[family](), dtype=torch.float32, attn_implementation=implementation,
            experts_implementation=EXPERTS if implementation == IMPLEMENTATION else "eager",
        )  # fmt: skip
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.15)
    return model.to(dtype).eval()


@pytest.fixture
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture(params=sorted(FAMILIES))
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32, attn_implementation=IMPLEMENTATION).eval()


@pytest.fixture(scope="module")
def chat(tokenizer):
    return Qwen3Chat(tokenizer, tools=[tool_schema(ToolConfig())])


@pytest.fixture(scope="module")
def reference(model, chat):
    """Four samples of each of four prompts."""
    return generate(make_engine(model, chat, FakeTool()), chat)
