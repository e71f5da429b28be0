"""GPT-OSS trained at its true widths with random weights on one CUDA GPU: steps under ZeRO-2, and how near to eager.

    python benchmarks/bench_gpt_oss.py --layers 6 --rows 4096 4096 --steps 3
    python benchmarks/bench_gpt_oss.py --lora-rank 16 --rows 36371 --steps 3
    python benchmarks/bench_gpt_oss.py --layers 2 --rows 700 300 --against-eager

Decoding at the true shape: `bench_decode.py --shape models/shapes/gpt-oss-20b`. Each row samples its second half, and
every other row is right, so name two at least; rows of more than 16,384 tokens in all take a micro-batch each.
`--against-eager` makes no step: it compares log-probs and gradients (norm-relative, the worst of each kind of
parameter) with Hugging Face's eager attention and experts on the same batch. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import describe
from config import Config, parse_config
from modeling.loading import build_model
from modeling.logprob import token_logprobs
from modeling.packed_model import TokenLogprobModule
from modeling.shapes import SHIPPED
from objectives.minibatch import plan_updates
from policy import Policy, init_distributed
from rollout.records import RolloutRecord, Scored, StopReason, Turn
from update import update

SHAPE = SHIPPED / "gpt-oss-20b"
TOGETHER = 16384  # tokens of a micro-batch


def shape_of(layers: int, folder: str) -> str:
    """A folder with the true config.json cut to so many layers."""
    config = json.loads((SHAPE / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "layer_types": config["layer_types"][:layers]}
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return folder


def scored_rows(lengths: list[int], vocabulary: int) -> list[Scored]:
    generator, scored = random.Random(0), []
    for index, length in enumerate(lengths):
        half = length // 2
        record = RolloutRecord(
            prompt_index=0, sample_index=index, policy_step=0,
            token_ids=tuple(generator.randrange(vocabulary) for _ in range(length + 1)),
            sampled=(False,) * half + (True,) * (length + 1 - half),
            logprobs=(0.0,) * half + (-12.0,) * (length + 1 - half),
            turns=(Turn(start=half, end=length + 1, ended=True),), stop=StopReason.ANSWERED,
        )  # fmt: skip
        reward = -1.0 if index % 2 else 1.0
        scored.append(Scored(record=record, reward=reward, reason="correct", advantage=reward))
    return scored


def train(policy: Policy, batches: Any, config: Config, steps: int) -> dict[str, Any]:
    seconds, norms, losses = [], [], []
    for _ in range(steps):
        torch.cuda.synchronize()
        started = time.perf_counter()
        stats = update(policy, batches, config.loss, config.train.learning_rate)
        torch.cuda.synchronize()
        seconds.append(round(time.perf_counter() - started, 3))
        norms.append(stats.updates[0].grad_norm)
        losses.append(stats.updates[0].loss)
    return {"seconds": seconds, "grad_norms": norms, "losses": losses}


def against_eager(model: Any, batch: Any) -> dict[str, Any]:
    """Our log-probs [M] and parameter gradients, and the same with Hugging Face's eager code, row by row."""
    batch = batch.to(model.device)

    def gradients(logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
        model.zero_grad()
        (logprobs * batch.advantages).sum().backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    ours = TokenLogprobModule(model, "auto", 1.0)(batch).logprobs
    our_gradients = gradients(ours)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    hidden, start = [], 0
    for length in batch.lengths:
        ids = batch.input_ids[:, start : start + length]
        hidden.append(model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0])
        start += length
    head = model.get_output_embeddings().weight
    theirs = token_logprobs(torch.cat(hidden)[batch.predictors], head, batch.targets, 1.0).logprobs
    exact = gradients(theirs)
    kinds: dict[str, float] = {}
    for name, gradient in exact.items():
        kind = ".".join(part for part in name.split(".")[1:] if not part.isdigit())
        exact_norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        error = (torch.linalg.vector_norm(our_gradients[name] - gradient, dtype=torch.float32) / exact_norm).item()
        kinds[kind] = max(kinds.get(kind, 0.0), error)
    delta = (ours - theirs).detach().abs()
    return {"mean_abs_dlogp": delta.mean().item(), "max_abs_dlogp": delta.max().item(), "gradients": kinds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 4096], help="tokens of each")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--against-eager", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda")
    init_distributed(device)
    tokens = sum(options.rows) if sum(options.rows) <= TOGETHER else max(options.rows)
    with tempfile.TemporaryDirectory() as folder:
        config = parse_config({
            "model": {"path": shape_of(options.layers, folder), "random_weights": True}, "data": {"path": "none"},
            "lora": {"rank": options.lora_rank}, "train": {"max_tokens_per_micro_batch": tokens},
            "rollout": {"context_length": tokens, "max_new_tokens": tokens - 1},
        })  # fmt: skip
        started = time.perf_counter()
        # Without DeepSpeed for the comparison: ZeRO takes gradients away as they come.
        policy = None if options.against_eager else Policy(config, device)
        model = policy.model if policy else build_model(config.model, config.train.seed, device)
    torch.cuda.synchronize()
    print(f"{options.layers} layers: built in {time.perf_counter() - started:.1f} s", flush=True)
    batches = [one[0] for one in plan_updates(scored_rows(options.rows, model.config.vocab_size), config, 1)]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    result = train(policy, batches, config, options.steps) if policy else against_eager(model, batches[0][0])
    print(json.dumps({
        "benchmark": "gpt_oss", "layers": options.layers, "rows": options.rows, "lora_rank": options.lora_rank,
        "parameters": sum(p.numel() for p in model.parameters()), "trained": trained, **result,
        "peak_allocated_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
        "peak_reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2), **describe(device),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
