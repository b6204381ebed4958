"""Branchline records every LLM call an agent makes, as exact tokens, in one prefix tree per episode, and
turns that tree into training data in which every sampled token is trained exactly once, in exactly the
context it was sampled in.

    session = Session("episode-1", codec)
    turn = session.prepare(Request.read({"messages": [...]}))
    session.commit(turn, Generation(ids, logprobs))
    samples = export_samples(session.tree).samples

The names here are those most programs need; everything else is imported from its module. A name is imported
when it is first used, so `import branchline` needs none of the optional packages.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from branchline.chat.generic.codec import GenericCodec
    from branchline.chat.renderers_codec.codec import RenderersCodec
    from branchline.chat.toy import ToyCodec
    from branchline.client.async_client import AsyncClient
    from branchline.client.client import Client
    from branchline.core.call import Generation, Request
    from branchline.core.errors import BranchlineError
    from branchline.core.message import Message, ToolCall
    from branchline.core.sample import Sample
    from branchline.engines.base import SamplingParams
    from branchline.engines.hf.engine import HfEngine
    from branchline.engines.replicas import Replicas
    from branchline.engines.scripted import ScriptedEngine
    from branchline.engines.sglang import SglangEngine
    from branchline.engines.vllm import VllmEngine
    from branchline.export.batches import pad_rows, training_rows
    from branchline.export.credit import CreditPolicy
    from branchline.export.histories import History
    from branchline.export.jsonl import read_jsonl, write_jsonl
    from branchline.export.packing import pack_rows
    from branchline.export.parquet import read_parquet, write_parquet
    from branchline.export.samples import Export, ExportPolicy, SampleStream, export_samples
    from branchline.export.trajectory import Trajectory, TrajectoryGroup
    from branchline.export.tree_lines import samples_from_tree_lines
    from branchline.gateway.server import Gateway
    from branchline.loop.agents import agent, run_agent
    from branchline.loop.context.context_loop import ContextOptions
    from branchline.loop.http_model import HttpModel
    from branchline.loop.model import SessionModel
    from branchline.loop.output import LoopOutput
    from branchline.loop.task import LoopLimits, Task
    from branchline.loop.timeouts import CancelToken
    from branchline.loop.tools.base import BaseTool, ToolResult
    from branchline.loop.tools.functions import tool
    from branchline.rollout.config import RolloutConfig
    from branchline.rollout.gateway_pool import GatewayPool
    from branchline.rollout.judge import ChatEndpoint, RelativeJudge
    from branchline.rollout.judge_scores import Judgement
    from branchline.rollout.ray_cluster import RayCluster, RayConfig
    from branchline.rollout.rewards import VerifierCommand
    from branchline.rollout.rollout import Rollout
    from branchline.rollout.runners import CommandRunner, FunctionRunner, LoopRunner, RemoteRunner
    from branchline.rollout.session_result import SessionResult
    from branchline.rollout.sinks import JsonlSink, MemorySink, ParquetSink
    from branchline.rollout.stats import RolloutStats
    from branchline.rollout.tasks import read_tasks
    from branchline.rollout.transfer_queue import TransferQueueSink
    from branchline.runtime.compaction import Compaction, DropLeastImportant, DropOldest, Summarize
    from branchline.runtime.session_snapshot import SessionSnapshot
    from branchline.timelines.causes import classify_forks
    from branchline.timelines.links import MergePolicy
    from branchline.timelines.log import group_by_session, read_log
    from branchline.timelines.merge import merge
    from branchline.timelines.timeline import Timeline, timelines_of
    from branchline.train.config import TrainerConfig, UpdateConfig
    from branchline.train.trainer import Trainer
    from branchline.tree.journal import Journal
    from branchline.tree.journal_repair import check_journal, repair_journal
    from branchline.tree.session import Session
    from branchline.tree.tree import Tree

_MODULE_OF = {
    # sessions
    "Generation": "core.call",
    "Journal": "tree.journal",
    "Message": "core.message",
    "Request": "core.call",
    "Session": "tree.session",
    "Timeline": "timelines.timeline",
    "ToolCall": "core.message",
    "Tree": "tree.tree",
    "check_journal": "tree.journal_repair",
    "repair_journal": "tree.journal_repair",
    "timelines_of": "timelines.timeline",
    # codecs
    "GenericCodec": "chat.generic.codec",
    "RenderersCodec": "chat.renderers_codec.codec",
    "ToyCodec": "chat.toy",
    # engines
    "HfEngine": "engines.hf.engine",
    "Replicas": "engines.replicas",
    "SamplingParams": "engines.base",
    "ScriptedEngine": "engines.scripted",
    "SglangEngine": "engines.sglang",
    "VllmEngine": "engines.vllm",
    # gateway
    "AsyncClient": "client.async_client",
    "Client": "client.client",
    "Gateway": "gateway.server",
    "SessionSnapshot": "runtime.session_snapshot",
    # agent loop
    "BaseTool": "loop.tools.base",
    "CancelToken": "loop.timeouts",
    "Compaction": "runtime.compaction",
    "ContextOptions": "loop.context.context_loop",
    "DropLeastImportant": "runtime.compaction",
    "DropOldest": "runtime.compaction",
    "HttpModel": "loop.http_model",
    "LoopLimits": "loop.task",
    "LoopOutput": "loop.output",
    "SessionModel": "loop.model",
    "Summarize": "runtime.compaction",
    "Task": "loop.task",
    "ToolResult": "loop.tools.base",
    "agent": "loop.agents",
    "run_agent": "loop.agents",
    "tool": "loop.tools.functions",
    # trajectories and batches
    "CreditPolicy": "export.credit",
    "History": "export.histories",
    "Trajectory": "export.trajectory",
    "TrajectoryGroup": "export.trajectory",
    "pack_rows": "export.packing",
    "pad_rows": "export.batches",
    "training_rows": "export.batches",
    # samples and logs
    "Export": "export.samples",
    "ExportPolicy": "export.samples",
    "Sample": "core.sample",
    "SampleStream": "export.samples",
    "MergePolicy": "timelines.links",
    "classify_forks": "timelines.causes",
    "export_samples": "export.samples",
    "group_by_session": "timelines.log",
    "merge": "timelines.merge",
    "read_jsonl": "export.jsonl",
    "read_log": "timelines.log",
    "read_parquet": "export.parquet",
    "samples_from_tree_lines": "export.tree_lines",
    "write_jsonl": "export.jsonl",
    "write_parquet": "export.parquet",
    # rollouts
    "ChatEndpoint": "rollout.judge",
    "CommandRunner": "rollout.runners",
    "FunctionRunner": "rollout.runners",
    "GatewayPool": "rollout.gateway_pool",
    "JsonlSink": "rollout.sinks",
    "Judgement": "rollout.judge_scores",
    "LoopRunner": "rollout.runners",
    "MemorySink": "rollout.sinks",
    "ParquetSink": "rollout.sinks",
    "RayCluster": "rollout.ray_cluster",
    "RayConfig": "rollout.ray_cluster",
    "RelativeJudge": "rollout.judge",
    "RemoteRunner": "rollout.runners",
    "Rollout": "rollout.rollout",
    "RolloutConfig": "rollout.config",
    "RolloutStats": "rollout.stats",
    "SessionResult": "rollout.session_result",
    "TransferQueueSink": "rollout.transfer_queue",
    "VerifierCommand": "rollout.rewards",
    "read_tasks": "rollout.tasks",
    # training
    "Trainer": "train.trainer",
    "TrainerConfig": "train.config",
    "UpdateConfig": "train.config",
    # errors
    "BranchlineError": "core.errors",
}

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "BaseTool",
    "BranchlineError",
    "CancelToken",
    "ChatEndpoint",
    "Client",
    "CommandRunner",
    "Compaction",
    "ContextOptions",
    "CreditPolicy",
    "DropLeastImportant",
    "DropOldest",
    "Export",
    "ExportPolicy",
    "FunctionRunner",
    "Gateway",
    "GatewayPool",
    "Generation",
    "GenericCodec",
    "HfEngine",
    "History",
    "HttpModel",
    "Journal",
    "JsonlSink",
    "Judgement",
    "LoopLimits",
    "LoopOutput",
    "LoopRunner",
    "MemorySink",
    "MergePolicy",
    "Message",
    "ParquetSink",
    "RayCluster",
    "RayConfig",
    "RelativeJudge",
    "RemoteRunner",
    "RenderersCodec",
    "Replicas",
    "Request",
    "Rollout",
    "RolloutConfig",
    "RolloutStats",
    "Sample",
    "SampleStream",
    "SamplingParams",
    "ScriptedEngine",
    "Session",
    "SessionModel",
    "SessionResult",
    "SessionSnapshot",
    "SglangEngine",
    "Summarize",
    "Task",
    "Timeline",
    "ToolCall",
    "ToolResult",
    "ToyCodec",
    "Trainer",
    "TrainerConfig",
    "Trajectory",
    "TrajectoryGroup",
    "TransferQueueSink",
    "Tree",
    "UpdateConfig",
    "VerifierCommand",
    "VllmEngine",
    "__version__",
    "agent",
    "check_journal",
    "classify_forks",
    "export_samples",
    "group_by_session",
    "merge",
    "pack_rows",
    "pad_rows",
    "read_jsonl",
    "read_log",
    "read_parquet",
    "read_tasks",
    "repair_journal",
    "run_agent",
    "samples_from_tree_lines",
    "timelines_of",
    "tool",
    "training_rows",
    "write_jsonl",
    "write_parquet",
]


if not typing.TYPE_CHECKING:  # a checker would take any name for defined

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with importlib.import_module("branchline.core.extras").requires_extra():
            value = getattr(importlib.import_module(f"branchline.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return [*globals(), *_MODULE_OF]
