"""Everything about one trajectory as one value that can be stored and resumed.

A loop changes its state one step at a time, after everything the step waits for has arrived. So a state that
was interrupted at any point, by a cancellation or an error, can be passed to `AgentLoop.run` again, in this
process or in another: no message is repeated and no finished tool call runs again.
"""

from __future__ import annotations

import secrets
from enum import StrEnum
from typing import Any, Literal

import msgspec

from branchline.core.errors import InputError
from branchline.core.message import Message, ToolCall
from branchline.loop.context.context_state import ContextState
from branchline.loop.persistence import Fault, encode_hook
from branchline.loop.task import Task
from branchline.loop.tools.base import ToolResult

STATE_FORMAT = 4
"""The format of encoded states; `decode` refuses any other."""
StateEncoding = Literal["msgpack", "json"]


class LoopPhase(StrEnum):
    """The next step of a loop; `agent_loop.py` defines the steps."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


class StopReason(StrEnum):
    """Why a trajectory ended."""

    STOP = "stop"
    """The model answered without a tool call, and the task has no interaction."""
    LENGTH = "length"
    """The same, but the answer was cut at its maximum length."""
    INTERACTION = "interaction"
    """The interaction ended the conversation."""
    ASSISTANT_TURNS = "max_assistant_turns"
    USER_TURNS = "max_user_turns"
    RESPONSE_LENGTH = "response_length"
    MODEL_LENGTH = "model_length"
    """The loop's limit, the gateway's, or the model's context length."""
    SESSION_CALLS = "session_calls"
    """The session has no calls left."""
    SESSION_TOKENS = "session_tokens"
    """The session has no tokens left."""
    WALL_CLOCK = "wall_clock"
    FINISH = "finish"
    """The model called the tool `finish`."""
    TOOL_UNAVAILABLE = "tool_unavailable"
    """A tool's server is gone."""
    INTERACTION_FAILED = "interaction_failed"
    """The interaction could not be started, or could not respond."""
    COMPACTION_FAILED = "compaction_failed"
    """The compaction policy raised, or its plan could not be applied."""


EXCLUDED_STOP_REASONS = (
    StopReason.TOOL_UNAVAILABLE,
    StopReason.INTERACTION_FAILED,
    StopReason.COMPACTION_FAILED,
)
"""Failures outside the model; trajectories that end with them are not training data."""


class TurnRecord(msgspec.Struct, frozen=True):
    """An interaction's response to one assistant turn."""

    turn: int
    content: str
    is_last: bool
    score: float | None = None
    extras: dict[str, Any] = {}


class AnswerTokens(msgspec.Struct, frozen=True):
    """The length of one assistant turn, by which its tokens are found in the samples."""

    call_id: str
    prompt_tokens: int
    tokens: int


class LoopMetrics(msgspec.Struct):
    """Seconds spent, interrupted generations, and whether the context became too long."""

    generate_s: float = 0.0
    tool_s: float = 0.0
    interact_s: float = 0.0
    num_preempted: int = 0
    """How often the engine interrupted a generation and continued it."""
    num_cancelled: int = 0
    """How often a generation was cancelled."""
    context_length_exceeded: bool = False
    """Whether the agent `state` ended because its prompt left no room for an answer."""


class LoopState(msgspec.Struct, kw_only=True):
    """One trajectory. Only its loop or its agent writes to it."""

    trajectory: str
    task: Task
    phase: LoopPhase = LoopPhase.PENDING
    messages: list[Message]
    """The conversation so far."""
    assistant_turns: int = 0
    user_turns: int = 0
    pending_calls: list[ToolCall] = []
    """Tool calls of the last answer whose results are not in `messages` yet."""
    pending_results: dict[int, ToolResult] = {}
    """Results of the pending calls that have finished, by index."""
    started_calls: list[int] = []
    """Pending calls that were started and have no result; they run again when the loop is resumed."""
    pending_response: TurnRecord | None = None
    """The interaction's response that is not in `messages` yet."""
    tool_results: list[ToolResult] = []
    turn_records: list[TurnRecord] = []
    final_rewards: dict[str, float] = {}
    """What each tool's `calc_reward` returned, by name."""
    score: float | None = None
    """What the interaction's `score` returned."""
    tool_states: dict[str, Any] = {}
    """What each tool's `save` returned, by name; written when a run ends before the trajectory does."""
    interaction_states: dict[str, Any] = {}
    """The same for the interaction."""
    faults: list[Fault] = []
    """Failures outside the conversation: scoring, releasing, saving."""
    metrics: LoopMetrics = msgspec.field(default_factory=LoopMetrics)
    call_name: str = ""
    """The name of the call that is running; the same name resumes it."""
    call_ids: list[str] = []
    """Calls that were answered completely."""
    abandoned_calls: list[str] = []
    """Names of cancelled calls that could not be resumed, because the conversation was another one."""
    answers: list[AnswerTokens] = []
    """The answers in `messages`, in order."""
    session_id: str = ""
    """The session that holds the calls."""
    session_url: str = ""
    """The address of that session's model API; empty for a session in the process of the loop."""
    first_prompt_tokens: int = 0
    """The length of the first prompt, if a limit needs it."""
    tokens: int = 0
    """The length of the last call, or of the next prompt if a limit needs it."""
    context: ContextState | None = None
    """Edits of the context, notes and documents of the agent `state`; `messages` is then the full history,
    of which the model is shown a view."""
    penalty: float | None = None
    """Replaces the reward: the prompt became too long for the model."""
    is_cancelled: bool = False
    is_scored: bool = False
    """Whether the final rewards have been computed."""
    is_reported: bool = False
    """Whether the session has the rewards and the end of the trajectory."""
    is_agent_running: bool = False
    """Whether a custom agent has started and not returned; the end of a loop inside it is not the end."""
    stop_reason: StopReason | None = None
    """Why the trajectory ended; while the interaction scores a last answer, why that is the last."""
    stop_detail: str = ""
    """The figures of the limit that ended it."""
    elapsed_s: float = 0.0
    format: int = STATE_FORMAT

    @classmethod
    def begin(cls, task: Task, trajectory: str = "") -> LoopState:
        """The state of a new trajectory. The default name is unique and starts with the task's id."""
        if not trajectory:
            trajectory = (f"{task.id}-" if task.id else "") + secrets.token_hex(8)
        return cls(trajectory=trajectory, task=task, messages=list(task.messages))

    @property
    def is_finished(self) -> bool:
        """Whether the loop has ended and its custom agent, if it has one, has returned."""
        return self.is_loop_finished and not self.is_agent_running

    @property
    def is_loop_finished(self) -> bool:
        """Whether a loop has nothing left to do."""
        return self.phase is LoopPhase.TERMINATED and self.is_scored

    @property
    def is_excluded(self) -> bool:
        """Whether the trajectory is not training data: a failure outside the model ended it."""
        return self.stop_reason in EXCLUDED_STOP_REASONS

    @property
    def turn_scores(self) -> list[float]:
        return [record.score for record in self.turn_records if record.score is not None]

    @property
    def tool_rewards(self) -> list[float]:
        return [result.reward for result in self.tool_results if result.reward is not None]

    @property
    def reward_score(self) -> float | None:
        """The penalty, else the interaction's score, else the sum of the final tool rewards, else None.

        None if a reward could not be computed: the remaining ones are not the reward.
        """
        if self.penalty is not None:
            return self.penalty
        if any(fault.is_reward_failure for fault in self.faults):
            return None
        if self.score is not None:
            return self.score
        return sum(self.final_rewards.values()) if self.final_rewards else None

    @property
    def num_turns(self) -> int:
        """Turns of both sides; the prompt counts as one."""
        return self.assistant_turns + self.user_turns + 1

    def add_fault(self, fault: Fault | None) -> None:
        """Adds a fault unless an equal one is listed."""
        if fault is not None and fault not in self.faults:
            self.faults.append(fault)

    def flush_partial(self) -> None:
        """Keeps finished results and a scored response of a step that is abandoned; `messages` stays."""
        self.tool_results += [result for _, result in sorted(self.pending_results.items())]
        self.pending_calls, self.pending_results, self.started_calls = [], {}, []
        if self.pending_response is not None:
            self.turn_records.append(self.pending_response)
            self.pending_response = None

    def encode(self, encoding: StateEncoding = "msgpack") -> bytes:
        """The state as bytes. Raises InputError if its task holds a value that JSON cannot hold."""
        encoder = _msgpack_encoder if encoding == "msgpack" else _json_encoder
        try:
            return encoder.encode(self)
        except (InputError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InputError(f"state: {error}, expected values that JSON can hold") from error

    @classmethod
    def decode(cls, data: bytes) -> LoopState:
        """A state from either encoding. Raises InputError for other data and other formats."""
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
