"""Branchline records every LLM call an agent makes, as exact tokens, in one prefix tree per episode, and
turns that tree into training data in which every sampled token is trained exactly once, behind exactly the
context it was sampled in.

    session = Session("episode-1", codec)
    turn = session.prepare(Request.read({"messages": [...]}))
    session.commit(turn, Generation(ids, logprobs))
    samples = export_samples(session.tree).samples

The gateway and the agent loop are imported when they are first asked for.
"""

import importlib
import typing

from branchline.chat.toy import ToyCodec
from branchline.core.call import Call, Delivery, Equivalence, Generation, Request
from branchline.core.errors import (
    BranchlineError,
    CodecError,
    ExportError,
    InputError,
    JournalError,
    LogError,
    MessageError,
    MissingLogprobsError,
    TreeError,
)
from branchline.core.message import Media, Message, ToolCall
from branchline.core.reader import read_message, read_messages, write_message
from branchline.core.sample import ExportReport, Sample
from branchline.export.jsonl import read_jsonl, write_jsonl
from branchline.export.samples import Export, ExportPolicy, export_samples
from branchline.timelines.causes import Cause, Fork, ForkReport, classify_forks
from branchline.timelines.diagnosis import Diagnosis, diagnose
from branchline.timelines.links import MergePolicy
from branchline.timelines.log import LoggedCall, LoggedOutput, read_log
from branchline.timelines.merge import MergeResult, merge
from branchline.timelines.timeline import Timeline, timelines_of
from branchline.tree.journal import Journal
from branchline.tree.match import match_echo
from branchline.tree.session import Session
from branchline.tree.tree import Tree, Turn

if typing.TYPE_CHECKING:
    from branchline.gateway.process import tune_gc
    from branchline.gateway.server import Gateway
    from branchline.loop.agents import AgentContext, agent, check_tasks, run_agent
    from branchline.loop.http_model import HttpModel
    from branchline.loop.model import SessionModel
    from branchline.loop.output import LoopOutput, build_output
    from branchline.loop.registry import InteractionRegistry, ToolRegistry
    from branchline.loop.state import LoopState
    from branchline.loop.task import LoopLimits, Task
    from branchline.loop.timeouts import CancelToken
    from branchline.loop.tools.base import BaseTool, ToolResult
    from branchline.loop.tools.functions import tool
else:
    _LATE = {
        "BaseTool": "loop.tools.base",
        "CancelToken": "loop.timeouts",
        "Gateway": "gateway.server",
        "HttpModel": "loop.http_model",
        "InteractionRegistry": "loop.registry",
        "LoopLimits": "loop.task",
        "LoopOutput": "loop.output",
        "LoopState": "loop.state",
        "SessionModel": "loop.model",
        "AgentContext": "loop.agents",
        "Task": "loop.task",
        "ToolRegistry": "loop.registry",
        "ToolResult": "loop.tools.base",
        "agent": "loop.agents",
        "tune_gc": "gateway.process",
        "check_tasks": "loop.agents",
        "build_output": "loop.output",
        "run_agent": "loop.agents",
        "tool": "loop.tools.functions",
    }

    def __getattr__(name):
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"branchline.{_LATE[name]}"), name)
        globals()[name] = value
        return value

    def __dir__():
        return [*globals(), *_LATE]


__version__ = "0.1.0"

__all__ = [
    "AgentContext",
    "BaseTool",
    "BranchlineError",
    "Call",
    "CancelToken",
    "Cause",
    "CodecError",
    "Delivery",
    "Diagnosis",
    "Equivalence",
    "Export",
    "ExportError",
    "ExportPolicy",
    "ExportReport",
    "Fork",
    "ForkReport",
    "Gateway",
    "Generation",
    "HttpModel",
    "InputError",
    "InteractionRegistry",
    "Journal",
    "JournalError",
    "LogError",
    "LoggedCall",
    "LoggedOutput",
    "LoopLimits",
    "LoopOutput",
    "LoopState",
    "Media",
    "MergePolicy",
    "MergeResult",
    "Message",
    "MessageError",
    "MissingLogprobsError",
    "Request",
    "Sample",
    "Session",
    "SessionModel",
    "Task",
    "Timeline",
    "ToolCall",
    "ToolRegistry",
    "ToolResult",
    "ToyCodec",
    "Tree",
    "TreeError",
    "Turn",
    "__version__",
    "agent",
    "build_output",
    "check_tasks",
    "classify_forks",
    "diagnose",
    "export_samples",
    "match_echo",
    "merge",
    "read_jsonl",
    "read_log",
    "read_message",
    "read_messages",
    "run_agent",
    "timelines_of",
    "tool",
    "tune_gc",
    "write_jsonl",
    "write_message",
]
