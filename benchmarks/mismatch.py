"""The distance of graph-decoded log-probs from a forward over whole sequences (for bench_decode).

For a family that Hugging Face runs with SDPA the forward is Hugging Face's own. For GPT-OSS it is the training
forward; its experts are compared with those of the draws, and replayed once. For scale, the distance of that forward
from one with eager attention.
"""

from __future__ import annotations

from typing import Any

import torch

from modeling.attention import IMPLEMENTATION, NO_MASK, training_rows
from modeling.routing import Recorded


@torch.no_grad()
def mismatch(model: Any, bench: Any, prompt: int, new: int) -> dict[str, float]:
    """|dlogp| and k3 = mean(r - 1 - log r), r = exp(dlogp), of `new` draws a sequence against a plain forward."""
    rows = bench.rows
    lines = torch.randint(0, model.config.vocab_size, (rows, prompt)).tolist()
    logprobs: list[list[float]] = [[] for _ in range(rows)]
    for step in range(new):
        start = 0 if step == 0 else prompt + step - 1
        draws = bench.decoder.run([bench.chunk(r, lines[r][start:], start) for r in range(rows)], 1.0)
        for row in range(rows):
            lines[row].append(draws.tokens[row])
            logprobs[row].append(draws.logprobs[row])
    drawn = torch.tensor(logprobs, device="cuda")
    result = {}
    if model._supports_sdpa:
        plain = plain_logprobs(model, lines, prompt, "sdpa")
    else:
        routes = [bench.cache.routes_of(own, prompt + new - 1, prompt + new - 1) for own in bench.pages]
        plain, result["flips"] = training_logprobs(model, lines, prompt, routes, replay=False)
        replayed, _ = training_logprobs(model, lines, prompt, routes, replay=True)
        result["mean_abs_dlogp_replayed"] = (replayed - drawn).abs().mean().item()
    delta = plain - drawn
    between = plain - plain_logprobs(model, lines, prompt, "eager")
    return {
        "mean_abs_dlogp": delta.abs().mean().item(), "max": delta.abs().max().item(),
        "k3": (delta.exp() - 1 - delta).mean().item(), "between_two_plain_forwards": between.abs().mean().item(),
        **result,
    }  # fmt: skip


def plain_logprobs(model: Any, lines: list[list[int]], prompt: int, attention: str, **options: Any) -> torch.Tensor:
    """Log-probs of the tokens after the prompt by Hugging Face's forward, by sequence  # [rows, new] fp32"""
    model.set_attn_implementation(attention)
    rows = []
    for line in lines:
        ids = torch.tensor([line], device="cuda")
        logits = model(input_ids=ids[:, :-1], use_cache=False, **options).logits[0, prompt - 1 :].float()
        rows.append(logits.log_softmax(-1).gather(1, ids[0, prompt:, None])[:, 0])
    model.set_attn_implementation(IMPLEMENTATION)
    return torch.stack(rows)


def training_logprobs(
    model: Any, lines: list[list[int]], prompt: int, routes: list[bytes], replay: bool
) -> tuple[torch.Tensor, float]:
    """The same by the training forward, and the share of (token, layer) whose experts differ from `routes`."""
    parts, flips = [], []
    for line, recorded in zip(lines, routes, strict=True):
        rows = training_rows([len(line) - 1], "auto", model.lm_head.weight)
        ids = torch.frombuffer(bytearray(recorded), dtype=torch.uint8).view(len(line) - 1, -1).cuda()
        rows.routes = Recorded(ids, model.config.num_hidden_layers, replay)
        parts.append(plain_logprobs(model, [line], prompt, IMPLEMENTATION, attention_mask=NO_MASK, rows=rows))
        flips.append(rows.routes.flips.mean())
    return torch.cat(parts), torch.stack(flips).mean().item()
