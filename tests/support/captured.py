"""Engines over captured graphs."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, Qwen2Config, Qwen3Config

from decode.cache import PagedCache
from decode.eager import EagerDecoder
from decode.interface import Chunk
from decode.noise import row_key
from modeling.attention import IMPLEMENTATION
from modeling.experts import IMPLEMENTATION as EXPERTS
from tests.support.interpreted import DEVICE

from decode.graphs import GraphDecoder  # isort: skip

gpu = pytest.mark.skipif(DEVICE == "cpu", reason="captured graphs need a CUDA device")


FAMILIES = {"qwen3": Qwen3Config, "llama": LlamaConfig, "qwen2": Qwen2Config, "gpt_oss": GptOssConfig}


MIXTURE = {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 24}


PAGE_SIZE, CONTEXT, VOCABULARY = 16, 256, 311


def make(family: str, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    config = FAMILIES[family](
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, tie_word_embeddings=family == "qwen3", max_position_embeddings=512,
        **(MIXTURE if family == "gpt_oss" else {}),
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=IMPLEMENTATION, experts_implementation=EXPERTS, dtype=torch.float32
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15 if parameter.ndim > 1 else 0.3, mean=float(parameter.ndim == 1))
    model = model.to(DEVICE, dtype).eval()
    return model, PagedCache(model.config, 120, PAGE_SIZE, dtype, DEVICE)


def eager(model, cache) -> EagerDecoder:
    return EagerDecoder(model, cache, "auto")


def graphs(model, cache, max_rows: int = 6, temperature: float = 1.0, extra_rows: int = 0) -> GraphDecoder:
    return GraphDecoder(
        model, cache, eager(model, cache), max_rows=max_rows, context_length=CONTEXT, temperature=temperature,
        extra_rows=extra_rows,
    )  # fmt: skip


def rollout(decoder, prompts: list[int], steps: int, temperature: float = 1.0, rows: list[int] | None = None):
    """Prompts of the given lengths, then `steps` draws each, rows starting one step apart and with a forced token in
    the fourth step; returns (tokens of each row, log-probs of each row)."""
    generator = torch.Generator().manual_seed(1)
    lines = [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in prompts]
    pages = [list(range(1 + 16 * i, 17 + 16 * i))[::-1] for i in range(len(prompts))]
    computed, logprobs = [0] * len(lines), [[] for _ in lines]
    for step in range(steps + len(lines)):
        chunks, drawing = [], []
        for i, line in enumerate(lines):
            if not i <= step < i + steps:
                continue
            if step - i == 4:
                line.append(7)  # forced: two tokens are now new, the row takes a longer chunk
            chunk = Chunk(
                lane=(rows or range(len(lines)))[i], token_ids=line[computed[i] :], start=computed[i], pages=pages[i],
                key=row_key(5, 0, i, 0), sample=step - i != 6,
            )  # fmt: skip
            computed[i] = len(line)
            chunks.append(chunk)
            if chunk.sample:
                drawing.append(i)
            else:
                line.append(11)  # forced in place of a draw
        draws = decoder.run(chunks, temperature)
        for i, token, logprob in zip(drawing, draws.tokens, draws.logprobs, strict=True):
            lines[i].append(token)
            logprobs[i].append(logprob)
    return lines, logprobs


def chunk(length: int, sample: bool) -> Chunk:
    return Chunk(lane=0, token_ids=[1] * length, start=0, pages=[1], key=(0, 0), sample=sample)
