"""Harmony (gpt-oss) through the gateway, over every protocol, whole and streamed."""

from __future__ import annotations

from pathlib import Path

import pytest

from branchline.chat.generic.codec import GenericCodec
from tests.chat.harmony import save_harmony
from tests.gateway.harmony_episode import PROTOCOL_CLIENTS, ProtocolClient, verify_episode


@pytest.mark.parametrize("exchange", PROTOCOL_CLIENTS)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("declares_stops", [True, False], ids=["declared", "template"])
def test_a_tool_cycle_keeps_all_sampled_ids(
    tmp_path: Path, exchange: ProtocolClient, streamed: bool, declares_stops: bool
) -> None:
    codec = GenericCodec.open(save_harmony(tmp_path, declares_stops=declares_stops))
    verify_episode(codec, exchange, streamed)
