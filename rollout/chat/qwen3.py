"""Chat tokens by rule: the prompt is rendered once, sampled ids stay verbatim, a tool result only appends a suffix.

A trajectory is prompt + sampled turn + suffix + sampled turn + ...; nothing sampled is ever rendered or tokenized
again, since the template changes earlier tokens (it strips thinking, re-serialises calls, merges odd token pairs).
The suffix is the text that the model's own template puts around tool results, learned from it at start-up by probing,
so every template that keeps its prefix works; others are refused before anything is sampled. Without tools nothing is
ever appended, and every template that renders a prompt works.

Invariants: all ids of one suffix come from encoding one string; text of problems, system prompts, hints and tools
never becomes a control token (control strings in it are broken by a zero-width space, which leaves the visible text as
it was, and the control ids of each suffix are checked); every id is looked up by token string.

Left out: masks and log-probs (suffixes have neither). GPT-OSS's harmony format is `rollout.chat.harmony`'s.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any

import jinja2

from config import UserError
from rollout.chat.toolcall import CALL_CLOSE, CALL_OPEN, THINK_CLOSE, THINK_OPEN, Parsed, ToolSchemas, parse_calls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_END_OF_TEXT = "<|endoftext|>"
_ZERO_WIDTH_SPACE = "\u200b"
_MARKUP = (CALL_OPEN, CALL_CLOSE, "<tool_response>", "</tool_response>", THINK_OPEN, THINK_CLOSE)
_TAG_SHAPE = re.compile(r"<[^\s<>]+>")
_CLOCK = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")

# The probe's texts. Quotes, backslash, accents, angle brackets and outer blanks show a template that rewrites them.
_ASK = [{"role": "user", "content": "probe question"}]
_TURN = {"role": "assistant", "content": "probe turn"}
_RESULTS = (' \n"probe" \\ é <b> 1\n ', "probe result 2")


class ChatTemplateError(UserError, ValueError):
    """A tokenizer or chat template that trajectories cannot be built on exactly. The message names the fix."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """The template's text around messages that follow an assistant turn, from the end-of-turn token onwards."""

    before: str
    between: str
    after: str  # through the header of the next assistant turn

    def text(self, contents: Sequence[str]) -> str:
        return self.before + self.between.join(contents) + self.after


class Qwen3Chat:
    """Turns messages, sampled turns and tool results into ids and back, for one tokenizer and one set of tools.

    tokenizer: a fast Hugging Face tokenizer with a chat template
    tools: function schemas in the OpenAI form; empty: the model is offered none and every call is an error
    enable_thinking: for hybrid templates; False appends the empty think block to every assistant header
    current_date: YYYY-MM-DD, for templates that ask for a date; None: the clock's
    Raises ChatTemplateError where the template fails the start-up probe.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] = (),
        enable_thinking: bool = True, current_date: str | None = None,
    ):  # fmt: skip
        self._tokenizer: Any = tokenizer
        self._tools = [dict(tool) for tool in tools]
        self._enable_thinking = enable_thinking
        self._schemas = ToolSchemas(self._tools)
        day = date.fromisoformat(current_date) if current_date else None
        self._template = _dated(str(tokenizer.chat_template), day) if day else None
        self._expected: dict[tuple[_Frame, int], list[int]] = {}
        self._read_control_tokens()
        self._tools = self._plain(self._tools)
        self._history, self._header = self._probe_prompt()
        self._tool_frame = self._probe_frame(_RESULTS) if self._tools else None
        self._end_of_turn = self._probe_end_of_turn()
        self.end_of_turn_id: int = self._controls[self._end_of_turn]
        # By name, not from the model's config: base checkpoints name other end tokens there than in the tokenizer.
        ends = {self.end_of_turn_id, self._tokenizer.eos_token_id, self._controls.get(_END_OF_TEXT)}
        self.stop_ids: frozenset[int] = frozenset(i for i in ends if i is not None)
        # A header may open thinking itself; then a sampled turn's text begins inside it.
        opened = self._header.rfind(THINK_OPEN)
        self._opened_thinking = self._header[opened:] if opened > self._header.rfind(THINK_CLOSE) else ""
        if self._tools:
            self._probe_tokens()
            self._probe_call_markup()

    def tool_text(self, name: str) -> str:
        """A tool as the prompt shows it: its schema, which the template writes as JSON."""
        return json.dumps(next(tool for tool in self._tools if tool["function"]["name"] == name), ensure_ascii=False)

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt through the first assistant header  # [P]. One rendering, no special tokens added to it."""
        plain = [{key: self._plain(value) for key, value in message.items()} for message in messages]
        return self._encode(self._render(plain, open_turn=True))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of one sampled turn without its stop token; all other markup stays, opened thinking is shown."""
        ids = list(ids[:-1] if len(ids) and ids[-1] in self.stop_ids else ids)
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return self._opened_thinking + text

    def parse(self, text: str) -> Parsed:
        """Calls and unreadable calls of one turn in order (`.items`; `.calls` and `.errors` are its two kinds)."""
        if self._opened_thinking and not text.startswith(THINK_OPEN):
            text = self._opened_thinking + text
        return parse_calls(text, self._schemas)

    def calls(self, turn_ids: Sequence[int]) -> Parsed:
        """`parse` of a sampled turn."""
        return self.parse(self.decode(turn_ids))

    def answer(self, turn_ids: Sequence[int]) -> str:
        """What `reward.grade` is given of a final turn: all of it, since the grader knows this markup."""
        return self.decode(turn_ids)

    def answer_ids(self, text: str) -> list[int]:
        """A turn that says `text` outside thinking and nothing else  # [T]."""
        close = THINK_CLOSE if self._opened_thinking else ""
        return [*self._encode(close + text), self.end_of_turn_id]

    def reply_ids(self, turn_ids: Sequence[int], results: Sequence[str]) -> list[int]:
        """`suffix_ids` for a sampled turn: a cut one, and one that stopped at <|endoftext|>, lack their end token."""
        return self.suffix_ids(results, ended=turn_ids[-1] == self.end_of_turn_id)

    def suffix_ids(self, results: Sequence[str], ended: bool) -> list[int]:
        """Ids to append after a turn: one result per parsed item, in order, through the next assistant header  # [O].

        ended: the turn's last sampled id is `end_of_turn_id`. False for a cut turn, and for one that stopped at
        <|endoftext|>: that turn is complete (its calls run, its answer counts), but the template still needs the
        end-of-turn token, so the suffix brings it. Raises ValueError without results.
        """
        if self._tool_frame is None:
            raise ValueError(f"results={results!r}: this chat has no tools, so no suffix was learned")
        if not results:
            raise ValueError("results=[]: a suffix answers at least one call; end the trajectory instead")
        return self._append(self._tool_frame, results, ended)

    def _append(self, frame: _Frame, contents: Sequence[str], ended: bool) -> list[int]:
        text = frame.text([self._harmless(content) for content in contents])
        ids = self._encode(text[len(self._end_of_turn) :] if ended else text)
        controls = [i for i in ids if i in self._control_ids]
        expected = self._expected_controls(frame, len(contents), ended)
        if controls != expected:
            raise RuntimeError(f"control ids {controls} in a suffix, expected {expected}; text {text!r}")
        return ids

    def _expected_controls(self, frame: _Frame, count: int, ended: bool) -> list[int]:
        key = (frame, count)
        if key not in self._expected:
            self._expected[key] = [i for i in self._encode(frame.text(["x"] * count)) if i in self._control_ids]
        return self._expected[key][1:] if ended else self._expected[key]

    def _plain(self, value: Any) -> Any:
        """A problem's or a tool's text, in which no control string is left; text without one stays as it is."""
        if isinstance(value, Mapping):
            return {key: self._plain(part) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._plain(part) for part in value]
        if not isinstance(value, str) or self._control_ids.isdisjoint(self._encode(value)):
            return value
        return self._harmless(value)

    def _harmless(self, text: str) -> str:
        """The same visible text in which no control string is left, and no half of a surrogate pair."""
        text = _LONE_SURROGATE.sub("\ufffd", text)
        if self._normalizer is not None:
            text = self._normalizer.normalize_str(text)
        return self._control_pattern.sub(lambda match: match[0][0] + _ZERO_WIDTH_SPACE + match[0][1:], text)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _read_control_tokens(self) -> None:
        """Control tokens: those marked special, and added tokens that look like a tag. Phrase tokens are text."""
        added = {token.content: (index, token) for index, token in self._tokenizer.added_tokens_decoder.items()}
        control = {text: at for text, at in added.items() if at[1].special or _TAG_SHAPE.fullmatch(text)}
        for text in control:
            if len(text) < 2 or _ZERO_WIDTH_SPACE in text:
                raise ChatTemplateError(
                    f"special token {text!r}: cannot be broken up inside tool text; use another tokenizer"
                )
        self._controls = {text: index for text, (index, _) in control.items()}
        self._control_ids = frozenset(self._controls.values())
        literals = sorted({*control, *_MARKUP}, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, literals)))
        # A token matched after normalisation could hide in text that only becomes its string by normalisation.
        matched_late = any(token.normalized for _, token in control.values())
        self._normalizer = self._tokenizer.backend_tokenizer.normalizer if matched_late else None

    def _render(self, messages: Sequence[Mapping[str, Any]], open_turn: bool) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tools=self._tools or None, add_generation_prompt=open_turn, tokenize=False,
                enable_thinking=self._enable_thinking, chat_template=self._template,
            )  # fmt: skip
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ChatTemplateError(
                f"chat template: cannot render messages of {roles} ({error}); "
                "give each a string as content, or use one with tool messages, e.g. models/templates/hermes.jinja"
            ) from error

    def _probe_prompt(self) -> tuple[str, str]:
        """The probe's prompt without and the assistant header that opens a turn."""
        history, opened = self._render(_ASK, open_turn=False), self._render(_ASK, open_turn=True)
        _require(
            opened.startswith(history) and len(opened) > len(history),
            "add_generation_prompt must append an assistant header and change nothing before it",
        )
        hidden = [name for name in self._schemas.names if name not in history]
        _require(not hidden, f"the prompt does not show the tool {', '.join(hidden)}")
        return history, opened[len(history) :]

    def _probe_frame(self, contents: Sequence[str]) -> _Frame:
        """The template's own text around tool results and between them."""
        turn, results = _TURN["content"], [{"role": "tool", "content": content} for content in contents]
        one = self._render([*_ASK, _TURN, results[0]], open_turn=True)
        _require(one.startswith(self._history), "a later tool message changes the prompt before it")
        header, found, rest = one[len(self._history) :].partition(turn)
        _require(bool(found), "a tool message changes the assistant turn before it")
        _require(
            _without_thinking(header) == _without_thinking(self._header),
            f"earlier assistant turns get the header {header!r}, new ones {self._header!r}",
        )
        before, found, after = rest.partition(contents[0])
        _require(bool(found), "the text of a tool message is rewritten")
        _require(after.endswith(self._header), "no assistant header follows a tool message")
        several = self._render([*_ASK, _TURN, *results], open_turn=True)
        frame = _Frame(before, several[len(one) - len(after) :].partition(contents[1])[0], after)
        self._probe_rounds(frame, header, contents)
        return frame

    def _probe_rounds(self, frame: _Frame, header: str, contents: Sequence[str]) -> None:
        """Two rounds of calls must render as prompt, turn and frame, turn and frame: the prefix is kept."""
        messages = [{"role": "tool", "content": content} for content in contents]
        rendered = self._render([*_ASK, _TURN, *messages, _TURN, messages[0]], open_turn=True)
        turn = header + _TURN["content"]
        first = frame.text(contents)[: -len(self._header)]
        _require(
            rendered == self._history + turn + first + turn + frame.text(contents[:1]),
            "a second round of tool calls changes what was rendered before it",
        )

    def _probe_end_of_turn(self) -> str:
        before = self._tool_frame.before if self._tool_frame else self._after_a_turn()
        end = next((text for text in sorted(self._controls, key=len, reverse=True) if before.startswith(text)), None)
        if end is None:
            raise ChatTemplateError(
                f"chat template: an assistant turn ends in {before!r}; use one that ends it in a special token"
            )
        if self._encode(end) != [self._controls[end]]:
            raise ChatTemplateError(f"the tokenizer splits {end!r}; use it with split_special_tokens=False")
        return end

    def _after_a_turn(self) -> str:
        """What follows an assistant turn; the tokenizer's end token where the template shows none."""
        end = self._tokenizer.eos_token or ""
        try:
            after = self._render([*_ASK, _TURN], open_turn=False).partition(_TURN["content"])[2].lstrip()
        except ChatTemplateError:
            return end
        return after if any(map(after.startswith, self._controls)) else end

    def _probe_tokens(self) -> None:
        """The derived suffix must be the tail of the template's own tokens, whole and after a sampled end."""
        messages = [{"role": "tool", "content": content} for content in _RESULTS]
        whole = self._encode(self._render([*_ASK, _TURN, *messages], open_turn=True))
        for ended in (True, False):
            suffix = self.suffix_ids(_RESULTS, ended=ended)
            _require(whole[-len(suffix) :] == suffix, "the suffix has other tokens than the rendered conversation")
        _require(self.suffix_ids(_RESULTS, ended=False)[0] == self.end_of_turn_id, "no end-of-turn token is encoded")

    def _probe_call_markup(self) -> None:
        """A template that writes calls in another dialect teaches calls that `parse` would never see."""
        name = self._schemas.names[0]
        arguments = self._schemas.example(name)
        written = {"type": "function", "function": {"name": name, "arguments": arguments}}
        turn = {"role": "assistant", "content": "", "tool_calls": [written]}
        rendered = self._render([*_ASK, turn], open_turn=False)[len(self._history) :]
        parsed = parse_calls(rendered, self._schemas)
        _require(
            name not in rendered or (not parsed.errors and [call.name for call in parsed.calls] == [name]),
            f"it writes a call as {rendered!r}, not as {CALL_OPEN} JSON {CALL_CLOSE}",
        )


def _require(ok: bool, problem: str) -> None:
    if not ok:
        raise ChatTemplateError(
            f"chat template: {problem}; use model.chat_template=models/templates/hermes.jinja, another one that only "
            "appends, or tool.enabled=false with rollout.max_turns=1"
        )


def _dated(template: str, day: date) -> str:
    """The template with a date in place of its readings of the clock."""
    return _CLOCK.sub(lambda call: json.dumps(day.strftime(call[2])), template)


def _without_thinking(header: str) -> str:
    return re.sub(rf"{THINK_OPEN}\s*({THINK_CLOSE}\s*)?", "", header)
