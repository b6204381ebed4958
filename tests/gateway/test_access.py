"""What a request with a wrong key, or without one, is told."""

from __future__ import annotations

import pytest

from tests.gateway.harness import agent, run


@pytest.mark.parametrize("path", ["", "/tree", "/v1/models", "/v1/session"])
@pytest.mark.parametrize("key", ["", "sk-bl-wrong"])
def test_unknown_and_forbidden_sessions_are_answered_alike(path: str, key: str) -> None:
    async def test() -> None:
        async with agent("x", id="mine") as a:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            answers = [
                await a.http.get(f"{a.gateway.url}/sessions/{name}{path}", headers=headers)
                for name in ("mine", "none")
            ]
            assert [answer.status_code for answer in answers] == [403 if key else 401] * 2
            assert answers[0].text.replace("mine", "none") == answers[1].text
            unknown = await a.http.get(f"{a.gateway.url}/sessions/none{path}", headers=a.admin_headers)
            assert unknown.status_code == 404

    run(test)
