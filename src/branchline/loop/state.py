"""Everything that is known of one trajectory, as one value that can be written down and gone on from.

A loop changes its state in one step at a time, and only after whatever the step waited for is there. So a
state that was left at any moment, by a cancel or by an error, is one that `AgentLoop.run` goes on from, in
this process or in another: nothing is said twice, and no finished tool call runs again.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal

import msgspec

from branchline.core.errors import InputError
from branchline.core.fields import clean_values
from branchline.core.message import Message, ToolCall
from branchline.core.reader import read_messages
from branchline.gateway.protocols.base import SAMPLING
from branchline.loop.tools.truncate import Side, Unit

FORMAT = 1
"""Of written states; one that is not known is refused."""
Encoding = Literal["msgpack", "json"]


_MESSAGES = ("messages", "prompt")
_SAMPLING = (*SAMPLING, "stop", "parallel_tool_calls", "response_format")


class State(StrEnum):
    """Where a loop stands; `machine.py` says what happens there."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


class Ending(StrEnum):
    """Why a trajectory is over."""

    STOP = "stop"
    """The model answered and called no tool, and nobody was there to say more."""
    LENGTH = "length"
    """The same, but its answer was cut."""
    INTERACTION = "interaction"
    """Whoever it talked to ended it."""
    ASSISTANT_TURNS = "max_assistant_turns"
    USER_TURNS = "max_user_turns"
    RESPONSE_LENGTH = "response_length"
    MODEL_LENGTH = "model_length"
    WALL_CLOCK = "wall_clock"


class LoopLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When to stop, and how much of what; None is no limit."""

    max_assistant_turns: int | None = None
    max_user_turns: int | None = None
    """Answers to the model: the results of one turn's tool calls are one, a user's message is one."""
    max_parallel_calls: int = 8
    """Tool calls that run at once; further ones run after them."""
    tool_response_length: int | None = None
    """Of each tool result; what is longer is cut."""
    tool_response_unit: Unit = "tokens"
    tool_response_side: Side = "middle"
    tool_timeout_s: float | None = 60.0
    response_length: int | None = None
    """Tokens behind the first prompt: all that is sampled, and all that is said to the model in between."""
    model_length: int | None = None
    """Tokens of a prompt and its answer together."""
    max_new_tokens: int | None = None
    """Of one answer."""
    wall_clock_s: float | None = None
    """Of all runs together; what is half done when it is over is left."""

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            least = 0 if name in ("tool_response_length", "max_user_turns") else 1
            if isinstance(value, int | float) and (value <= 0 if name.endswith("_s") else value < least):
                what = "more than 0" if name.endswith("_s") else f"{least} or more"
                raise InputError(f"limits.{name}: got {value}, expected {what}, or null for no limit")

    @property
    def has_length(self) -> bool:
        """Whether prompts have to be counted before they are asked."""
        return self.response_length is not None or self.model_length is not None


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a data set: a prompt, and what the agent has to work on it with."""

    messages: tuple[Message, ...]
    agent_name: str = ""
    """Who works on it; none is `single_turn`."""
    id: str = ""
    tools: tuple[str, ...] | None = None
    """Names; None is all there are."""
    tool_arguments: dict[str, dict[str, Any]] = {}
    """What each tool's instance is created with."""
    interaction: str = ""
    """A name; none is nobody."""
    interaction_arguments: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    """As Chat Completions calls it: `temperature`, `top_p`, `seed`, `stop`, … How long an answer may be is
    a limit, and what the model is told of tools is their business."""
    template: dict[str, Any] = {}
    """Arguments of the chat template."""
    limits: LoopLimits | None = None
    """Its own, in place of everybody's."""
    extra: dict[str, Any] = {}
    """Whatever else the line says, for those who judge."""

    def __post_init__(self) -> None:
        for name in self.sampling:
            if name not in _SAMPLING:
                raise InputError(f"sampling: got {name!r}, expected any of {', '.join(_SAMPLING)}")

    @classmethod
    def read(cls, raw: object) -> Task:
        """From a line of a data set: messages as Chat Completions writes them, under `messages` or `prompt`.

        >>> task = Task.read({"prompt": [{"role": "user", "content": "2+2?"}], "answer": 4})
        >>> task.messages[0].text, task.extra
        ('2+2?', {'answer': 4})
        """
        if not isinstance(raw, Mapping):
            raise InputError(f"task: got {raw!r}, expected an object")
        where = next((name for name in _MESSAGES if name in raw), _MESSAGES[0])
        given = clean_values({name: value for name, value in raw.items() if name != where})
        known = {name: given.pop(name) for name in cls.__struct_fields__ if name in given}
        try:
            # Types and names of everything else; messages have their own reader.
            task = msgspec.convert({**known, "messages": ()}, cls)
        except msgspec.ValidationError as error:
            raise InputError(f"task: {error}") from error
        messages = read_messages(raw.get(where), where)
        return msgspec.structs.replace(task, messages=messages, extra={**task.extra, **given})


class ToolRecord(msgspec.Struct, frozen=True):
    """What became of one tool call."""

    tool: str
    turn: int
    """The assistant turn that made it, from 1."""
    message: Message
    """What the model is shown, cut to size."""
    reward: float | None = None
    extras: dict[str, Any] = {}
    seconds: float = 0.0
    error: str | None = None


class TurnRecord(msgspec.Struct, frozen=True):
    """What an interaction said to one assistant turn."""

    turn: int
    content: str
    is_last: bool
    score: float | None = None
    extras: dict[str, Any] = {}


class Metrics(msgspec.Struct):
    """Where the time went."""

    generate_s: float = 0.0
    tool_s: float = 0.0
    interact_s: float = 0.0
    num_preempted: int = 0
    """How often an answer was cut off while it was waited for."""


class LoopState(msgspec.Struct, kw_only=True):
    """One trajectory. Its loop is the only one that writes here."""

    trajectory: str
    task: Task
    state: State = State.PENDING
    messages: list[Message]
    """The conversation so far."""
    assistant_turns: int = 0
    user_turns: int = 0
    pending: list[ToolCall] = []
    """Calls of the last answer whose results the model was not told yet."""
    outcomes: dict[int, ToolRecord] = {}
    """Those of them that are over, by place."""
    response: TurnRecord | None = None
    """What the interaction said and the model was not told yet."""
    tool_records: list[ToolRecord] = []
    turn_records: list[TurnRecord] = []
    final_rewards: dict[str, float] = {}
    """What tools said at the end, by name."""
    score: float | None = None
    """What the interaction said of the whole."""
    tool_states: dict[str, Any] = {}
    """What tools remember, by name, where they say so; written when a trajectory is left."""
    partner_states: dict[str, Any] = {}
    """The same of its interaction."""
    metrics: Metrics = msgspec.field(default_factory=Metrics)
    call: str = ""
    """The name of the call that is asked now; asked again under it, it goes on from where it was left."""
    calls: list[str] = []
    """Calls that were answered in full."""
    first_tokens: int = 0
    """How long the first prompt is, where a limit has it counted."""
    tokens: int = 0
    """How long the conversation is: the last call, or the next prompt where a limit has it counted."""
    is_cancel: bool = False
    is_judged: bool = False
    """Whether the final rewards are there."""
    reason: Ending | None = None
    detail: str = ""
    """The figures behind a reason."""
    spent_s: float = 0.0
    format: int = FORMAT

    @classmethod
    def begin(cls, task: Task, trajectory: str = "") -> LoopState:
        """A trajectory that has not begun."""
        trajectory = trajectory or task.id or secrets.token_hex(8)
        return cls(trajectory=trajectory, task=task, messages=list(task.messages))

    @property
    def agent_name(self) -> str:
        return self.task.agent_name

    @property
    def is_over(self) -> bool:
        return self.state is State.TERMINATED and self.is_judged

    @property
    def turn_scores(self) -> list[float]:
        return [record.score for record in self.turn_records if record.score is not None]

    @property
    def tool_rewards(self) -> list[float]:
        return [record.reward for record in self.tool_records if record.reward is not None]

    @property
    def reward_score(self) -> float | None:
        """What the interaction says of the whole, else what the tools say at the end, together."""
        if self.score is not None:
            return self.score
        return sum(self.final_rewards.values()) if self.final_rewards else None

    @property
    def num_turns(self) -> int:
        """Of both sides, the prompt counted as one."""
        return self.assistant_turns + self.user_turns + 1

    def encode(self, encoding: Encoding = "msgpack") -> bytes:
        """The state as bytes. InputError if a tool or an interaction left something in it that is no data."""
        return (_msgpack if encoding == "msgpack" else _json).encode(self)

    @classmethod
    def decode(cls, data: bytes) -> LoopState:
        """A state from either encoding."""
        decoder = _from_json if data[:1] == b"{" else _from_msgpack
        try:
            state = decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(f"state: got {data[:40]!r}, expected an encoded LoopState: {error}") from error
        if state.format != FORMAT:
            raise InputError(f"state.format: got {state.format}, expected {FORMAT}")
        return state


def _plain(value: object) -> object:
    """Numbers of numpy and torch; whatever else tools put into extras, or save, cannot travel."""
    if isinstance(value, Mapping):
        return dict(value)
    plain = getattr(value, "tolist", None)
    if plain is None:
        raise InputError(
            f"state: got a {type(value).__name__} in extras or saved, expected values that JSON can hold"
        )
    return plain()


_msgpack = msgspec.msgpack.Encoder(enc_hook=_plain)
_json = msgspec.json.Encoder(enc_hook=_plain)
_from_msgpack = msgspec.msgpack.Decoder(LoopState)
_from_json = msgspec.json.Decoder(LoopState)
