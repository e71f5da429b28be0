"""The module that training wraps: a packed batch in, log-probabilities of its sampled tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from modeling.activations import Recompute
from modeling.attention import NO_MASK, Rows, training_rows
from modeling.divergence import TeacherStates, weighted_divergence
from modeling.families import can_fuse
from modeling.logprob import TokenLogprobs, token_logprobs
from modeling.routing import Recorded


class PackedBatch(Protocol):
    """The fields of `update.batch.ResponseTokenBatch` that a forward needs. N tokens, M of them predict a target."""

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
    @property
    def weights(self) -> Tensor: ...  # [M]


class PredictingStates(nn.Module):
    """A packed batch in, last hidden states (final norm applied) out, where the next token was sampled  # [M, H]"""

    def __init__(self, model: PreTrainedModel, implementation: str):
        super().__init__()
        self.model = model
        self._implementation = implementation

    def forward(self, batch: PackedBatch) -> Tensor:
        return self._states(batch, self._rows(batch))

    def _rows(self, batch: PackedBatch) -> Rows:
        like = torch.empty(0, dtype=self.model.dtype, device=batch.input_ids.device)  # ZeRO-3: weights may be absent
        return batch_rows(self.model.config, self._implementation, batch.lengths, like)

    def _states(self, batch: PackedBatch, rows: Rows) -> Tensor:
        hidden = self.model.base_model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=NO_MASK, use_cache=False,
            rows=rows,
        ).last_hidden_state[0]  # [N, H]  # fmt: skip
        return hidden[batch.predictors]


class TokenLogprobModule(PredictingStates):
    """What DeepSpeed wraps: a packed batch in, log-probabilities of its sampled tokens out."""

    def __init__(
        self, model: PreTrainedModel, implementation: str, temperature: float, recompute: Recompute | None = None,
        *, only_distils: bool = False, router_replay: bool = False, router_balance: bool = False,
    ):  # fmt: skip
        """recompute: for a model that is trained; without it nothing is kept beyond what autograd asks for
        only_distils: the divergence alone is differentiated, the log-probabilities are figures
        router_balance: whether the routers' balance is measured
        """
        super().__init__(model, implementation)
        self._temperature, self._recompute, self._only_distils = temperature, recompute, only_distils
        self._replay, self._balance = router_replay, router_balance

    def forward(self, batch: PackedBatch, lesson: TeacherStates | None = None) -> TokenLogprobs:  # type: ignore[override]
        """lesson: the teacher's hidden states for the batch; the divergence from them then comes along"""
        head = cast(Tensor, self.model.get_output_embeddings().weight)
        keep = False
        if self._recompute and torch.is_grad_enabled():
            keep = self._recompute.begin(len(batch.targets) * head.shape[0] * head.element_size())
        rows = self._rows(batch)
        rows.routes = routes = self._recorded(batch)
        hidden = self._states(batch, rows)
        if lesson is None:
            out = token_logprobs(hidden, head, batch.targets, self._temperature, keep)
        else:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self._only_distils):
                out = token_logprobs(hidden, head, batch.targets, self._temperature)
            out = replace(out, divergences=weighted_divergence(hidden, head, batch.targets, batch.weights, lesson))
        if routes is None:
            return out
        balance = None if routes.balance is None else routes.balance[batch.predictors]
        return replace(out, flips=routes.flips[batch.predictors], balance=balance)

    def _recorded(self, batch: PackedBatch) -> Recorded | None:
        """The experts of sampling, to be compared with or replayed. None in a dense model."""
        if batch.routes is None:
            if self._balance:
                raise ValueError("batch.routes=None: loss.router_balance needs the experts that sampling recorded")
            return None
        row_of = row_of_each(batch.lengths, batch.input_ids.device) if self._balance else None
        return Recorded(batch.routes, self.model.config.num_hidden_layers, self._replay, row_of)


def batch_rows(shape: Any, implementation: str, lengths: Sequence[int], like: Tensor) -> Rows:
    """The attention of a batch; cuDNN takes part where nothing but the plain causal softmax is asked for.

    shape: the Hugging Face config; implementation: model.attn_implementation; like: a tensor of the model's
    """
    half = like.dtype in (torch.bfloat16, torch.float16)
    if implementation == "auto" and half and can_fuse(shape, like.device):
        from modeling.train_attention import LongTrainingRows, cudnn_serves

        heads, groups = shape.num_attention_heads, shape.num_key_value_heads
        size = getattr(shape, "head_dim", None) or shape.hidden_size // heads
        if cudnn_serves(heads, groups, size, like.dtype, like.device):
            return LongTrainingRows(lengths, like.device)
    return training_rows(lengths, implementation, like)


def row_of_each(lengths: Sequence[int], device: torch.device) -> Tensor:
    """The sequence of each packed token  # [N]"""
    counts = torch.tensor(list(lengths))
    return torch.arange(len(counts)).repeat_interleave(counts).to(device)
