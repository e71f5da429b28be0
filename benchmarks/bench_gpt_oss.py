"""GPT-OSS trained at its true widths with random weights on one CUDA GPU: steps under ZeRO-2, distance from eager.

    python benchmarks/bench_gpt_oss.py --layers 6 --rows 4096 4096 --steps 3
    python benchmarks/bench_gpt_oss.py --lora-rank 16 --rows 36371 --steps 3
    python benchmarks/bench_gpt_oss.py --layers 2 --rows 700 300 --against-eager

Decoding at the true shape: `bench_decode.py --shape models/shapes/gpt-oss-20b`. `--rows` gives
the tokens of each sequence. Its second half is sampled, and every other sequence is right, so name at least two.
Sequences of more than 16,384 tokens in all take a micro-batch each. `--against-eager` takes no step: it compares
log-probs and gradients of one batch, ours in bf16 and Hugging Face's eager code in bf16, with the eager code in fp32.
All three use the same experts. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from modeling.attention import IMPLEMENTATION as ATTENTION
from modeling.experts import IMPLEMENTATION as EXPERTS
from modeling.loading import SHIPPED, build_model
from modeling.logprob import token_logprobs
from modeling.packed_model import TokenLogprobModule
from modeling.routing import Recorded
from policy import Policy, init_distributed
from rollout.records import RolloutRecord, Scored, StopReason, Turn
from update.minibatch import plan_updates
from update.update import update

SHAPE = SHIPPED / "gpt-oss-20b"
TOGETHER = 16384  # tokens of a micro-batch


def shape_of(layers: int, folder: str) -> str:
    """A folder with the true config.json cut to `layers` layers."""
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


class Seen:
    """Keeps what the routers choose, in place of `modeling.routing.Recorded`, which compares it."""

    balance = None

    def __init__(self) -> None:
        self.ids: list[torch.Tensor] = []  # of each layer  # [N, k]

    @property
    def flips(self) -> torch.Tensor:
        return torch.zeros(len(self.ids[0]), device=self.ids[0].device)

    def choose(self, _: int, __: torch.Tensor, shares: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.ids.append(ids)
        return shares, ids


def our_choices(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [M] by the training forward, and the experts that its tokens took  # [N, layers * k] uint8"""
    module, seen = TokenLogprobModule(model, "auto", 1.0), Seen()
    module._recorded = lambda _: seen  # type: ignore[assignment, return-value, method-assign]
    with torch.no_grad():
        logprobs = module(batch).logprobs
    return logprobs, torch.cat(seen.ids, dim=1).to(torch.uint8)


def eager_logprobs(model: Any, batch: Any, replay: bool) -> tuple[torch.Tensor, float]:
    """Log-probs [M] by Hugging Face's eager code, by sequence; the share of (token, layer) with other experts."""
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    hidden, flips = [], []
    for ids, routes in zip(batch.input_ids[0].split(batch.lengths), batch.routes.split(batch.lengths), strict=True):
        recorded = Recorded(routes, model.config.num_hidden_layers, replay)
        for layer in model.base_model.layers:
            layer.self_attn.link.routes = recorded
        hidden.append(model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0])
        flips.append(recorded.flips)
    head = model.get_output_embeddings().weight
    logprobs = token_logprobs(torch.cat(hidden)[batch.predictors], head, batch.targets, 1.0).logprobs
    return logprobs, torch.cat(flips).mean().item()


def gradients(model: Any, batch: Any, logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (logprobs * batch.advantages).sum().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def against_eager(model: Any, batch: Any) -> dict[str, Any]:
    """Log-probs and gradients of our code and of Hugging Face's eager code, both bf16, against its eager code in fp32.

    All three use the experts that ours chose. "free": ours against eager, each with its own choices.
    """
    batch = batch.to(model.device)
    free, routes = our_choices(model, batch)
    batch = dataclasses.replace(batch, routes=routes)
    with torch.no_grad():
        free_eager, flips = eager_logprobs(model, batch, replay=False)
    model.set_attn_implementation(ATTENTION)
    model.set_experts_implementation(EXPERTS)
    ours = TokenLogprobModule(model, "auto", 1.0, router_replay=True)(batch).logprobs
    our_gradients = gradients(model, batch, ours)
    eager, _ = eager_logprobs(model, batch, replay=True)
    eager_gradients = gradients(model, batch, eager)
    model.float()
    exact, _ = eager_logprobs(model, batch, replay=True)
    exact_gradients = gradients(model, batch, exact)
    errors = {"ours": _errors(our_gradients, exact_gradients), "eager": _errors(eager_gradients, exact_gradients)}
    return {
        "flips": flips, "free_mean_abs_dlogp": (free - free_eager).abs().mean().item(),
        "mean_abs_dlogp": {"ours": _mean_abs(ours - exact), "eager": _mean_abs(eager - exact)}, "gradients": errors,
    }  # fmt: skip


def _mean_abs(difference: torch.Tensor) -> float:
    return difference.detach().abs().mean().item()


def _errors(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    """Norm-relative, the worst of each kind of parameter."""
    kinds: dict[str, float] = {}
    for name, gradient in exact.items():
        kind = ".".join(part for part in name.split(".")[1:] if not part.isdigit()) or name
        error = torch.linalg.vector_norm(found[name].float() - gradient) / torch.linalg.vector_norm(gradient)
        kinds[kind] = round(max(kinds.get(kind, 0.0), error.item()), 5)
    return kinds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 4096], help="tokens of each sequence")
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
        # Without DeepSpeed for the comparison: ZeRO takes each gradient away once it is computed.
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
