"""Memory per stored token beyond the text of its message: ids, logprobs and tree nodes."""

from __future__ import annotations

import gc
import tracemalloc

from benchmarks.measure import BenchmarkTable
from benchmarks.workloads import Workload, long_conversation, with_sub_agents
from branchline import Generation, Request, Session, Tree
from branchline.core.call import Delivery
from branchline.core.message import Message
from branchline.tree.tree import Delivered, TreeRecord, decode_record, encode_record

_TARGET_BYTES = 16


def table() -> BenchmarkTable:
    report = BenchmarkTable(
        "Memory of a tree",
        ["workload", "tokens", "nodes", "MB total", "MB text", "bytes a token", "target"],
        [
            "tracemalloc around a tree built from journal records; text: UTF-8 of contents and arguments,",
            "each once. Of the rest, 4 bytes are a token's id and 4 a sampled token's logprob.",
        ],
    )
    for workload in (long_conversation(200), with_sub_agents()):
        records = _records(workload)
        tree, total = _build_tree(records)
        tokens = tree.token_count
        text = sum(_text_bytes(node.message) for node in tree.nodes)
        per_token = (total - text) / tokens
        report.add_row(
            workload.name,
            f"{tokens:,}",
            f"{len(tree.nodes):,}",
            f"{total / 1e6:.2f}",
            f"{text / 1e6:.2f}",
            f"{per_token:.1f}",
            report.target_cell(f"≤ {_TARGET_BYTES}", per_token <= _TARGET_BYTES),
        )
    return report


def _records(workload: Workload) -> list[bytes]:
    """Returns the journal records of a workload."""
    session = Session("memory", workload.codec)
    tree = session.tree
    records: list[bytes] = []
    for step in workload.steps:
        turn = session.prepare(Request(step.messages))
        delta = tree.plan(turn, [Generation(step.ids, step.logprobs, message=step.output)])
        delivered = Delivered(tree.apply(delta).index, Delivery.DELIVERED)
        records += [encode_record(delta), encode_record(delivered)]
    return records


def _build_tree(records: list[bytes]) -> tuple[Tree, int]:
    """Returns a tree that shares no objects with others, and its bytes."""
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    tree = Tree()
    for data in records:
        record: TreeRecord = decode_record(data)
        tree.apply(record)
    del record, data
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return tree, after - before


def _text_bytes(message: Message) -> int:
    texts = [message.content, message.reasoning_content, *(call.arguments for call in message.tool_calls)]
    return sum(len(text.encode()) for text in texts)
