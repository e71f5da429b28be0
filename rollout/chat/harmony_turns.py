"""Harmony turns (GPT-OSS), read on token ids: a turn's messages, and the tool calls among them. No torch.

The grammar is the one of OpenAI's openai-harmony: `<|start|>` role and recipient, `<|channel|>` channel, recipient and
content type, `<|message|>` body, `<|end|>` | `<|call|>` | `<|return|>`. A sampled turn begins inside a header, since
the prompt ends in `<|start|>assistant`, so a call may well be the first thing in it. `<|end|>` ends one message of a
turn, `<|call|>` and `<|return|>` end the turn. Control tokens are ids: text that spells one is text.

Invariants: whatever the ids, `read_messages` and `read_calls` return; nothing outside a message that the assistant
wrote is a call; a message that ends in `<|call|>` always gets an item, and so does a turn's last when it is for a tool
but was cut or returned: an error that the model is shown, never a guess that runs. Where openai-harmony parses, role,
channel, recipient and body are the same (tests/rollout/chat/test_harmony_oracle.py), but for a
lone word in a header that is no `to=`: it takes it for the recipient, here it is a content type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollout.chat.toolcall import Call, CallError, CallErrorCode, Parsed, ToolSchemas, check_arguments, decode_json

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
CONTROLS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)

ASSISTANT, FINAL, COMMENTARY = "assistant", "final", "commentary"
FUNCTIONS = "functions."  # the namespace of tools that are declared in the developer message
_TO = "to="


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a turn. What its header does not say, or says twice, is None."""

    role: str | None
    recipient: str | None  # whom it is for; a tool where it is a call
    channel: str | None
    content_type: str | None
    body: str | None  # None: the header never ended
    end: str  # END, CALL, RETURN, or "" where the turn was cut

    @property
    def is_answer(self) -> bool:
        """Whether a user would be shown it as the answer."""
        spoken = self.role == ASSISTANT and self.channel == FINAL and self.recipient is None
        return spoken and self.end == RETURN


def read_messages(
    ids: Sequence[int], controls: dict[int, str], decode: Callable[[Sequence[int]], str]
) -> list[Message]:
    """The messages of one sampled turn, in order.

    ids: the turn, its stop token included  # [T]
    controls: id -> string of each of CONTROLS
    decode: text of ids that hold none of them
    Between a message's end and the next `<|start|>` ids belong to no message and are left out.
    """
    messages: list[Message] = []
    opened = True  # the prompt has opened the first
    place = 0
    while place < len(ids):
        if not opened:
            opened = controls.get(ids[place]) == START
            place += 1
            continue
        first = not messages and place == 0
        header_end = _find(ids, place, controls, (MESSAGE, END, CALL, RETURN))
        header = _header_parts(ids[place:header_end], controls, decode)
        body, body_end = None, header_end
        if header_end < len(ids) and controls[ids[header_end]] == MESSAGE:
            body_end = _find(ids, header_end + 1, controls, (END, CALL, RETURN))
            body = _text(ids[header_end + 1 : body_end], controls, decode)
        end = controls[ids[body_end]] if body_end < len(ids) else ""
        messages.append(_message(header, first, body, end))
        place, opened = body_end + 1, False
    return messages


def _find(ids: Sequence[int], place: int, controls: dict[int, str], wanted: Sequence[str]) -> int:
    """The first place from `place` on that holds one of the wanted control tokens, or the length."""
    while place < len(ids) and controls.get(ids[place]) not in wanted:
        place += 1
    return place


def _text(ids: Sequence[int], controls: dict[int, str], decode: Callable[[Sequence[int]], str]) -> str:
    """Control tokens that do not end a body belong to its text, as openai-harmony has it."""
    pieces, start = [], 0
    for place, number in enumerate(ids):
        if number in controls:
            pieces += [decode(ids[start:place]), controls[number]]
            start = place + 1
    return "".join([*pieces, decode(ids[start:])])


def _header_parts(
    ids: Sequence[int], controls: dict[int, str], decode: Callable[[Sequence[int]], str]
) -> list[tuple[str, str]]:
    """The header cut at its control tokens: (control token before, text); "" before the first."""
    parts, before, start = [], "", 0
    for place, number in enumerate(ids):
        if number in controls:
            parts.append((before, decode(ids[start:place])))
            before, start = controls[number], place + 1
    return [*parts, (before, decode(ids[start:]))]


def _message(header: list[tuple[str, str]], first: bool, body: str | None, end: str) -> Message:
    words = [word for _, text in header for word in text.split()]
    recipients = {word[len(_TO) :] for word in words if word.startswith(_TO)}
    role_words = header[0][1].split()
    role = ASSISTANT if first else role_words[0] if role_words else None
    channel_texts = [text for before, text in header if before == CHANNEL]
    in_channel = channel_texts[0].split() if channel_texts else []
    constrained = [text.split() for before, text in header if before == CONSTRAIN]
    # After `<|constrain|>` or as a bare word behind the channel.
    types = [words[0] for words in constrained if words] or [w for w in in_channel[1:] if not w.startswith(_TO)]
    return Message(
        role=role,
        recipient=recipients.pop() if len(recipients) == 1 else None,
        channel=in_channel[0] if in_channel else None,
        content_type=types[0] if types else None,
        body=body,
        end=end,
    )


def read_calls(messages: Sequence[Message], schemas: ToolSchemas) -> Parsed:
    """An item for each of `called`."""
    return Parsed(tuple(_read_call(message, schemas) for message in called(messages)))


def called(messages: Sequence[Message]) -> list[Message]:
    """What must be answered before the assistant goes on: see the module's invariants."""
    return [message for message in messages if message.end == CALL or _is_open_call(message)]


def _is_open_call(message: Message) -> bool:
    """For a tool, but cut or returned instead of called; only a turn's last message ends so."""
    return _is_to_a_tool(message) and message.body is not None and message.end in ("", RETURN)


def _is_to_a_tool(message: Message) -> bool:
    return message.role == ASSISTANT and message.recipient is not None


def tool_named(message: Message, schemas: ToolSchemas) -> str | None:
    """The tool that a message is for: `functions.NAME`, or the bare name, with which GPT-OSS calls built-in tools."""
    name = (message.recipient or "").removeprefix(FUNCTIONS)
    return name if _is_to_a_tool(message) and name in schemas.names else None


def _read_call(message: Message, schemas: ToolSchemas) -> Call | CallError:
    body, name = message.body or "", tool_named(message, schemas)
    if message.end != CALL:
        return _error(CallErrorCode.UNCLOSED, f"the call does not end in {CALL}, so it was not run", schemas)
    if not _is_to_a_tool(message):
        return _error(CallErrorCode.MISSING_NAME, "the message does not say which tool it is for", schemas)
    if name is None:
        known = ", ".join(FUNCTIONS + name for name in schemas.names) or "none"
        return CallError(CallErrorCode.UNKNOWN_TOOL, f'there is no tool "{message.recipient:.40}"; known: {known}')
    field = schemas.only_field(name)
    if message.recipient == name and message.content_type != "json" and field is not None:
        return check_arguments(name, {field: body}, schemas)  # a built-in tool takes bare text
    value, end, problem = decode_json(body, 0)
    if end != len(body):
        text = (problem or "text after the JSON value") + schemas.hint_of(name)
        return CallError(CallErrorCode.MALFORMED_JSON, text)
    if not isinstance(value, dict):
        text = f"the arguments are a JSON object{schemas.hint_of(name)}"
        return CallError(CallErrorCode.NOT_AN_OBJECT, text)
    return check_arguments(name, value, schemas)


def _error(code: CallErrorCode, message: str, schemas: ToolSchemas) -> CallError:
    return CallError(code, message + schemas.hint)
