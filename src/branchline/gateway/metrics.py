"""What a gateway counts, for Prometheus: calls, tokens, times, what echoes needed, why trees fork."""

from __future__ import annotations

from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from branchline.runtime.call_record import CallRecord, Outcome, Phase
from branchline.runtime.managed_session import ManagedSession
from branchline.timelines.causes import classify_forks

_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5, 30, 120)


class GatewayMetrics:
    """The counters of one gateway."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        calls = Counter("branchline_calls", "Calls by how they ended.", ["outcome"], registry=self._registry)
        tokens = Counter(
            "branchline_tokens",
            "Tokens: of prompts, sampled, made by encoding text, reused from the tree.",
            ["kind"],
            registry=self._registry,
        )
        seconds = Histogram(
            "branchline_call_seconds",
            "Where calls spend their time.",
            ["phase"],
            buckets=_BUCKETS_S,
            registry=self._registry,
        )
        # Looked up once: finding a label costs more than counting.
        self._outcomes = {outcome: calls.labels(outcome) for outcome in get_args(Outcome)}
        kinds = ("prompt", "sampled", "encoded", "reused")
        found = [tokens.labels(kind) for kind in kinds]
        self._prompt_tokens, self._sampled_tokens, self._encoded_tokens, self._reused_tokens = found
        self._phases = {phase: seconds.labels(phase) for phase in get_args(Phase)}
        self._echoes = Counter(
            "branchline_echo_equivalences",
            "What was tolerated to recognise a reply.",
            ["reason"],
            registry=self._registry,
        )
        self._ambiguous = Counter(
            "branchline_ambiguous_echoes", "Echoes that fitted several replies.", registry=self._registry
        )
        self._forks = Counter(
            "branchline_forks", "Forks of ended sessions by cause.", ["cause"], registry=self._registry
        )
        self.in_flight = Gauge(
            "branchline_generations_in_flight", "Generations under way.", registry=self._registry
        )
        self.sessions = Gauge("branchline_sessions", "Sessions the gateway holds.", registry=self._registry)

    def record_call(self, record: CallRecord) -> None:
        """A call that is over, however it ended."""
        self._outcomes[record.outcome].inc()
        if record.result is None:
            return
        self._prompt_tokens.inc(record.result.prompt_tokens)
        self._sampled_tokens.inc(record.result.sampled_tokens)
        self._encoded_tokens.inc(record.result.encoded_tokens)
        self._reused_tokens.inc(record.result.reused_tokens)
        for phase, spent in record.phase_s.items():
            self._phases[phase].observe(spent)
        for equivalence in record.result.equivalences:
            self._echoes.labels(equivalence).inc()
        self._ambiguous.inc(record.result.ambiguous_match)

    def record_session_end(self, live: ManagedSession) -> None:
        """A session that ended: its forks are judged once, when nothing can change them any more."""
        tree = live.session.snapshot()
        for fork in classify_forks(tree).forks if tree.calls else ():
            self._forks.labels(fork.cause).inc()

    def render(self) -> bytes:
        return generate_latest(self._registry)
