"""Opening a session: what is refused at once, and not by its first call."""

from __future__ import annotations

from typing import Any

import pytest

from branchline.core.errors import InputError
from tests.gateway.harness import agent, run


def test_the_session_id_v1_is_refused_because_no_path_could_name_it() -> None:
    async def test() -> None:
        async with agent("x") as a:
            url = f"{a.gateway.url}/sessions"
            refused = await a.http.post(url, json={"id": "v1"}, headers=a.admin_headers)
            assert refused.status_code == 400
            assert "id: got 'v1', expected" in refused.json()["error"]["message"]

    run(test)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"sampling": {"temperature": "hot"}}, "sampling.temperature: got 'hot', expected a number"),
        (
            {"sampling_defaults": {"top_p": 7}},
            "sampling_defaults.top_p: got 7, expected a number from 0 to 1",
        ),
        ({"sampling": {"max_tokens": 0}}, "sampling.max_tokens: got 0, expected a whole number from 1"),
        ({"sampling": {"n": 0}}, "sampling.n: got 0, expected a whole number from 1"),
        ({"sampling": {"stop": [1]}}, "sampling.stop: got [1], expected a string or a list of strings"),
        (
            {"sampling": {"response_format": "json"}},
            "sampling.response_format: got 'json', expected an object",
        ),
    ],
)
def test_sampling_settings_are_checked_when_a_session_is_opened(
    options: dict[str, Any], problem: str
) -> None:
    async def test() -> None:
        async with agent("x") as a:
            refused = await a.http.post(f"{a.gateway.url}/sessions", json=options, headers=a.admin_headers)
            assert refused.status_code == 400
            assert problem in refused.json()["error"]["message"]
            with pytest.raises(InputError, match="sampling"):
                await a.gateway.session(**options)
            assert len(a.gateway.sessions) == 1

    run(test)
