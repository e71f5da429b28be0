"""Compiles every Triton kernel for Hopper, in bf16, on a machine without a GPU: python -m tests.compile_kernels

A launch compiles down to machine code and runs nothing. The interpreter accepts programs that the compiler refuses
(a variable that changes its shape in a loop, say), and a GPU minute is a costly place to learn of them. Ends with the
names of the kernels that no launch here has reached, and fails if there are any.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # read when a kernel is defined

import torch
import triton
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

ROOT = Path(__file__).resolve().parent.parent
compiled: set[str] = set()


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
        compiled.add(self.fn.__name__)
        return run(self, *words, grid=grid, warmup=True, **options)

    triton.runtime.driver.set_active(NoDevice())
    JITFunction.run = warm


def decode_and_sample() -> None:
    from modeling.decode_stack import DecodeStack
    from modeling.fused import decode_weights
    from rollout.sampling_kernel import HeadSampler, sample

    for config_type, rows in ((Qwen3Config, 4), (Qwen2Config, 64)):
        config = config_type(
            vocab_size=256, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64,
        )  # fmt: skip
        weights = decode_weights(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
        kv = torch.zeros(2, 2, 8, 2, 16, 64, dtype=torch.bfloat16)
        table, last = torch.zeros(rows + 1, 4, dtype=torch.int32), torch.zeros(rows + 1, dtype=torch.int32)
        rotary = (torch.zeros(64, 64, dtype=torch.bfloat16),) * 2
        stack = DecodeStack(weights, kv, table, last, rotary, rows, overlap=True)
        stack.launch(rows)
        HeadSampler(stack, rows).launch(rows, 0.7)
    words = torch.zeros(4, 2, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    sample(torch.zeros(4, 5000, dtype=torch.bfloat16), *words, 1.0)


def training_logprobs() -> None:
    from modeling.logprob_kernel import FusedLogprobs

    hidden, head = (torch.zeros(rows, 64, dtype=torch.bfloat16, requires_grad=True) for rows in (4, 5000))
    FusedLogprobs.apply(hidden, head, torch.zeros(4, dtype=torch.int64), 1.0)[0].sum().backward()


DRIVES = (decode_and_sample, training_logprobs)


def kernels() -> set[str]:
    """Names of the kernels in the project: JIT functions that end in _kernel, the others being their parts."""
    names = set()
    for folder in ("modeling", "rollout"):
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
    print(f"{len(compiled)} kernels compiled for sm_90; not reached: {', '.join(sorted(missing)) or 'none'}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
