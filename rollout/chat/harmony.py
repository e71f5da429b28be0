"""GPT-OSS's harmony chat in token ids: sibling of `rollout.chat.qwen3.Qwen3Chat`, see `rollout.chat.formats.Chat`.

A trajectory is prompt + sampled turn + suffix + sampled turn + ...; sampled ids stay verbatim, since rendering a
harmony conversation again never gives them back (recipients move, thinking is dropped). No chat template is used: the
format is fixed, and the real one quotes tool results and reads the clock. Prompt and suffixes are put together from
control ids and text that is encoded apart, with control strings taken as plain text, so that neither tool text nor a
problem's text can open or close a message; tool text goes in raw, as openai-harmony has it.

Every id is looked up by token string. Left out: user turns after an answer, images, OpenAI's built-in tools.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollout.chat.harmony_prompt import declaration, developer_text, system_text
from rollout.chat.harmony_turns import (
    ASSISTANT,
    CALL,
    CHANNEL,
    COMMENTARY,
    CONTROLS,
    END,
    FINAL,
    FUNCTIONS,
    MESSAGE,
    RETURN,
    START,
    Message,
    called,
    read_calls,
    read_messages,
    tool_named,
)
from rollout.chat.qwen3 import ChatTemplateError
from rollout.chat.toolcall import CALL_CLOSE, CALL_OPEN, THINK_CLOSE, THINK_OPEN, Parsed, ToolSchemas

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_EFFORT = "medium"
DEFAULT_DATE = "2025-08-05"  # of the model's release; pinned, so that a run of tomorrow has today's prompts
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_GRADER_MARKUP = re.compile("<(?=/?think>|/?tool_call>|\\|im_|\\|endoftext)")
_ZERO_WIDTH_SPACE = "\u200b"


class HarmonyChat:
    """For one tokenizer and one set of tools.

    tokenizer: a fast Hugging Face tokenizer with harmony's control tokens
    tools: function schemas in the OpenAI form; empty: the model is offered none and every call is an error
    reasoning_effort: low, medium or high, as the system message states it
    current_date: YYYY-MM-DD, likewise
    Raises ChatTemplateError for a tokenizer of another family.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] = (),
        reasoning_effort: str = DEFAULT_EFFORT, current_date: str = DEFAULT_DATE,
    ):  # fmt: skip
        self._tokenizer: Any = tokenizer
        self._tools = [dict(tool) for tool in tools]
        self._schemas = ToolSchemas(self._tools, named=False)
        added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items()}
        absent = [name for name in CONTROLS if name not in added]
        if absent:
            raise ChatTemplateError(
                f"tokenizer: has no control token {absent[0]}, which GPT-OSS's harmony format needs; "
                "name the model's own tokenizer in model.tokenizer_path"
            )
        self._id = {name: added[name] for name in CONTROLS}
        self._controls = {index: name for name, index in self._id.items()}
        self._added_ids = frozenset(added.values())
        self.stop_ids: frozenset[int] = frozenset({self._id[RETURN], self._id[CALL]})
        self._system = system_text(reasoning_effort, current_date, bool(self._tools))
        for name in added:
            if self._added_ids & set(self._text(name)):
                raise ChatTemplateError(f"added token {name!r}: text that spells it would become it; mark it special")

    def tool_text(self, name: str) -> str:
        """A tool as the developer message shows it."""
        return declaration(next(tool["function"] for tool in self._tools if tool["function"]["name"] == name)).strip()

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt through the header that opens the first assistant turn  # [P].

        messages: user messages, a system message before them (it becomes the developer's instructions)
        """
        roles = [message["role"] for message in messages]
        begin = int(roles[:1] == ["system"])
        if set(roles[begin:]) != {"user"} or not all(isinstance(message["content"], str) for message in messages):
            raise ChatTemplateError(
                f"harmony prompt: messages of {', '.join(roles)}; give a system message or none, then user messages, "
                "each with a string as content"
            )
        developer = developer_text(messages[0]["content"] if begin else "", self._tools)
        ids = self._message("system", self._system)
        ids += self._message("developer", developer) if developer else []
        for message in messages[begin:]:
            ids += self._message("user", message["content"])
        return ids + self._open_turn()

    def decode(self, turn_ids: Sequence[int]) -> str:
        """The text of a sampled turn without its stop token, all other markup kept."""
        return self._decode(turn_ids[:-1] if self._ended(turn_ids) else turn_ids)

    def calls(self, turn_ids: Sequence[int]) -> Parsed:
        """Calls and unreadable calls of a sampled turn, in order."""
        return read_calls(self._read(turn_ids), self._schemas)

    def answer(self, turn_ids: Sequence[int]) -> str:
        """The final channel's text, in the words that `reward.grade` reads: what stands in other channels as thinking,
        a call as a call. Markup of the grader's that the model spelled out itself is broken up.
        """
        messages = self._read(turn_ids)
        *before, last = messages or [Message(None, None, None, None, None, "")]
        hidden = before if last.is_answer else messages
        thinking = "\n".join(_harmless(message.body or "") for message in hidden)
        said = _harmless(last.body or "") if last.is_answer else ""
        call = f"{CALL_OPEN}{CALL_CLOSE}" if last.end == CALL else ""
        return f"{THINK_OPEN}{thinking}{THINK_CLOSE}{call}{said}"

    def answer_ids(self, text: str) -> list[int]:
        """A turn that says `text` in the final channel and nothing else  # [T]."""
        return [self._id[CHANNEL], *self._text(FINAL), self._id[MESSAGE], *self._text(text), self._id[RETURN]]

    def reply_ids(self, turn_ids: Sequence[int], results: Sequence[str]) -> list[int]:
        """Ids to append after a turn: one result per item of `calls`, in order, and the next turn's header  # [O].

        A result answers in the name of the tool and in the channel it was called from; an error in our tool's name.
        After a cut turn they begin with the `<|call|>` that it lacks. Raises ValueError without results.
        """
        if not results:
            raise ValueError("results=[]: a suffix answers at least one call; end the trajectory instead")
        ids = [] if self._ended(turn_ids) else [self._id[CALL]]
        for message, result in zip(called(self._read(turn_ids)), results, strict=True):
            ids += self._result(message, result)
        return ids + self._open_turn()

    def _result(self, call: Message, text: str) -> list[int]:
        known = call.recipient is not None and tool_named(call, self._schemas) is not None
        default = FUNCTIONS + (self._schemas.names[0] if self._schemas.names else "")
        header = f"{call.recipient if known else default} to={ASSISTANT}"
        # Another channel than these two (or none) is the call's mistake, not to be repeated.
        channel = call.channel if call.channel in ("analysis", COMMENTARY) else COMMENTARY
        return self._message(header, text, channel)

    def _message(self, header: str, text: str, channel: str | None = None) -> list[int]:
        ids = [self._id[START], *self._text(header)]
        ids += [self._id[CHANNEL], *self._text(channel)] if channel else []
        return [*ids, self._id[MESSAGE], *self._text(text), self._id[END]]

    def _open_turn(self) -> list[int]:
        return [self._id[START], *self._text(ASSISTANT)]

    def _text(self, text: str) -> list[int]:
        """Ids of plain text: control strings in it are spelled out."""
        text = _LONE_SURROGATE.sub("\ufffd", text)
        return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _read(self, turn_ids: Sequence[int]) -> list[Message]:
        return read_messages(turn_ids, self._controls, self._decode)

    def _ended(self, turn_ids: Sequence[int]) -> bool:
        return len(turn_ids) > 0 and turn_ids[-1] in self.stop_ids


def _harmless(text: str) -> str:
    return _GRADER_MARKUP.sub("<" + _ZERO_WIDTH_SPACE, text)
