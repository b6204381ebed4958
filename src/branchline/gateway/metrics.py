"""Prometheus metrics of a gateway: calls, tokens, times, tolerated differences, causes of forks."""

from __future__ import annotations

from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from branchline.gateway.logs import warn_unnamed_conversations
from branchline.runtime.call_record import CallRecord, Outcome
from branchline.runtime.managed_session import ManagedSession
from branchline.runtime.request_fields import COUNTED_FIELDS, PARTLY_APPLIED_FIELDS
from branchline.timelines.causes import classify_forks

_COUNTED_NAMES = (
    COUNTED_FIELDS | PARTLY_APPLIED_FIELDS | {"tools", "input", "text", "stream_options", "logprobs"}
)
"""Labels of fields that were not applied: clients choose other names, whose number must be limited."""
_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5, 30, 120)


class GatewayMetrics:
    """The metrics of one gateway."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._calls = Counter("branchline_calls", "Calls by outcome.", ["outcome"], registry=registry)
        for outcome in get_args(Outcome):
            self._calls.labels(outcome)  # shown as 0 before the first such call
        self._tokens = Counter(
            "branchline_tokens",
            "Tokens: of prompts, sampled, made by encoding text, reused from the tree.",
            ["kind"],
            registry=registry,
        )
        self._seconds = Histogram(
            "branchline_call_seconds",
            "Duration of the phases of a call.",
            ["phase"],
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self._equivalences = Counter(
            "branchline_echo_equivalences",
            "Differences tolerated to recognise an assistant message.",
            ["reason"],
            registry=registry,
        )
        self._ambiguous = Counter(
            "branchline_ambiguous_echoes",
            "Assistant messages that matched several recorded outputs.",
            registry=registry,
        )
        self._not_applied = Counter(
            "branchline_fields_not_applied",
            "Calls by the field of their request that was accepted and not applied.",
            ["field"],
            registry=registry,
        )
        self._forks = Counter(
            "branchline_forks", "Forks of ended sessions by cause.", ["cause"], registry=registry
        )
        self.in_flight = Gauge("branchline_generations_in_flight", "Running generations.", registry=registry)
        self.sessions = Gauge("branchline_sessions", "Sessions in memory.", registry=registry)

    def record_call(self, record: CallRecord) -> None:
        """Counts a finished call, whatever its outcome."""
        self._calls.labels(record.outcome).inc()
        result = record.result
        if result is None:
            return
        self._tokens.labels("prompt").inc(result.prompt_tokens)
        self._tokens.labels("sampled").inc(result.sampled_tokens)
        self._tokens.labels("encoded").inc(result.encoded_tokens)
        self._tokens.labels("reused").inc(result.reused_tokens)
        for phase, spent in record.phase_s.items():
            self._seconds.labels(phase).observe(spent)
        for equivalence in result.equivalences:
            self._equivalences.labels(equivalence).inc()
        self._ambiguous.inc(result.ambiguous_match)
        for name in {name.partition(".")[0] for name in result.not_applied}:
            self._not_applied.labels(name if name in _COUNTED_NAMES else "other").inc()

    def record_session_end(self, managed: ManagedSession) -> None:
        """Counts the forks of a session, once, when no call can change them any more, and warns if its agents
        have no names."""
        tree = managed.session.snapshot()
        report = classify_forks(tree)
        warn_unnamed_conversations(managed.id, report)
        for fork in report.forks:
            self._forks.labels(fork.cause).inc()

    def render(self) -> bytes:
        return generate_latest(self._registry)
