"""The module that training wraps: a packed batch in, log-probabilities of its sampled tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from modeling.attention import NO_MASK, training_rows
from modeling.logprob import TokenLogprobs, token_logprobs
from modeling.routing import Recorded


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
    def routes(self) -> Tensor | None: ...  # [N, layers * k] uint8, the experts of sampling; None: not known


class TokenLogprobModule(nn.Module):
    """What DeepSpeed wraps: a packed batch in, log-probabilities of its sampled tokens out."""

    def __init__(self, model: PreTrainedModel, implementation: str, temperature: float, router_replay: bool = False):
        super().__init__()
        self.model = model
        self._implementation, self._temperature, self._replay = implementation, temperature, router_replay

    def forward(self, batch: PackedBatch) -> TokenLogprobs:
        like = cast(Tensor, self.model.get_input_embeddings().weight)
        rows = training_rows(batch.lengths, self._implementation, like)
        routes = None
        if batch.routes is not None:
            rows.routes = routes = Recorded(batch.routes, self.model.config.num_hidden_layers, self._replay)
        hidden = self.model.base_model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=NO_MASK, use_cache=False,
            rows=rows,
        ).last_hidden_state[0]  # [N, H]  # fmt: skip
        head = self.model.get_output_embeddings().weight
        out = token_logprobs(hidden[batch.predictors], head, batch.targets, self._temperature)
        return out if routes is None else replace(out, flips=routes.flips[batch.predictors])
