"""What a gateway counts, for Prometheus: calls, tokens, times, what echoes needed, why trees fork."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from branchline.gateway.calls import Done, Times
from branchline.gateway.live import LiveSession
from branchline.timelines.causes import judge

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5, 30, 120)


class Metrics:
    """The counters of one gateway."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._calls = Counter(
            "branchline_calls", "Calls by how they ended.", ["outcome"], registry=self._registry
        )
        self._tokens = Counter(
            "branchline_tokens",
            "Tokens: of prompts, sampled, made by encoding text, reused from the tree.",
            ["kind"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "branchline_call_seconds",
            "Where calls spend their time.",
            ["phase"],
            buckets=_SECONDS,
            registry=self._registry,
        )
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

    def note_call(self, done: Done, times: Times) -> None:
        """A call that is in the tree."""
        call = done.call
        self._calls.labels("ok").inc()
        self._tokens.labels("prompt").inc(call.prompt_tokens)
        self._tokens.labels("sampled").inc(sum(len(answer.ids) for answer in done.answers))
        self._tokens.labels("encoded").inc(call.encoded_tokens)
        self._tokens.labels("reused").inc(max(0, call.prompt_tokens - call.encoded_tokens))
        for phase, spent in (
            ("prepare", times.prepare),
            ("generate", times.generate),
            ("commit", times.commit),
        ):
            self._seconds.labels(phase).observe(spent)
        for echo in call.echoes:
            self._echoes.labels(echo.equivalence).inc()
        self._ambiguous.inc(call.ambiguous_echo)

    def note_failure(self, outcome: str) -> None:
        """A call that is not: `refused`, `failed`, `cancelled`."""
        self._calls.labels(outcome).inc()

    def note_end(self, live: LiveSession) -> None:
        """A session that ended: its forks are judged once, when nothing can change them any more."""
        with live.session.reading() as tree:
            for fork in judge(tree).forks if tree.calls else ():
                self._forks.labels(fork.cause).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)
