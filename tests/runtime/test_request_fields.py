"""The guide lists every field of the tables, and engines support only fields that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from branchline import ScriptedEngine, SglangEngine, VllmEngine
from branchline.core.errors import MessageError
from branchline.engines.base import CONSTRAINT_FIELDS, SamplingParams
from branchline.engines.replicas import Replicas
from branchline.runtime.request_fields import (
    COUNTED_FIELDS,
    HINT_FIELDS,
    NEUTRAL_VALUES,
    PARTLY_APPLIED_FIELDS,
    SAMPLING_FIELDS,
    check_recordable,
    review_fields,
)
from branchline.runtime.sampling import drop_constraints, read_sampling_params

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "fields.md"
SECTIONS = {
    "Fields that every engine has": frozenset(SAMPLING_FIELDS),
    "Fields that change sampling": CONSTRAINT_FIELDS,
    "Fields that are counted": COUNTED_FIELDS | PARTLY_APPLIED_FIELDS - {"function_call"},
    "Hints": HINT_FIELDS,
    "Fields that are refused": frozenset(NEUTRAL_VALUES),
}


@pytest.mark.parametrize("title", SECTIONS)
def test_the_guide_lists_the_fields(title: str) -> None:
    section = GUIDE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    assert section, title
    assert not SECTIONS[title] - set(re.findall(r"`(\w+)`", section))


def test_engines_support_known_fields_and_replicas_what_all_of_them_do() -> None:
    vllm = VllmEngine("http://127.0.0.1:1")
    sglang = SglangEngine("http://127.0.0.1:2", logprob_kind="raw")
    assert vllm.supported_fields < CONSTRAINT_FIELDS
    assert sglang.supported_fields < CONSTRAINT_FIELDS
    assert Replicas([vllm, sglang]).supported_fields == vllm.supported_fields & sglang.supported_fields
    assert ScriptedEngine().supported_fields == frozenset()


def test_true_is_not_one_and_a_number_has_one_spelling() -> None:
    assert review_fields({"length_penalty": 1.0, "n": 1, "use_beam_search": False}, ignore_unknown=False) == (
        {},
        {},
    )
    for name, value in (("n", True), ("use_beam_search", 0), ("top_a", False)):
        with pytest.raises(MessageError, match=f"{name}: got {value}"):
            review_fields({name: value}, ignore_unknown=False)


def test_dropped_constraints_leave_the_defaults() -> None:
    fields = {
        "logit_bias": {"5": 1},
        "min_tokens": 2,
        "guided_regex": "a",
        "vllm_xargs": {"a": 1},
        "ignore_eos": True,
    }
    params = read_sampling_params(fields, "max_tokens")
    assert params.requested_fields == ("guided_regex", "ignore_eos", "logit_bias", "min_tokens", "vllm_xargs")
    assert drop_constraints(params, list(fields)) == SamplingParams(max_tokens=params.max_tokens)
    kept = drop_constraints(params, ["guided_regex", "vllm_xargs"])
    assert (kept.logit_bias, kept.min_tokens, kept.grammar, kept.extra) == ({5: 1.0}, 2, None, {})


@pytest.mark.parametrize("value", [2**70, [{"a": 2**70}]])
def test_a_value_that_the_journal_cannot_hold_is_refused_by_name(value: object) -> None:
    check_recordable({"temperature": 1.0, "requested": {"reasoning": {"effort": "low"}}})
    with pytest.raises(MessageError, match="reasoning: got "):
        check_recordable({"temperature": 1.0, "requested": {"verbosity": 1, "reasoning": value}})
    with pytest.raises(MessageError, match="grammar: got "):
        check_recordable({"grammar": {"type": "json_schema", "x": value}})
