"""Branchline records every LLM call an agent makes, as exact tokens, in one prefix tree per episode, and
turns that tree into training data in which every sampled token is trained exactly once, behind exactly the
context it was sampled in.

    session = Session("episode-1", codec)
    turn = session.prepare(Request.read({"messages": [...]}))
    session.commit(turn, Generation(ids, logprobs))
    samples = export_samples(session.tree).samples
"""

from branchline.chat.toy import ToyCodec
from branchline.core.call import Call, Delivery, Generation, Request
from branchline.core.echo import Equivalence, echo
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
from branchline.core.sample import Report, Sample
from branchline.export.jsonl import read_jsonl, write_jsonl
from branchline.export.samples import Export, ExportPolicy, export_samples
from branchline.loop.agents import agent
from branchline.timelines.causes import Cause, Fork, Judgement, judge
from branchline.timelines.diagnosis import Diagnosis, diagnose
from branchline.timelines.links import MergePolicy
from branchline.timelines.log import LoggedCall, LoggedOutput, read_log
from branchline.timelines.merge import Merged, merge
from branchline.timelines.timeline import Timeline, timelines_of
from branchline.tree.journal import Journal
from branchline.tree.session import Session
from branchline.tree.tree import Tree, Turn

__version__ = "0.1.0"

__all__ = [
    "BranchlineError",
    "Call",
    "Cause",
    "CodecError",
    "Delivery",
    "Diagnosis",
    "Equivalence",
    "Export",
    "ExportError",
    "ExportPolicy",
    "Fork",
    "Generation",
    "InputError",
    "Journal",
    "JournalError",
    "Judgement",
    "LogError",
    "LoggedCall",
    "LoggedOutput",
    "Media",
    "MergePolicy",
    "Merged",
    "Message",
    "MessageError",
    "MissingLogprobsError",
    "Report",
    "Request",
    "Sample",
    "Session",
    "Timeline",
    "ToolCall",
    "ToyCodec",
    "Tree",
    "TreeError",
    "Turn",
    "__version__",
    "agent",
    "diagnose",
    "echo",
    "export_samples",
    "judge",
    "merge",
    "read_jsonl",
    "read_log",
    "read_message",
    "read_messages",
    "timelines_of",
    "write_jsonl",
    "write_message",
]
