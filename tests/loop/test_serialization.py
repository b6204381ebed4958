from __future__ import annotations

import datetime
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest

from branchline.core.errors import InputError
from branchline.loop.serialization import check_finite, copy_containers, to_plain_data


@dataclass
class Place:
    row: int


def test_what_is_data_in_other_shapes_becomes_plain_data() -> None:
    given = {
        "n": np.float32(0.5),
        "v": np.arange(2),
        "set": {3},
        "place": Place(1),
        "day": datetime.date(2020, 1, 2),
        "half": "a\ud800",
        1: MappingProxyType({"x": (1, 2)}),
    }
    assert to_plain_data(given, "extras") == {
        "n": 0.5,
        "v": [0, 1],
        "set": [3],
        "place": {"row": 1},
        "day": "2020-01-02",
        "half": "a\ufffd",
        "1": {"x": [1, 2]},
    }


@pytest.mark.parametrize("value", [object(), {(1, 2): 3}, 2**70, [[object()]]])
def test_what_is_no_data_is_refused_by_the_name_it_has(value: Any) -> None:
    with pytest.raises(InputError, match=r"^extras: .*, expected values that JSON can hold"):
        to_plain_data({"a": value} if not isinstance(value, dict) else value, "extras")


def test_what_is_nested_too_deep_is_refused() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InputError, match=r"^saved: .*expected values that JSON can hold"):
        to_plain_data(deep, "saved")


def test_a_plain_value_is_a_copy_that_can_be_written() -> None:
    given = {"a": [1]}
    made = to_plain_data(given, "saved")
    made["a"].append(2)
    assert given == {"a": [1]}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made)) == made


def test_a_copy_shares_no_container_and_keeps_what_is_no_data() -> None:
    connection = object()
    given = {"stock": ["apple", {"ripe": True}], "seen": {1}, "pair": ([1], 2), "at": connection}
    made = copy_containers(given)
    assert made == given
    assert made["at"] is connection
    made["stock"][1]["ripe"] = False
    made["stock"].append("pear")
    made["seen"].add(2)
    made["pair"][0].append(2)
    assert given == {"stock": ["apple", {"ripe": True}], "seen": {1}, "pair": ([1], 2), "at": connection}


@pytest.mark.parametrize(("given", "made"), [(None, None), (True, 1.0), (np.float32(0.5), 0.5), (2, 2.0)])
def test_a_score_is_a_number_or_nothing(given: Any, made: Any) -> None:
    assert check_finite(given, "score") == made
    assert type(check_finite(given, "score")) is type(made)


@pytest.mark.parametrize("given", [float("nan"), float("inf"), "much", [1]])
def test_a_score_that_cannot_be_trained_on_is_refused(given: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        check_finite(given, "score")
