from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.engines.base import Engine
from branchline.engines.vllm import VllmEngine
from tests.engines.farm import farm
from tests.engines.model import PROMPT, collect, continuation, float32, ids_of, logprobs_of, params, run


@pytest.mark.parametrize("dies_after", range(9))
def test_a_call_of_a_dead_replica_goes_on_elsewhere_as_if_nothing_had_been(dies_after: int) -> None:
    async def main() -> None:
        async with farm(2) as (replicas, servers):
            servers[0].die_after = dies_after
            engine: Engine = replicas
            chunks = await collect(engine.generate(PROMPT, params(8), session="s"))
            ids, logprobs = continuation(PROMPT, 8)
            assert ids_of(chunks) == ids
            assert logprobs_of(chunks) == float32(logprobs)
            assert [chunk.finish for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
            if dies_after < 8:
                (rest,) = servers[1].bodies
                # What the server sent and we did not read before it died is sampled again.
                produced = len(rest["prompt"]) - len(PROMPT)
                assert produced <= dies_after
                assert rest["prompt"] == [*PROMPT, *ids[:produced]]
                assert rest["max_tokens"] == 8 - produced
                assert replicas.failing == ("0",)

    run(main())


@settings(max_examples=40, deadline=None)
@given(deaths=st.lists(st.integers(0, 6), min_size=1, max_size=4), per_event=st.integers(1, 3))
def test_any_number_of_deaths_loses_and_repeats_nothing(deaths: list[int], per_event: int) -> None:
    async def main() -> None:
        async with farm(len(deaths) + 1) as (replicas, servers):
            for server, death in zip(servers, deaths, strict=False):
                server.die_after, server.per_event = death, per_event
            chunks = await collect(replicas.generate(PROMPT, params(12)))
            assert ids_of(chunks) == continuation(PROMPT, 12)[0]
            assert len(logprobs_of(chunks)) == 12

    run(main())


def test_a_stop_id_that_was_handed_out_ends_a_call_even_if_its_replica_died() -> None:
    async def main() -> None:
        async with farm(2) as (replicas, servers):
            ids, _ = continuation(PROMPT, 3)

            class Forgetful(VllmEngine):
                """Ends every stream without saying that it ended."""

                async def generate(self, *args: Any, **more: Any) -> Any:
                    async for chunk in super().generate(*args, **more):
                        yield type(chunk)(chunk.ids, chunk.logprobs, 6)

            await replicas.remove("0")
            await replicas.remove("1")
            await replicas.add(Forgetful(servers[0].url))
            chunks = await collect(replicas.generate(PROMPT, params(9, stop_ids=(ids[-1],))))
            assert ids_of(chunks) == ids
            assert (chunks[-1].finish, chunks[-1].version) == ("stop", 6)
            chunks = await collect(replicas.generate(PROMPT, params(2)))
            assert (ids_of(chunks), chunks[-1].finish) == (ids[:2], "length")

    run(main())
