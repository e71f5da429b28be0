"""The module that training wraps: a packed batch in, log-probabilities of its sampled tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from modeling.attention import NO_MASK, Rows, training_rows
from modeling.fused import can_fuse
from modeling.logprob import TokenLogprobs, token_logprobs
from modeling.recompute import Recompute


class PackedBatch(Protocol):
    """The fields of `data.ResponseTokenBatch` that a forward needs. N tokens, M of them predict a target."""

    @property
    def input_ids(self) -> Tensor: ...  # [1, N]
    @property
    def position_ids(self) -> Tensor: ...  # [1, N]
    @property
    def lengths(self) -> Sequence[int]: ...  # of the rows; they sum to N
    @property
    def predictors(self) -> Tensor: ...  # [M]
    @property
    def targets(self) -> Tensor: ...  # [M]


class TokenLogprobModule(nn.Module):
    """What DeepSpeed wraps: a packed batch in, log-probabilities of its sampled tokens out."""

    def __init__(
        self, model: PreTrainedModel, implementation: str, temperature: float, recompute: Recompute | None = None
    ):
        """recompute: for a model that is trained; without it nothing is kept beyond what autograd asks for"""
        super().__init__()
        self.model, self._recompute = model, recompute
        self._implementation, self._temperature = implementation, temperature

    def forward(self, batch: PackedBatch) -> TokenLogprobs:
        head = cast(Tensor, self.model.get_output_embeddings().weight)
        keep = False
        if self._recompute and torch.is_grad_enabled():
            keep = self._recompute.begin(len(batch.targets) * head.shape[0] * head.element_size())
        rows = self._rows(batch.lengths, head)
        hidden = self.model.base_model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=NO_MASK, use_cache=False,
            rows=rows,
        ).last_hidden_state[0]  # [N, H]  # fmt: skip
        return token_logprobs(hidden[batch.predictors], head, batch.targets, self._temperature, keep)

    def _rows(self, lengths: Sequence[int], like: Tensor) -> Rows:
        """The attention of a batch; cuDNN takes part where nothing but the plain causal softmax is asked for."""
        shape, half = self.model.config, like.dtype in (torch.bfloat16, torch.float16)
        if self._implementation == "auto" and half and can_fuse(shape, like.device):
            from modeling.train_attention import LongTrainingRows, cudnn_serves

            heads, groups = shape.num_attention_heads, shape.num_key_value_heads
            size = getattr(shape, "head_dim", None) or shape.hidden_size // heads
            if cudnn_serves(heads, groups, size, like.dtype, like.device):
                return LongTrainingRows(lengths, like.device)
        return training_rows(lengths, self._implementation, like)
