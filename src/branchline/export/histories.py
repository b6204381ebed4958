"""Histories: conversations as messages and choices, and the tree of hand-built ones.

A choice is what a server answered; it may be an OpenAI object or its JSON. Its messages before it are its
prompt. If all choices come with the ids of their prompts and of their tokens, the tree has exactly these ids.
Otherwise a codec renders the prompts: an answer is exact only if its own ids are known and the prompt that
the server reported equals the rendered one. An answer that occurs in several histories is one answer.

    History.read([{"role": "user", "content": "2+2?"}, response])     # a response: with its prompt's ids
    History.read([{"role": "user", "content": "2+2?"}, response.choices[0]])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from branchline.chat.base import Codec, HistoryPolicy
from branchline.core.call import Generation, Request, read_tools
from branchline.core.errors import ExportError, MessageError
from branchline.core.message import Message
from branchline.core.reader import read_message
from branchline.core.token_arrays import Ids
from branchline.timelines.links import MergePolicy
from branchline.timelines.log import LoggedCall, LoggedOutput, read_choice, read_token_ids
from branchline.timelines.merge import merge
from branchline.tree.session import Session
from branchline.tree.tree import Tree


@dataclass(frozen=True)
class History:
    """A conversation: its messages, and which of them the model sampled here."""

    messages: tuple[Message, ...]
    sampled: tuple[int, ...] = ()
    """The positions of the sampled messages."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Empty if the history was read from a session, which keeps the ids of its tools and not their JSON."""
    agent: str = ""
    calls: tuple[LoggedCall, ...] = field(default=(), repr=False)
    """The call of each sampled message; only in a history that was built by hand."""

    @classmethod
    def read(
        cls,
        messages_and_choices: Sequence[object],
        tools: object = None,
        *,
        agent: str = "",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        train_messages: bool = False,
    ) -> History:
        """Reads messages and choices in order: OpenAI objects, their JSON, or `Message`s. A whole response
        stands for its only choice. Only choices are trained; with `train_messages`, assistant messages too.

        Raises MessageError with the position of an item that cannot be read.
        """
        tool_list = read_tools(tools)
        messages: list[Message] = []
        calls: list[LoggedCall] = []
        for index, item in enumerate(messages_and_choices):
            path = f"messages_and_choices[{index}]"
            raw = item if isinstance(item, Message) else _to_json(item, path)
            choice = _read_answer(raw, path) if isinstance(raw, dict) else None
            if choice is None:
                message = raw if isinstance(raw, Message) else read_message(raw, path)
                messages.append(message)
                if not train_messages or message.role != "assistant":
                    continue
                choice = _Choice(LoggedOutput(message))
                messages.pop()
            if not messages:
                raise MessageError(path, "a choice", "a message before the first choice")
            request = Request(
                tuple(messages), tool_list, chat_template_kwargs=dict(chat_template_kwargs or {}), agent=agent
            )
            calls.append(
                LoggedCall(request, (choice.output,), choice.prompt_ids, line=index, id=choice.response_id)
            )
            messages.append(choice.output.message)
        sampled = tuple(len(call.request.messages) for call in calls)
        return cls(tuple(messages), sampled, tuple(tool_list), agent, tuple(calls))


@dataclass(frozen=True)
class _Choice:
    output: LoggedOutput
    prompt_ids: Ids | None = None
    response_id: str = ""


def _to_json(item: object, path: str) -> dict[str, Any]:
    """Returns the JSON of an OpenAI object, extra fields such as `token_ids` included."""
    if isinstance(item, dict):
        return item
    dump = getattr(item, "model_dump", None)
    raw = dump(exclude_none=True) if callable(dump) else None
    if not isinstance(raw, dict):
        raise MessageError(path, type(item).__name__, "a message, a choice or a response")
    return raw


def _read_answer(raw: Mapping[str, Any], path: str) -> _Choice | None:
    """Returns the choice that an item is or contains; None for a message."""
    if "choices" in raw:
        choices = raw["choices"]
        if not isinstance(choices, list) or len(choices) != 1:
            count = len(choices) if isinstance(choices, list) else choices
            raise MessageError(f"{path}.choices", count, "one choice, or the choice itself as the item")
        choice_path, choice = f"{path}.choices[0]", choices[0]
    elif isinstance(raw.get("message"), dict):
        choice_path, choice = path, raw
    else:
        return None
    output = read_choice(choice, choice_path, raw.get("id"))
    prompt = raw.get("prompt_token_ids")
    if prompt is None and isinstance(choice, dict):
        prompt = choice.get("prompt_token_ids")
    return _Choice(output, read_token_ids(prompt, f"{path}.prompt_token_ids"), str(raw.get("id") or ""))


def build_tree(
    histories: Sequence[History], codec: Codec | None = None, *, history: HistoryPolicy = "template"
) -> Tree:
    """Returns the tree of hand-built histories. Raises ExportError if ids are missing and there is no codec,
    InputError if a choice occurs twice with different ids."""
    calls = [call for entry in histories for call in entry.calls]
    if all(call.prompt_ids is not None and call.outputs[0].ids is not None for call in calls):
        return _merge_by_ids(calls)
    if codec is None:
        missing = next(call for call in calls if call.prompt_ids is None or call.outputs[0].ids is None)
        name = "token_ids" if missing.outputs[0].ids is None else "prompt_token_ids"
        raise ExportError(
            f"messages_and_choices[{missing.line}]: has no {name}, expected them, or a codec that renders "
            "the prompts"
        )
    return _commit_calls(calls, codec, history)


def _merge_by_ids(calls: Sequence[LoggedCall]) -> Tree:
    seen: set[tuple[bytes, ...]] = set()
    distinct: list[LoggedCall] = []
    for call in calls:
        assert call.prompt_ids is not None
        key = _answer_key(call, call.prompt_ids)
        if key not in seen:
            seen.add(key)
            distinct.append(replace(call, line=len(distinct)))
    return merge(distinct, MergePolicy(compare="token", ignore_tools=False)).tree


def _commit_calls(calls: Sequence[LoggedCall], codec: Codec, history: HistoryPolicy) -> Tree:
    session = Session("", codec, history=history)
    seen: set[tuple[bytes, ...]] = set()
    for number, call in enumerate(calls):
        output = call.outputs[0]
        turn = session.prepare(call.request)
        key = _answer_key(call, turn.prompt_ids)
        if key in seen:
            continue
        seen.add(key)
        if call.prompt_ids is None:
            # What the server saw is not known, so that it may differ from the rendered prompt.
            turn = replace(turn, path_ids=turn.prompt_ids)
        elif not np.array_equal(call.prompt_ids, turn.prompt_ids):
            turn = replace(turn, prompt_ids=call.prompt_ids, path_ids=turn.prompt_ids)
        is_complete = output.finish_reason != "length"
        generation = Generation(
            codec.encode_reply(output.message, stop=is_complete) if output.ids is None else output.ids,
            None if output.ids is None else output.logprobs,
            finish_reason=output.finish_reason,
            message=output.message,
            inexact=output.ids is None,
        )
        committed = session.commit(turn, generation, call_id=call.id or f"call-{number}").call
        session.record_delivery(committed)
    session.tree.is_chronological = False
    return session.tree


def _answer_key(call: LoggedCall, prompt_ids: Ids) -> tuple[bytes, ...]:
    """Identifies an answer: its prompt, its text and how it was sampled."""
    output = call.outputs[0]
    values = (prompt_ids, output.ids, output.logprobs)
    return (*(b"" if value is None else value.tobytes() for value in values), output.message.key)
