"""What needs no Ray: settings, and where gateways are placed. `make test-ray` runs the rest."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import branchline
from branchline.cli.main import main
from branchline.core.errors import InputError
from branchline.core.extras import install_line
from branchline.rollout.ray_cluster import ClusterNode, RayConfig, place_gateways
from branchline.rollout.session_result import EndCause

ROOT = Path(__file__).parents[2]


@given(count=st.none() | st.integers(1, 12), machines=st.lists(st.integers(1, 3), min_size=1, max_size=5))
def test_gateways_are_spread_evenly(count: int | None, machines: list[int]) -> None:
    """A machine may have several nodes, as on one machine in tests."""
    nodes = [
        ClusterNode(f"{machine}-{number}", f"10.0.0.{machine}")
        for machine, size in enumerate(machines)
        for number in range(size)
    ]
    placed = place_gateways(nodes, count, Path("/nowhere/gateways.json"))
    used = Counter(node.id for node in placed)
    assert len(placed) == (count or len(nodes))
    assert max(used.values()) - min(used[node.id] for node in nodes) <= 1


def test_a_resumed_run_places_each_gateway_where_its_journal_is(tmp_path: Path) -> None:
    file = tmp_path / "gateways.json"
    file.write_text(json.dumps({"nodes": ["10.0.0.2", "10.0.0.2", "10.0.0.1"]}))
    nodes = [ClusterNode(name, f"10.0.0.{number}") for number, name in enumerate("abc", 1)]
    assert "".join(node.id for node in place_gateways(nodes, None, file)) == "bba"
    assert "".join(node.id for node in place_gateways(nodes, 3, file)) == "bba"
    with pytest.raises(InputError, match=r"gateways: got 2, expected 3, as in .*gateways\.json"):
        place_gateways(nodes, 2, file)


def test_a_gateway_whose_machine_is_gone_starts_on_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "gateways.json"
    file.write_text(json.dumps({"nodes": ["10.0.0.9", "10.0.0.1"]}))
    nodes = [ClusterNode("a", "10.0.0.1"), ClusterNode("b", "10.0.0.2")]
    assert len(place_gateways(nodes, None, file)) == 2
    assert "node 10.0.0.9 is gone, with the journal of gateway 0" in caplog.text


def test_settings_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="gateways: got 0, expected 1 or more"):
        RayConfig(tmp_path, gateways=0)
    with pytest.raises(InputError, match="address: got 'ray://h:1', expected auto or HOST:PORT"):
        RayConfig(tmp_path, address="ray://h:1")


def test_without_ray_the_error_names_the_pip_command(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from pathlib import Path\n"
        "from branchline.rollout.ray_cluster import RayCluster, RayConfig\n"
        "try: RayCluster(None, RayConfig(Path('.')))\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"ray is not installed: {install_line('ray')}\n"


def test_the_guide_names_only_options_and_causes_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "guides" / "scaling.md").read_text()
    options: set[str] = set()
    for command in ("run", "serve"):
        assert main([command, "--help-all"]) == 0
        options |= set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", text)) <= options
    assert EndCause.NODE_LOST in text
    for name in ("RayCluster", "RayConfig", "GatewayPool", "Rollout", "RolloutConfig"):
        assert name in text
        assert hasattr(branchline, name)
    targets = set(re.findall(r"`make ([\w-]+)`", text))
    assert targets <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
