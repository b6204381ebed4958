"""A client's limit that a session's own sampling must not lift."""

from __future__ import annotations

import pytest

from tests.gateway.harness import agent, run


@pytest.mark.parametrize(("most", "said"), [(3, "a l"), (9, "a long an")])
@pytest.mark.parametrize("limit", ["", "6"])
def test_max_tokens_header_limits_the_sessions_own_sampling(
    most: int, said: str, limit: str
) -> None:
    async def test() -> None:
        async with agent("a long answer", sampling={"max_tokens": most}) as a:
            headers = {"x-branchline-max-tokens": limit} if limit else {}
            assert await a.ask_text("p", headers=headers, max_tokens=6) == (said[:6] if limit else said)

    run(test)


@pytest.mark.parametrize("limit", ["0", "-1", "x", "1.5", "9" * 11])
def test_invalid_max_tokens_header_is_refused(limit: str) -> None:
    async def test() -> None:
        async with agent("x") as a:
            refused = await a.ask("p", headers={"x-branchline-max-tokens": limit})
            assert refused.status_code == 400
            assert "x-branchline-max-tokens: got" in refused.json()["error"]["message"]
            assert not a.engine.received_prompts

    run(test)
