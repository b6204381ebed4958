"""Growth of fork classification and of the export: time for 2N calls compared with N."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.measure import BenchmarkTable, best_cpu_s
from branchline import Generation, Message, Request, Session, ToyCodec, Tree, classify_forks
from branchline.core.message import ToolCall
from branchline.export.samples import ExportPolicy, export_samples

_ROOTS, _FORKS = 1_200, 1_600
_MAX_RATIO = 3.0
"""Linear growth gives 2; the rest is for caches that no longer fit, and for noise."""
_POLICY = ExportPolicy(include_missing_logprobs=True, max_samples=50)


def table() -> BenchmarkTable:
    report = BenchmarkTable(
        "Fork causes and export of large sessions",
        ["session", "calls", "forks", "causes CPU ms", "ratio to half", "50 samples CPU ms", "ratio to half"],
        [f"Linear growth is a ratio of 2; the target is at most {_MAX_RATIO:g}."],
    )
    workloads: list[tuple[str, int, Callable[[int], Tree]]] = [
        ("one root per call", _ROOTS, roots),
        ("a fork at every turn", _FORKS, forked_conversation),
        ("every turn edited afterwards", _FORKS, edited_conversation),
    ]
    for name, calls, build in workloads:
        half, full = build(calls // 2), build(calls)
        times = [_measure(tree) for tree in (half, full)]
        ratios = [full_s / half_s for half_s, full_s in zip(*times, strict=True)]
        forks = len(classify_forks(full).forks)
        report.add_row(
            name,
            len(full.calls),
            forks,
            f"{times[1][0] * 1e3:.0f}",
            f"{ratios[0]:.2f}",
            f"{times[1][1] * 1e3:.0f}",
            f"{ratios[1]:.2f}",
        )
        report.targets_met += [ratio <= _MAX_RATIO for ratio in ratios]
    return report


def _measure(tree: Tree) -> tuple[float, float]:
    causes_s = best_cpu_s(lambda: classify_forks(tree))[0]
    export_s = best_cpu_s(lambda: export_samples(tree, _POLICY))[0]
    return causes_s, export_s


def roots(calls: int) -> Tree:
    """Conversations that share nothing, each with a tool call."""
    session = Session("roots", ToyCodec.chatml())
    for index in range(calls):
        task = f"Task {index}: read the file {index} and describe what it does. " * 6
        _commit(session, [Message("user", task)], index)
    return session.tree


def forked_conversation(calls: int) -> Tree:
    """A conversation in which every message is sent in two versions; the second one continues."""
    session = Session("forks", ToyCodec.chatml())
    messages = [Message("system", "You are a careful assistant.")]
    for index in range(calls // 2):
        for version in ("first", "second"):
            user = Message("user", f"The {version} version of message {index}")
            answer = _commit(session, [*messages, user], 2 * index)
        messages += [user, answer]
        if len(messages) > 80:
            messages = messages[:1]
    return session.tree


def edited_conversation(calls: int) -> Tree:
    """A conversation, and then a call for each of its messages in another version."""
    session = Session("edits", ToyCodec.chatml())
    messages: list[Message] = []
    for index in range(calls // 2):
        messages.append(Message("user", f"Message {index}"))
        messages.append(_commit(session, messages, index))
    for index in range(calls // 2):
        edited = Message("user", f"Another message {index}")
        _commit(session, [*messages[: 2 * index], edited], index)
    return session.tree


def _commit(session: Session, messages: list[Message], index: int) -> Message:
    turn = session.prepare(Request(tuple(messages)))
    made = (ToolCall("read", f'{{"path": "file {index}", "why": "it is asked for in message {index}"}}'),)
    answer = Message("assistant", f"I will read file {index}, because it is asked for.", tool_calls=made)
    session.commit(turn, Generation(session.codec.encode_reply(answer), message=answer))
    return answer
