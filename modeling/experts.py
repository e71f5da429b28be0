"""The expert products of a mixture-of-experts layer, registered with Hugging Face under one name for both phases.

In half precision on CUDA it is Hugging Face's grouped product: sorted by expert, no host synchronisation, one kernel
for all experts. It needs weights that begin at a multiple of 16 bytes: in ZeRO's flat buffer they do, unless a tensor
of the model has a size that is no multiple of 8, as in toys of 3 heads. Elsewhere each expert multiplies its own
tokens, at least MIN_ROWS at a time, so that in fp32 on CPU a token's result is the same bits whichever tokens share
the call (see `modeling.attention`). Both sum a token's experts in the router's order.
Both know the experts of GPT-OSS: weights [E, in, out] with biases, a gate of their own (`_apply_gate`).

Left out: expert parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from modeling.attention import MIN_ROWS

IMPLEMENTATION = "packed_experts"


def experts_forward(experts: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """hidden [N, hidden]; ids, weights: the experts of each token and their shares  # [N, k] -> [N, hidden]"""
    if hidden.device.type == "cuda" and hidden.dtype != torch.float32 and _is_aligned(experts):
        return grouped_mm_experts_forward(experts, hidden, ids, weights)
    tokens, top_k = ids.shape
    sorted_ids, order = ids.flatten().sort(stable=True)  # pairs of token and expert, by expert
    counts = sorted_ids.bincount(minlength=experts.num_experts).tolist()
    parts = hidden[order // top_k].split(counts)
    results = torch.cat([_one_expert(experts, e, part) for e, part in enumerate(parts) if len(part)])
    results = results[order.argsort()] * weights.flatten()[:, None]
    return results.view(tokens, top_k, -1).sum(dim=1).to(hidden.dtype)


def _is_aligned(experts: Any) -> bool:
    return all(weight.data_ptr() % 16 == 0 for weight in (experts.gate_up_proj, experts.down_proj))


def _one_expert(experts: Any, expert: int, x: Tensor) -> Tensor:
    """x [n, hidden] -> [n, hidden]"""
    count = x.shape[0]
    if count < MIN_ROWS:
        x = F.pad(x, (0, 0, 0, MIN_ROWS - count))
    both = x @ experts.gate_up_proj[expert] + experts.gate_up_proj_bias[expert]
    return (experts._apply_gate(both) @ experts.down_proj[expert] + experts.down_proj_bias[expert])[:count]


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
