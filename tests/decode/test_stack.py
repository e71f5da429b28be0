"""The fused decode step computes what the Hugging Face modules compute (in Triton's interpreter without a GPU)."""

import importlib.util

import pytest
import torch

from config import LoraConfig
from modeling import lora
from tests.support.interpreted import DEVICE

from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, Qwen2Config, Qwen3Config  # isort: skip

from decode.stack import DecodeStack  # isort: skip
from decode.tiles import AttentionTiles  # isort: skip
from decode.weights import decode_weights  # isort: skip
from decode.graphs import rotary_table  # isort: skip

PAGE = 16
FAMILIES = {"qwen3": Qwen3Config, "llama": LlamaConfig, "qwen2": Qwen2Config, "gpt_oss": GptOssConfig}
MIXTURE = {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 6, "swiglu_limit": 0.4}


def tiny(family: str, heads: int = 4, kv_heads: int = 2, tie: bool = True):
    torch.manual_seed(0)
    config = FAMILIES[family](
        vocab_size=97, hidden_size=64, intermediate_size=72, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=16, tie_word_embeddings=tie, max_position_embeddings=512,
        **(MIXTURE if family == "gpt_oss" else {}),
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(DEVICE).eval()
    for name, parameter in model.named_parameters():  # norms and biases of ones and zeros would hide mistakes
        if parameter.dim() == 1 or name.endswith("_bias"):
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
        elif "experts" in name or "router" in name:  # otherwise too small for clamps and choices to matter
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    return model


def stack_for(model, rows: int, slots: int, pages: int, context: int) -> DecodeStack:
    weights = decode_weights(model)
    kv = torch.full(
        (len(weights.layers), 2, pages, weights.kv_heads, PAGE, weights.head_size), float("nan"), device=DEVICE
    )
    table = torch.zeros(slots, context // PAGE, dtype=torch.int32, device=DEVICE)
    last = torch.zeros(slots, dtype=torch.int32, device=DEVICE)
    rotary = rotary_table(model, context, torch.float32)
    routes = torch.full((len(weights.layers), pages, PAGE, 3), 255, dtype=torch.uint8, device=DEVICE)
    mixture = model.config.model_type == "gpt_oss"
    stack = DecodeStack(weights, kv, table, last, rotary, rows, overlap=False, routes=routes if mixture else None)
    stack.attention_override = AttentionTiles(bn=32, warps=2, stages=3, target=4, prefetch=0)  # few idle programs
    return stack


def decode(stack: DecodeStack, lines: list[list[int]], pages: list[list[int]]) -> torch.Tensor:
    """Feeds the lines token by token, rows that have ended idle in the scratch page; final hidden states after norm of
    each line's last token."""
    ends = [None] * len(lines)
    for position in range(max(map(len, lines))):
        for row, line in enumerate(lines):
            live = position < len(line)
            step = [line[position], position, 0, 0, row + 1, pages[row][position // PAGE], 0, 1] if live else [0] * 8
            stack.step[:, row] = torch.tensor(step, dtype=torch.int32)
        stack.launch(len(lines))
        for row, line in enumerate(lines):
            if position == len(line) - 1:
                ends[row] = stack.normed[row].clone()
    return torch.stack(ends)


@torch.no_grad()
def full_forward(model, line: list[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The last token's final hidden state, and the experts of every token [L, T, k]."""
    chosen: list[torch.Tensor] = []
    routers = [layer.mlp.router for layer in model.model.layers if hasattr(layer.mlp, "router")]
    hooks = [router.register_forward_hook(lambda m, a, out: chosen.append(out[2])) for router in routers]
    hidden = model.model(torch.tensor([line], device=DEVICE), use_cache=False).last_hidden_state[0, -1]
    for hook in hooks:
        hook.remove()
    return hidden, torch.stack(chosen) if chosen else None


@pytest.mark.parametrize(
    ("family", "heads", "kv_heads", "longest"),  # beyond one page of 16 tokens, and beyond GPT-OSS's window, or short
    [("qwen3", 4, 2, 18), ("llama", 4, 4, 6), ("qwen2", 8, 1, 6), ("qwen3", 2, 1, 6), ("gpt_oss", 8, 2, 18)],
)
def test_decoding_token_by_token_equals_the_full_forward_of_the_modules(family, heads, kv_heads, longest):
    model = tiny(family, heads, kv_heads)
    lines = [torch.randint(0, 97, (length,)).tolist() for length in (longest, 1)]
    stack = stack_for(model, rows=2, slots=3, pages=8, context=64)
    ends = decode(stack, lines, pages=[[5, 2, 7, 1], [3, 6, 4, 0]])
    for line, end, own in zip(lines, ends, [[5, 2], [3]], strict=True):
        expected, chosen = full_forward(model, line)
        torch.testing.assert_close(end, expected, atol=2e-5, rtol=2e-5)
        if family == "gpt_oss":  # the experts of each token are written beside its key
            recorded = stack.routes[:, own].flatten(1, 2)[:, : len(line)]
            assert torch.equal(recorded.sort(-1).values.long(), chosen.sort(-1).values)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_adapters_are_added_to_every_product_as_peft_adds_them():
    model = tiny("qwen3", 4, 2)
    lora.add_adapters(model, LoraConfig(rank=5, alpha=10), seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    assert set(decode_weights(model).layers[0].adapters) == {"qkv", "o", "gate_up", "down"}
    lines, pages = [torch.randint(0, 97, (length,)).tolist() for length in (4, 1)], [[5, 2], [3]]
    ends = decode(stack_for(model, rows=2, slots=3, pages=8, context=64), lines, pages)
    for line, end in zip(lines, ends, strict=True):
        torch.testing.assert_close(end, full_forward(model, line)[0], atol=2e-5, rtol=2e-5)
    with lora.without_adapters(model):
        assert not torch.allclose(ends[0], full_forward(model, lines[0])[0], atol=1e-2)


@pytest.mark.parametrize(
    ("family", "heads", "kv_heads"), [("qwen3", 4, 2), ("qwen2", 8, 1), ("qwen3", 6, 2), ("gpt_oss", 8, 2)]
)
def test_many_tokens_of_one_sequence_in_one_step_equal_the_full_forward_of_the_modules(family, heads, kv_heads):
    """Two sequences read 21 and 2 tokens beside one that decodes its fourth; pages end inside the chunk."""
    model = tiny(family, heads, kv_heads)
    lines = [torch.randint(0, 97, (length,)).tolist() for length in (21, 2, 4)]
    pages = [[5, 2], [3], [6]]
    stack = stack_for(model, rows=29, slots=4, pages=8, context=64)
    stack.attended.fill_(1e4)  # what idle rows hold is nobody's
    for position in range(3):  # of the third sequence, alone
        stack.step[:, 0] = torch.tensor([lines[2][position], position, 0, 0, 3, 6, 0, 1], dtype=torch.int32)
        stack.launch(1)
    places = [(0, 20, 1), (1, 1, 1), (2, 3, 1)]  # sequence, position, rows that its row takes
    for i, others in ((0, 20), (1, 1)):
        places += [(i, p, 0 if p % stack.tokens else min(stack.tokens, others - p)) for p in range(others)]
    stack.step.zero_()
    for row, (i, position, span) in enumerate(places):
        step = [lines[i][position], position, 0, 0, i + 1, pages[i][position // PAGE], 0, span]
        stack.step[:, row] = torch.tensor(step, dtype=torch.int32)
    stack.launch(29, together=True)  # five rows of padding
    if stack.experts is not None:
        assert (stack.experts.ids[len(places) : 29] == -1).all(), "no expert is read for them"
    for i, line in enumerate(lines):
        with torch.no_grad():
            expected = model.model(torch.tensor([line], device=DEVICE), use_cache=False).last_hidden_state[0]
        for row, (owner, position, _) in enumerate(places):
            if owner == i:
                torch.testing.assert_close(stack.normed[row], expected[position], atol=2e-5, rtol=2e-5)
