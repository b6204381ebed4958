from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from branchline.core.errors import InputError
from branchline.core.message import Message
from branchline.loop.interactions.base import BaseInteraction, InteractionResponse
from branchline.loop.interactions.registry import InteractionRegistry
from tests.loop.clock_runner import run


class EchoInteraction(BaseInteraction):
    name = "parrot"

    async def respond(self, state: Any, messages: Sequence[Message]) -> InteractionResponse:
        return InteractionResponse(False, messages[-1].content * state["times"])


def test_only_respond_has_to_be_written() -> None:
    async def test() -> None:
        parrot = EchoInteraction()
        state, first = await parrot.start("t1", times=2)
        assert first is None
        assert await parrot.respond(state, [Message("assistant", "ha")]) == InteractionResponse(False, "haha")
        assert await parrot.score(state) is None
        await parrot.finalize(state)
        with pytest.raises(NotImplementedError, match=r"BaseInteraction\.respond"):
            await BaseInteraction().respond(state, [])

    run(test)


def test_a_sample_chooses_an_interaction_by_name() -> None:
    parrot = EchoInteraction()
    registry = InteractionRegistry([parrot])
    partner = registry.select("parrot", {"times": 3})
    assert (partner.interaction, partner.arguments) == (parrot, {"times": 3})
    assert registry.select("parrot").arguments == {}


def test_a_sample_that_asks_for_what_is_not_there_is_refused() -> None:
    registry = InteractionRegistry([EchoInteraction()])
    with pytest.raises(InputError, match=r"interaction: got 'x', expected one of \['parrot'\]"):
        registry.select("x")
    arguments: Any = [1]
    with pytest.raises(InputError, match=r"interaction_arguments: got \[1\], expected an object"):
        registry.select("parrot", arguments)


class SyncScoreInteraction(EchoInteraction):
    def score(self, state: Any) -> float | None:  # type: ignore[override]
        return 1.0


@pytest.mark.parametrize(
    ("thing", "why"),
    [
        (EchoInteraction, r"interaction: got the class EchoInteraction, expected an instance of it: EchoInteraction\(\)"),
        (BaseInteraction(), "interaction: got .*BaseInteraction.*, whose name is None"),
        (SyncScoreInteraction(), "interaction 'parrot': cannot wait for score, expected an `async def`"),
    ],
)
def test_what_could_not_be_used_is_refused_when_it_is_registered(thing: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        InteractionRegistry([thing])
