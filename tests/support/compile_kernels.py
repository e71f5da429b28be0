"""Compiles every Triton kernel for Hopper on a machine without a GPU: python -m tests.support.compile_kernels

A launch compiles down to machine code and runs nothing. The interpreter accepts programs that the compiler refuses
(a variable that changes its shape in a loop, say), and a GPU minute is a costly place to learn of them. Fails where
no launch here reaches a kernel, and where the compiler made one bf16 instruction of a product and a sum: it rounds
once, where the modules that the kernels restate round twice.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # read when a kernel is defined

import torch
import triton
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen2Config, Qwen3Config
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from config import LoraConfig
from modeling import lora
from modeling.attention import IMPLEMENTATION, NO_MASK, TrainingRows, sdpa_softmax

ROOT = Path(__file__).resolve().parents[2]
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}
compiled: set[str] = set()
rounds_once: set[str] = set()


class NoDevice:
    """The part of a Triton driver that compiling asks for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def compile_only() -> None:
    """From here on a launch compiles its kernel and does not run it."""
    run = JITFunction.run

    def warm(self, *words, grid, warmup=False, **options):
        kernel = run(self, *words, grid=grid, warmup=True, **options)
        compiled.add(self.fn.__name__)
        if "fma.rn.bf16" in kernel.asm["ptx"]:
            rounds_once.add(self.fn.__name__)
        return kernel

    triton.runtime.driver.set_active(NoDevice())
    JITFunction.run = warm


def small_model(config_type: type, dtype: torch.dtype = torch.bfloat16, width: int = 256) -> Any:
    config = config_type(
        vocab_size=256, hidden_size=width, intermediate_size=width, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, **(MIXTURE if config_type is GptOssConfig else {}),
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION)


def decode_and_sample() -> None:
    from decode.sampling_kernel import HeadSampler, sample
    from decode.stack import DecodeStack
    from decode.weights import decode_weights

    half, full = torch.bfloat16, torch.float32
    for config_type, rows, rank, dtype, width in (
        (Qwen3Config, 4, 0, half, 256), (Qwen2Config, 64, 16, half, 256), (GptOssConfig, 16, 8, half, 256),
        # Widths that end in less than a tile.
        (Qwen3Config, 4, 4, full, 72), (Qwen2Config, 4, 4, half, 1032), (GptOssConfig, 4, 4, full, 72),
    ):  # fmt: skip
        model = small_model(config_type, dtype, width)
        if rank:
            lora.add_adapters(model, LoraConfig(rank=rank), seed=0)
        weights = decode_weights(model)
        kv = torch.zeros(2, 2, 8, 2, 16, 64, dtype=dtype)
        table, last = torch.zeros(rows + 1, 4, dtype=torch.int32), torch.zeros(rows + 1, dtype=torch.int32)
        rotary = (torch.zeros(64, 64, dtype=dtype),) * 2
        routes = torch.zeros(2, 8, 16, 2, dtype=torch.uint8)
        stack = DecodeStack(weights, kv, table, last, rotary, rows, overlap=True, routes=routes)
        stack.launch(rows)
        stack.launch(rows, together=True)
        HeadSampler(stack, rows).launch(rows, 0.7)
    words = torch.zeros(4, 2, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    sample(torch.zeros(4, 5000, dtype=torch.bfloat16), *words, 1.0)


def training_logprobs() -> None:
    from modeling.logprob_kernel import FusedLogprobs

    hidden, head = (torch.zeros(rows, 64, dtype=torch.bfloat16, requires_grad=True) for rows in (4, 5000))
    FusedLogprobs.apply(hidden, head, torch.zeros(4, dtype=torch.int64), 1.0)[0].sum().backward()


def divergences() -> None:
    from modeling.divergence import Measure
    from modeling.divergence_kernel import KINDS, fused_gradient

    policy, teacher = (torch.zeros(5000, width, dtype=torch.bfloat16) for width in (64, 128))
    targets, scales = torch.zeros(4, dtype=torch.int64), torch.zeros(4)
    for kind in KINDS:
        measure, figures = Measure(kind, 0.5, 1.0, 0), torch.zeros(3, 4)
        fused_gradient(policy[:4], policy, teacher[:4], teacher, targets, scales, measure, figures)


def training_layers() -> None:
    from modeling.train_gate import silu_gate
    from modeling.train_layers import fuse

    ids = torch.zeros(1, 8, dtype=torch.int64)
    for config_type in (Qwen3Config, Qwen2Config):
        model = small_model(config_type).train()
        fuse(model)
        out = model.base_model(
            input_ids=ids, position_ids=torch.arange(8)[None], attention_mask=NO_MASK, use_cache=False,
            rows=TrainingRows((8,), sdpa_softmax),
        )  # fmt: skip
        out.last_hidden_state.sum().backward()
    gate, up = (torch.zeros(8, 256, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    silu_gate(gate, up).sum().backward()  # as with an adapter on the down projection


DRIVES = (decode_and_sample, training_logprobs, divergences, training_layers)


def kernels() -> set[str]:
    """Names of the kernels in the project: JIT functions that end in _kernel, the others being their parts."""
    names = set()
    for folder in ("modeling", "decode"):
        for path in sorted((ROOT / folder).glob("*.py")):
            if "@triton.jit" in path.read_text():
                module = importlib.import_module(f"{folder}.{path.stem}")
                names |= {name for name, value in vars(module).items() if isinstance(value, JITFunction)}
    return {name for name in names if name.endswith("_kernel")}


def main() -> int:
    compile_only()
    for drive in DRIVES:
        drive()
    missing = kernels() - compiled
    print(f"{len(compiled)} kernels compiled for sm_90; not reached: {', '.join(sorted(missing)) or 'none'}; "
          f"with a fused bf16 product and sum: {', '.join(sorted(rounds_once)) or 'none'}")  # fmt: skip
    return 1 if missing or rounds_once else 0


if __name__ == "__main__":
    sys.exit(main())
