"""The module that training wraps: a packed batch in, log-probabilities of its sampled tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, cast

import torch
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

    def __init__(
        self, model: PreTrainedModel, implementation: str, temperature: float, router_replay: bool = False,
        router_balance: bool = False,
    ):  # fmt: skip
        """router_balance: whether the routers' balance is measured"""
        super().__init__()
        self.model = model
        self._implementation, self._temperature = implementation, temperature
        self._replay, self._balance = router_replay, router_balance

    def forward(self, batch: PackedBatch) -> TokenLogprobs:
        like = cast(Tensor, self.model.get_input_embeddings().weight)
        rows = training_rows(batch.lengths, self._implementation, like)
        routes = None
        if batch.routes is None and self._balance:
            raise ValueError("batch.routes=None: loss.router_balance needs the experts that sampling recorded")
        if batch.routes is not None:
            row_of = row_of_each(batch.lengths, like.device) if self._balance else None
            rows.routes = routes = Recorded(batch.routes, self.model.config.num_hidden_layers, self._replay, row_of)
        hidden = self.model.base_model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=NO_MASK, use_cache=False,
            rows=rows,
        ).last_hidden_state[0]  # [N, H]  # fmt: skip
        head = self.model.get_output_embeddings().weight
        out = token_logprobs(hidden[batch.predictors], head, batch.targets, self._temperature)
        if routes is None:
            return out
        balance = routes.balance
        return replace(
            out,
            flips=routes.flips[batch.predictors],
            balance=None if balance is None else balance[batch.predictors],
        )


def row_of_each(lengths: Sequence[int], device: torch.device) -> Tensor:
    """The row of each token of a packed line  # [N]"""
    counts = torch.tensor(list(lengths))
    return torch.arange(len(counts)).repeat_interleave(counts).to(device)
