"""docs/operations.md has every limit with its option and its default."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from branchline.cli.main import parse_options
from branchline.gateway.config import GatewayConfig

OPERATIONS = (Path(__file__).parents[1] / "docs" / "operations.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| (?:`(--[\w-]+)`)? ?\| (\S+) \|", re.MULTILINE)
NOT_LIMITS = {"admin_key", "auth", "public_url", "image_urls", "explain_forks", "ignore_unknown_fields"}


def test_the_table_has_every_limit_with_its_default() -> None:
    shown = {name: default for name, _, default in ROW.findall(OPERATIONS) if hasattr(GatewayConfig, name)}
    defaults = {
        field.name: "none" if field.default is None else f"{field.default:.10g}"
        for field in fields(GatewayConfig)
        if field.name not in NOT_LIMITS
    }
    assert shown == defaults


def test_the_options_of_the_table_exist_and_have_the_same_default() -> None:
    parsed = parse_options("serve").gateway
    for name, option, _ in ROW.findall(OPERATIONS):
        if option and hasattr(GatewayConfig, name):
            assert option == "--" + name.replace("_", "-")
            assert getattr(parsed, name) == getattr(GatewayConfig, name), name


def test_every_limit_that_is_an_option_is_in_the_table() -> None:
    options = {option for _, option, _ in ROW.findall(OPERATIONS)}
    for field in fields(GatewayConfig):
        if field.name not in NOT_LIMITS:
            assert "--" + field.name.replace("_", "-") in options
