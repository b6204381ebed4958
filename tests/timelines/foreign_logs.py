"""Random foreign logs: an agent whose calls a server rendered and logged in every imperfect way.

The server renders an earlier answer with the sampled ids or encodes its text again, shows its reasoning or
drops it, ends it with the stop token that was sampled or adds one, and writes tools at the beginning. The log
misses ids here and there, has two models, agents, copies of lines, and outputs that ended by a stop token, a
stop string or a limit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import numpy as np

from branchline.core.call import Request, ToolList
from branchline.core.message import Message
from branchline.core.token_arrays import Ids, as_ids
from branchline.timelines.log import LoggedCall, LoggedOutput

TOKEN_BYTES = {
    1: b"a",
    2: b"b",
    3: b"c",
    4: b"ab",
    5: b"bc",
    6: b"abc",
    20: b"<user>",
    21: b"<assistant>",
    25: b"<think>",
    26: b"</think>",
    30: b"<end>",
    40: b"<tools1>",
    41: b"<tools2>",
}
STOP = 30
_BY_TEXT = {data.decode(): token for token, data in TOKEN_BYTES.items() if token < 20}
_TOOLS = (ToolList(), ToolList(({"type": "function", "function": {"name": "f"}},)))


@dataclass
class _Sampled:
    """An assistant message, and the ids that it was sampled as."""

    message: Message
    ids: tuple[int, ...]


@dataclass
class LogWriter:
    """Writes a random log."""

    random: Random
    misses_ids: bool = True
    calls: list[LoggedCall] = field(default_factory=list)
    _histories: list[list[_Sampled | str]] = field(default_factory=list)
    """Conversations: user texts and sampled answers."""

    def write(self, count: int) -> list[LoggedCall]:
        self._drifts = self.random.choice((0.0, 0.3))
        self._misses = self.random.choice((0.0, 0.0, 0.3)) if self.misses_ids else 0.0
        self._drops_reasoning = self.random.random() < 0.5
        self._writes_tools = self.random.random() < 0.7
        for _ in range(count):
            self._write_call()
        if self.random.random() < 0.3 and self.calls:
            copied = self.random.choice(self.calls)
            self.calls.append(copied)
        lines = list(range(1, len(self.calls) + 1))
        if self.random.random() < 0.5:
            self.random.shuffle(lines)
        return [_at_line(call, line) for call, line in zip(self.calls, lines, strict=True)]

    def _chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def _text(self, least: int = 0) -> str:
        return "".join(self.random.choice("abc") for _ in range(self.random.randint(least, 3)))

    def _encode(self, text: str, canonical: bool) -> list[int]:
        ids: list[int] = []
        while text:
            sizes = [size for size in (3, 2, 1) if text[:size] in _BY_TEXT]
            size = sizes[0] if canonical else self.random.choice(sizes)
            ids.append(_BY_TEXT[text[:size]])
            text = text[size:]
        return ids

    def _write_call(self) -> None:
        history = list(self.random.choice(self._histories)) if self._histories and self._chance(0.8) else []
        if history and self._chance(0.2):
            del history[self.random.randrange(len(history)) :]
        if not history or not isinstance(history[-1], str) or self._chance(0.1):
            history.append(self._text(1))
        tools = _TOOLS[self._chance(0.2)]
        prompt, messages = self._render(history, tools)
        agent, model = self.random.choice(("", "", "", "other")), self.random.choice(("m", "m", "m", "n"))
        outputs: list[LoggedOutput] = []
        for _ in range(self.random.choice((1, 1, 1, 2))):
            sampled, output = self._sample()
            outputs.append(output)
            self._histories.append([*history, sampled])
        self.calls.append(
            LoggedCall(
                Request(tuple(messages), tools, agent=agent),
                tuple(outputs),
                None if self._chance(self._misses) else as_ids(prompt),
                id=f"call-{len(self.calls)}",
                model=model,
            )
        )

    def _render(self, history: list[_Sampled | str], tools: ToolList) -> tuple[list[int], list[Message]]:
        prompt: list[int] = []
        if self._writes_tools:
            prompt += [40 + bool(tools)] * (1 + 2 * bool(tools))
        messages: list[Message] = []
        last_user = max(index for index, turn in enumerate(history) if isinstance(turn, str))
        for index, turn in enumerate(history):
            if isinstance(turn, str):
                messages.append(Message("user", turn))
                prompt += [20, *self._encode(turn, canonical=True), STOP]
                continue
            shown = turn.message
            if shown.reasoning_content and self._chance(0.3):
                shown = Message("assistant", shown.content)
            messages.append(shown)
            ids = list(turn.ids)
            drops = self._drops_reasoning and index < last_user and turn.message.reasoning_content
            if drops or self._chance(self._drifts):
                kept = shown.reasoning_content and not drops
                thought = [25, *self._encode(shown.reasoning_content, canonical=True), 26] if kept else []
                ids = [*thought, *self._encode(shown.content, canonical=True), STOP]
            prompt += [21, *ids] if ids[-1:] == [STOP] else [21, *ids, STOP]
        return [*prompt, 21], messages

    def _sample(self) -> tuple[_Sampled, LoggedOutput]:
        thought = self._text(1) if self._chance(0.3) else ""
        text = self._text(0)
        ids = [25, *self._encode(thought, canonical=False), 26] if thought else []
        ids += self._encode(text, canonical=False)
        reason = self.random.choice(("stop", "stop", "stop_string", "length", "cancelled"))
        if reason == "stop":
            ids.append(STOP)
        finish = "stop" if reason == "stop_string" else reason
        message = Message("assistant", text, reasoning_content=thought)
        logged: Ids | None = None if self._chance(self._misses) else as_ids(ids)
        logprobs = None if logged is None else np.full(len(ids), -0.5, np.float32)
        return _Sampled(message, tuple(ids)), LoggedOutput(message, logged, logprobs, finish)


def _at_line(call: LoggedCall, line: int) -> LoggedCall:
    return LoggedCall(call.request, call.outputs, call.prompt_ids, line=line, id=call.id, model=call.model)
