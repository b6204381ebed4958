"""The metrics of a gateway."""

from __future__ import annotations

from branchline.core.errors import EngineError
from tests.gateway.harness import agent, run


def test_calls_tokens_times_equivalences_and_forks_are_counted() -> None:
    async def test() -> None:
        async with agent("A1 ", EngineError("down"), "A2", "A3") as a:
            await a.ask_text("p")
            assert (await a.ask("p", "A1", "x")).status_code == 502
            assert (await a.ask("p", n=0)).status_code == 400
            await a.ask_text("p", "A1", "x")
            await a.ask_text("p")
            url = f"{a.gateway.url}/sessions/{a.session.id}/finalize"
            await a.http.post(url, headers=a.control_headers)
            text = (await a.http.get(f"{a.gateway.url}/metrics")).text
            for line in (
                'branchline_calls_total{outcome="ok"} 3.0',
                'branchline_calls_total{outcome="failed"} 1.0',
                'branchline_calls_total{outcome="refused"} 1.0',
                'branchline_tokens_total{kind="sampled"} 7.0',
                'branchline_echo_equivalences_total{reason="trimmed_whitespace"} 1.0',
                'branchline_forks_total{cause="best_of_n"} 1.0',
                'branchline_call_seconds_count{phase="prepare"} 3.0',
                "branchline_generations_in_flight 0.0",
                "branchline_sessions 1.0",
            ):
                assert line in text, line

    run(test)
