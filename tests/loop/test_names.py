from __future__ import annotations

from dataclasses import dataclass

import pytest

from branchline.core.errors import InputError
from branchline.loop.names import Names


@dataclass
class Thing:
    name: str


def test_things_are_found_by_name_in_the_order_they_came() -> None:
    names = Names([Thing("b"), Thing("a")])
    late = names.add(Thing("c"))
    assert names.get("c") is late
    assert names.names == ("b", "a", "c")
    assert [thing.name for thing in names] == ["b", "a", "c"]
    assert len(names) == 3


@pytest.mark.parametrize("name", ["x", ["a"]])
def test_an_unknown_name_is_refused_with_the_field_and_what_there_is(name: str) -> None:
    with pytest.raises(InputError) as error:
        Names([Thing("a"), Thing("b")]).get(name, "interaction")
    assert str(error.value) == f"interaction: got {name!r}, expected one of ['a', 'b']"


def test_a_name_stands_for_one_thing() -> None:
    with pytest.raises(InputError, match="'a' twice"):
        Names([Thing("a"), Thing("a")])
