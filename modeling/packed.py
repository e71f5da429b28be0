"""A packed line through a Hugging Face model: hidden states of the tokens that predict a sampled one.

The policy's training forward, its frozen reference and the distillation teacher all run this very function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

from torch import Tensor, nn

from modeling.attention import NO_MASK, training_rows


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


def predicting_states(model: Any, batch: PackedBatch, implementation: str) -> Tensor:
    """Last hidden states, the final norm applied, where the next token was sampled  # [M, H]

    model: a Hugging Face causal LM with our attention; implementation: model.attn_implementation
    """
    like = cast(Tensor, model.get_input_embeddings().weight)
    rows = training_rows(batch.lengths, implementation, like)
    hidden = model.base_model(
        input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=NO_MASK, use_cache=False, rows=rows,
    ).last_hidden_state[0]  # [N, H]  # fmt: skip
    return hidden[batch.predictors]


class PredictingStates(nn.Module):
    """`predicting_states` as a module, for what wraps modules."""

    def __init__(self, model: nn.Module, implementation: str):
        super().__init__()
        self.model = model
        self._implementation = implementation

    def forward(self, batch: PackedBatch) -> Tensor:
        return predicting_states(self.model, batch, self._implementation)
