"""Merging edited timelines in one pass, compared with the pairwise rule."""

from __future__ import annotations

import json
import math
import time
from functools import partial
from random import Random
from typing import Any

import msgspec

from benchmarks.measure import BenchmarkTable, best_cpu_s, format_ms
from benchmarks.pairwise_merge import merge_pairwise, to_entries
from branchline import Message, Request, merge
from branchline.core.reader import read_message, read_messages
from branchline.timelines.log import LoggedCall, LoggedOutput

MESSAGES = 100
_SIZES = (128, 256, 512, 1024, 2048)
_CONTINUED_EVERY = 4
"""One of this many timelines continues another one and absorbs it."""

Raw = dict[str, Any]


def pairwise_table() -> BenchmarkTable:
    report = BenchmarkTable(
        f"Merging 512 edited timelines × {MESSAGES} messages, compared with the pairwise rule",
        ["history", "timelines ours", "theirs", "CPU ms ours", "reading", "pairwise", "ratio", "target"],
        [
            "Ours: merge(calls) and all merged timelines, from messages read before; reading makes the keys.",
            "A timeline is the common history with messages rewritten at random places: the more there are,",
            "the sooner the pairwise rule stops. One in four continues another. Texts have 1 KB, and each is",
            "a string object of its own, as a log's are.",
        ],
    )
    for edits in (1, 3):
        calls, read_s = _generate_log(512, edits=edits)
        timelines = to_entries(calls)
        ours, left = len(_merge(calls)), len(merge_pairwise(timelines))
        assert ours == left, f"ours leaves {ours} timelines, the pairwise rule {left}"
        ours_s, pairwise_s = best_cpu_s(partial(_merge, calls), partial(merge_pairwise, timelines))
        ratio = pairwise_s / ours_s
        report.add_row(
            f"{edits} edit{'s' if edits > 1 else ''} each",
            ours,
            left,
            format_ms(ours_s),
            format_ms(read_s),
            format_ms(pairwise_s),
            f"{ratio:,.0f}×",
            report.target_cell("≥ 100×", ratio >= 100) if edits == 1 else "",
        )
    return report


def growth_table() -> BenchmarkTable:
    report = BenchmarkTable(
        f"Merging, ours alone: timelines × {MESSAGES} messages",
        ["timelines", "left", "CPU ms", "µs a message", "reading, µs a message", "growth", "target"],
        ["Growth: the exponent of the time in the number of timelines, fitted over all five; 1 is linear."],
    )
    points: list[tuple[float, float]] = []
    for size in _SIZES:
        calls, read_s = _generate_log(size, edits=1)
        left = len(_merge(calls))
        spent = best_cpu_s(partial(_merge, calls), repeats=7 if size < 1024 else 4)[0]
        messages = sum(len(call.request.messages) + 1 for call in calls)
        points.append((math.log(size), math.log(spent)))
        is_last = size == _SIZES[-1]
        slope = _slope(points) if is_last else 0.0
        report.add_row(
            f"{size:,}",
            f"{left:,}",
            format_ms(spent),
            f"{spent / messages * 1e6:.2f}",
            f"{read_s / messages * 1e6:.2f}",
            f"n^{slope:.2f}" if is_last else "",
            report.target_cell("≤ n^1.1", slope <= 1.1) if is_last else "",
        )
    return report


def _merge(calls: list[LoggedCall]) -> list[tuple[list[Message], list[int]]]:
    return list(merge(calls).timelines())


def _slope(points: list[tuple[float, float]]) -> float:
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def _generate_log(size: int, *, edits: int) -> tuple[list[LoggedCall], float]:
    """Returns the shuffled calls of a log and the CPU seconds for reading their messages."""
    rng = Random(size)
    words = _MessageGenerator(rng)
    common = [words.message(position) for position in range(MESSAGES)]
    histories: list[tuple[list[Raw], Raw]] = []
    while len(histories) < size:
        history = common[:]
        for position in rng.sample(range(1, MESSAGES), edits):
            history[position] = words.message(position)
        output = words.message(MESSAGES)
        histories.append((history, output))
        if len(histories) % _CONTINUED_EVERY == 0 and len(histories) < size:
            continued = [*history, output, words.message(MESSAGES + 1)]
            histories.append((continued, words.message(MESSAGES + 2)))
    rng.shuffle(histories)
    calls: list[LoggedCall] = []
    read_s = 0.0
    for line, pair in enumerate(histories, start=1):
        raw_history, raw_output = msgspec.json.decode(msgspec.json.encode(pair))
        start = time.process_time()
        request, message = Request(read_messages(raw_history)), read_message(raw_output)
        _ = request.message_keys
        read_s += time.process_time() - start
        calls.append(LoggedCall(request, (LoggedOutput(message),), line=line))
    return calls, read_s


class _MessageGenerator:
    """Messages of about 1 KB: system, then user and tool alternating between replies, half with calls."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._count = 0

    def message(self, position: int) -> Raw:
        if position == 0:
            return {"role": "system", "content": self._text()}
        if position % 2 == 0:
            if position % 4 == 0:
                return {"role": "assistant", "content": self._text()}
            self._count += 1
            call = {"name": "work", "arguments": json.dumps({"n": self._count, "what": self._text(20)})}
            made = [{"id": f"call_{position}", "type": "function", "function": call}]
            return {"role": "assistant", "content": self._text(), "tool_calls": made}
        if position % 4 == 3:
            return {"role": "tool", "content": self._text(), "tool_call_id": f"call_{position - 1}"}
        return {"role": "user", "content": self._text()}

    def _text(self, words: int = 200) -> str:
        return " ".join(map(str, self._rng.choices(range(1000, 10000), k=words)))
