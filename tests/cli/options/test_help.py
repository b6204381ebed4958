"""Help in two levels, from the docstrings of the fields; a field that cannot be an option is refused."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from branchline.cli.options.command import Command
from branchline.cli.options.parser import read_options
from branchline.cli.options.schema import OptionSchema
from branchline.core.option_fields import group, option
from tests.cli.options.plans import Limits, Plan, printed


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def test_the_first_level_has_what_most_people_need_and_its_first_sentence() -> None:
    text = printed(["--help"])
    assert text == printed(["-h", "--port", "x"])
    assert text.startswith("usage: branchline plan [options] SOURCE\n\nPlans.\n\noptions:\n")
    assert "  --text TEXT             A text (default: plain)\n" in text
    assert "There is more" not in text
    assert "--count" not in text
    assert "Details." not in text
    assert "17 more options: branchline plan --help-all" in text


def test_the_second_level_has_every_option_with_all_that_there_is_to_say() -> None:
    text = printed(["--help-all"])
    options = OptionSchema(Plan).options
    for each in options.values():
        assert each.flag in text
        assert " ".join(each.help.removesuffix(".").split()) in " ".join(text.split())
    for expected in (
        "A text. There is more to say about it (default: plain)",
        "  --no-auth               A switch that is on\n",
        "  --kind small|large      A choice (default: small)\n",
        "  --tags TEXT             Several texts (repeatable)\n",
        "  --retry NAME=N          Numbers by name (repeatable)\n",
        "limits:\n  --max-calls N           Calls of a session. More than that are refused (default: 10)\n",
        "(text) and a variable\n(BRANCHLINE_TEXT;",
        "Details.\n",
    ):
        assert expected in text
    assert "clock" not in text, "what only a program sets is no option"


def test_help_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (60, 80, 300):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert max(map(len, printed(["--help-all"]).splitlines())) <= max(columns, 100)


def test_options_of_one_name_are_refused() -> None:
    @dataclass(frozen=True)
    class Twice:
        max_calls: int = 1
        limits: Limits = group(Limits, "limits")

    @dataclass(frozen=True)
    class Reserved:
        config: str = ""

    @dataclass(frozen=True)
    class Shared:
        settings: Limits = group(Limits, "limits")
        count: int = option(1, name="settings")

    for wrong, problem in (
        (Twice, "two options are named max_calls"),
        (Reserved, "two options are named config"),
        (Shared, "'settings'. name a group and an option"),
    ):
        with pytest.raises(TypeError, match=problem):
            OptionSchema(wrong)


def test_a_field_of_another_type_is_refused() -> None:
    @dataclass(frozen=True)
    class Wrong:
        value: complex = 1j

    with pytest.raises(TypeError, match="no option can have the type"):
        read_options(Command("x", Wrong, "x:y", ""), [])
