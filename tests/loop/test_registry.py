from __future__ import annotations

from dataclasses import dataclass

import pytest

from branchline.core.errors import InputError
from branchline.loop.registry import Registry


@dataclass
class NamedItem:
    name: str


def test_things_are_found_by_name_in_the_order_they_came() -> None:
    names = Registry([NamedItem("b"), NamedItem("a")])
    late = names.add(NamedItem("c"))
    assert names.get("c") is late
    assert names.names == ("b", "a", "c")
    assert [thing.name for thing in names] == ["b", "a", "c"]
    assert len(names) == 3


@pytest.mark.parametrize("name", ["x", ["a"]])
def test_an_unknown_name_is_refused_with_the_field_and_what_there_is(name: str) -> None:
    with pytest.raises(InputError) as error:
        Registry([NamedItem("a"), NamedItem("b")]).get(name, "interaction")
    assert str(error.value) == f"interaction: got {name!r}, expected one of ['a', 'b']"


def test_a_name_stands_for_one_thing() -> None:
    with pytest.raises(InputError, match="'a' twice"):
        Registry([NamedItem("a"), NamedItem("a")])
