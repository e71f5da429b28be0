"""The module that training wraps: a packed batch in, log-probabilities of its sampled tokens out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from modeling.attention import NO_MASK, Rows, training_rows
from modeling.divergence import TeacherStates, weighted_divergence
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
    @property
    def weights(self) -> Tensor: ...  # [M]


class PredictingStates(nn.Module):
    """A packed batch in, last hidden states (final norm applied) out, where the next token was sampled  # [M, H]"""

    def __init__(self, model: PreTrainedModel, implementation: str):
        super().__init__()
        self.model = model
        self._implementation = implementation

    def forward(self, batch: PackedBatch) -> Tensor:
        hidden = self.model.base_model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=NO_MASK, use_cache=False,
            rows=self._rows(batch.lengths, batch.input_ids.device),
        ).last_hidden_state[0]  # [N, H]  # fmt: skip
        return hidden[batch.predictors]

    def _rows(self, lengths: Sequence[int], device: torch.device) -> Rows:
        """The attention of a batch; cuDNN takes part where nothing but the plain causal softmax is asked for."""
        like = torch.empty(0, dtype=self.model.dtype, device=device)  # weights may be on their way (ZeRO-3)
        shape, half = self.model.config, like.dtype in (torch.bfloat16, torch.float16)
        if self._implementation == "auto" and half and can_fuse(shape, device):
            from modeling.train_attention import LongTrainingRows, cudnn_serves

            heads, groups = shape.num_attention_heads, shape.num_key_value_heads
            size = getattr(shape, "head_dim", None) or shape.hidden_size // heads
            if cudnn_serves(heads, groups, size, like.dtype, like.device):
                return LongTrainingRows(lengths, like.device)
        return training_rows(lengths, self._implementation, like)


class TokenLogprobModule(PredictingStates):
    """What DeepSpeed wraps: a packed batch in, log-probabilities of its sampled tokens out."""

    def __init__(
        self, model: PreTrainedModel, implementation: str, temperature: float, recompute: Recompute | None = None,
        only_distils: bool = False,
    ):  # fmt: skip
        """recompute: for a model that is trained; without it nothing is kept beyond what autograd asks for
        only_distils: the divergence alone is differentiated, the log-probabilities are figures
        """
        super().__init__(model, implementation)
        self._temperature, self._recompute, self._only_distils = temperature, recompute, only_distils

    def forward(self, batch: PackedBatch, lesson: TeacherStates | None = None) -> TokenLogprobs:  # type: ignore[override]
        """lesson: the teacher's hidden states for the batch; the divergence from them then comes along"""
        head = cast(Tensor, self.model.get_output_embeddings().weight)
        keep = False
        if self._recompute and torch.is_grad_enabled():
            keep = self._recompute.begin(len(batch.targets) * head.shape[0] * head.element_size())
        hidden = super().forward(batch)
        if lesson is None:
            return token_logprobs(hidden, head, batch.targets, self._temperature, keep)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._only_distils):
            out = token_logprobs(hidden, head, batch.targets, self._temperature)
        divergences = weighted_divergence(hidden, head, batch.targets, batch.weights, lesson)
        return dataclasses.replace(out, divergences=divergences)
