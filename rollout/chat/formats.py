"""What the trainer asks of a chat format, and the formats by the names that `modeling.families` gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from config import ConfigError, ModelConfig
from modeling.families import FAMILIES
from rollout.chat.toolcall import Parsed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[Mapping[str, Any]]


class Chat(Protocol):
    """Messages, sampled turns and tool results to ids and back. A turn's ids are those that the policy drew  # [T]."""

    @property
    def stop_ids(self) -> frozenset[int]: ...  # each ends a turn

    def tool_text(self, name: str) -> str:
        """A tool as the prompt shows it."""

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt through the header that opens the first assistant turn  # [P]."""

    def decode(self, turn_ids: Sequence[int]) -> str:
        """The turn's text without its stop token."""

    def calls(self, turn_ids: Sequence[int]) -> Parsed:
        """Calls and unreadable calls, in order; each needs one result."""

    def answer(self, turn_ids: Sequence[int]) -> str:
        """What `reward.grade` is given of a final turn."""

    def answer_ids(self, text: str) -> list[int]:
        """A turn that gives `text` as its answer."""

    def reply_ids(self, turn_ids: Sequence[int], results: Sequence[str]) -> list[int]:
        """Ids to append after a turn with calls, through the next assistant header  # [O]."""


def make_chat(model_type: str, tokenizer: PreTrainedTokenizerBase, tools: Tools, model: ModelConfig) -> Chat:
    """The chat of a model family, probed.

    model_type: of the model's Hugging Face config
    Raises ConfigError for a family without one and for a setting that the family's format does not have,
    ChatTemplateError for a tokenizer or template that trajectories cannot be built on.
    """
    if model_type not in FAMILIES:
        *others, last = sorted(FAMILIES)
        raise ConfigError(
            "model.path", model.path,
            f"model type {model_type!r} has no chat format here; name a model of type {', '.join(others)} or {last}",
        )  # fmt: skip
    return CHATS[FAMILIES[model_type].chat](model_type, tokenizer, tools, model)


def asks_for_a_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether prompts of its chat template would change overnight."""
    return "strftime_now" in str(tokenizer.chat_template)


def _template_chat(model_type: str, tokenizer: PreTrainedTokenizerBase, tools: Tools, model: ModelConfig) -> Chat:
    from rollout.chat.qwen3 import Qwen3Chat

    dated = asks_for_a_date(tokenizer)
    for name in ("reasoning_effort", "current_date"):
        value = getattr(model, name)
        if value is not None and not (dated and name == "current_date"):
            raise ConfigError(
                f"model.{name}", value, f"is GPT-OSS's, and does nothing for model type {model_type}; remove it"
            )
    return Qwen3Chat(tokenizer, tools, model.enable_thinking, model.current_date)


def _harmony_chat(_: str, tokenizer: PreTrainedTokenizerBase, tools: Tools, model: ModelConfig) -> Chat:
    from rollout.chat.harmony import DEFAULT_DATE, DEFAULT_EFFORT, HarmonyChat

    if model.chat_template:
        raise ConfigError(
            "model.chat_template", model.chat_template, "GPT-OSS's format is built in and reads no template; remove it"
        )
    if not model.enable_thinking:
        raise ConfigError(
            "model.enable_thinking", False, "GPT-OSS always thinks; remove it and set model.reasoning_effort=low"
        )
    return HarmonyChat(
        tokenizer, tools, model.reasoning_effort or DEFAULT_EFFORT, model.current_date or DEFAULT_DATE
    )  # fmt: skip


CHATS: dict[str, Callable[[str, PreTrainedTokenizerBase, Tools, ModelConfig], Chat]] = {
    "template": _template_chat,
    "harmony": _harmony_chat,
}
