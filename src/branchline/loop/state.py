"""Everything that is known of one trajectory, as one value that can be written down and gone on from.

A loop changes its state in one step at a time, and only after whatever the step waited for is there. So a
state that was left at any moment, by a cancel or by an error, is one that `AgentLoop.run` goes on from, in
this process or in another: nothing is said twice, and no finished tool call runs again.
"""

from __future__ import annotations

import secrets
from enum import StrEnum
from typing import Any, Literal

import msgspec

from branchline.core.errors import InputError
from branchline.core.message import Message, ToolCall
from branchline.loop.faults import Fault

# Named here too: whoever has a state has its task and its limits.
from branchline.loop.limits import LoopLimits as LoopLimits
from branchline.loop.serialization import encode_hook
from branchline.loop.task import Task as Task

STATE_FORMAT = 2
"""Of written states; one that is not known is refused."""
StateEncoding = Literal["msgpack", "json"]


class LoopPhase(StrEnum):
    """Where a loop stands; `machine.py` says what happens there."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


class StopReason(StrEnum):
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
    """The loop's own limit, the gateway's, or what the model can hold."""
    SESSION_CALLS = "session_calls"
    """Its session may make no more calls."""
    SESSION_TOKENS = "session_tokens"
    """Its session may sample no more tokens."""
    WALL_CLOCK = "wall_clock"


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


class LoopMetrics(msgspec.Struct):
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
    phase: LoopPhase = LoopPhase.PENDING
    messages: list[Message]
    """The conversation so far."""
    assistant_turns: int = 0
    user_turns: int = 0
    pending_calls: list[ToolCall] = []
    """Calls of the last answer whose results the model was not told yet."""
    pending_results: dict[int, ToolRecord] = {}
    """Those of them that are over, by place."""
    pending_response: TurnRecord | None = None
    """What the interaction said and the model was not told yet."""
    tool_results: list[ToolRecord] = []
    turn_records: list[TurnRecord] = []
    final_rewards: dict[str, float] = {}
    """What tools said at the end, by name."""
    score: float | None = None
    """What the interaction said of the whole."""
    tool_states: dict[str, Any] = {}
    """What tools remember, by name, where they say so; written when a trajectory is left."""
    interaction_states: dict[str, Any] = {}
    """The same of its interaction."""
    faults: list[Fault] = []
    """What failed beside the conversation: judging, putting away, remembering."""
    metrics: LoopMetrics = msgspec.field(default_factory=LoopMetrics)
    call_name: str = ""
    """The name of the call that is asked now; asked again under it, it goes on from where it was left."""
    call_ids: list[str] = []
    """Calls that were answered in full."""
    first_prompt_tokens: int = 0
    """How long the first prompt is, where a limit has it counted."""
    tokens: int = 0
    """How long the conversation is: the last call, or the next prompt where a limit has it counted."""
    is_cancelled: bool = False
    is_scored: bool = False
    """Whether the final rewards are there."""
    is_agent_running: bool = False
    """Whether an agent of one's own has begun with it and has not returned: where a loop inside that agent
    ends, the trajectory goes on."""
    stop_reason: StopReason | None = None
    """Why it is over; while the interaction looks at a last answer, why that is the last."""
    stop_detail: str = ""
    """The figures behind a reason."""
    elapsed_s: float = 0.0
    format: int = STATE_FORMAT

    @classmethod
    def begin(cls, task: Task, trajectory: str = "") -> LoopState:
        """A trajectory that has not begun. Without a name it is called like its task, and like no other."""
        if not trajectory:
            trajectory = (f"{task.id}-" if task.id else "") + secrets.token_hex(8)
        return cls(trajectory=trajectory, task=task, messages=list(task.messages))

    @property
    def agent_name(self) -> str:
        return self.task.agent_name

    @property
    def is_finished(self) -> bool:
        """Whether nothing more happens to it: its loop has ended, and its agent, if it has one, returned."""
        return self.is_loop_finished and not self.is_agent_running

    @property
    def is_loop_finished(self) -> bool:
        """Whether a loop has nothing to do with it any more."""
        return self.phase is LoopPhase.TERMINATED and self.is_scored

    @property
    def turn_scores(self) -> list[float]:
        return [record.score for record in self.turn_records if record.score is not None]

    @property
    def tool_rewards(self) -> list[float]:
        return [record.reward for record in self.tool_results if record.reward is not None]

    @property
    def reward_score(self) -> float | None:
        """What the interaction says of the whole, else what the tools say at the end, together.

        None if somebody who judges failed to: what the others say is not the reward.
        """
        if any(fault.is_reward_failure for fault in self.faults):
            return None
        if self.score is not None:
            return self.score
        return sum(self.final_rewards.values()) if self.final_rewards else None

    @property
    def num_turns(self) -> int:
        """Of both sides, the prompt counted as one."""
        return self.assistant_turns + self.user_turns + 1

    def add_fault(self, fault: Fault | None) -> None:
        """Keeps a fault, each once however often it comes back."""
        if fault is not None and fault not in self.faults:
            self.faults.append(fault)

    def flush_partial(self) -> None:
        """Counts what is over though the model is not told of it any more: results, and a turn's score."""
        self.tool_results += [record for _, record in sorted(self.pending_results.items())]
        self.pending_calls, self.pending_results = [], {}
        if self.pending_response is not None:
            self.turn_records.append(self.pending_response)
            self.pending_response = None

    def encode(self, encoding: StateEncoding = "msgpack") -> bytes:
        """The state as bytes. InputError if its task holds something that is no data."""
        encoder = _msgpack_encoder if encoding == "msgpack" else _json_encoder
        try:
            return encoder.encode(self)
        except (InputError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InputError(f"state: {error}, expected values that JSON can hold") from error

    @classmethod
    def decode(cls, data: bytes) -> LoopState:
        """A state from either encoding."""
        decoder = _json_decoder if data[:1] == b"{" else _msgpack_decoder
        try:
            state = decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(f"state: got {data[:40]!r}, expected an encoded LoopState: {error}") from error
        if state.format != STATE_FORMAT:
            raise InputError(f"state.format: got {state.format}, expected {STATE_FORMAT}")
        return state


_msgpack_encoder = msgspec.msgpack.Encoder(enc_hook=encode_hook)
_json_encoder = msgspec.json.Encoder(enc_hook=encode_hook)
_msgpack_decoder = msgspec.msgpack.Decoder(LoopState)
_json_decoder = msgspec.json.Decoder(LoopState)
