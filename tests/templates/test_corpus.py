"""Random conversations on every template of the corpus, and the table of docs/templates.md.

`make test-templates` fetches the templates. The measurements of a template are shared by its tests.
"""

from __future__ import annotations

from functools import cache

import pytest

from branchline.doctor.template_audit import TemplateAudit, audit_template
from tests.templates.corpus import load_template_codec, played_names, template_names
from tests.templates.measure import measure_once
from tests.templates.table import PAGE, doctor_problem, reasons, render_page, row_cells

MIN_TEMPLATES = 60
NAMES = played_names()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not NAMES, reason="needs the templates: make test-templates"),
]
templates = pytest.mark.parametrize("name", NAMES)


@cache
def audit_once(name: str) -> TemplateAudit:
    return audit_template(load_template_codec(name))


@templates
def test_every_call_is_exact(name: str) -> None:
    measured = measure_once(name)
    assert measured.exact_calls == measured.calls


@templates
def test_no_prompt_is_corrupted(name: str) -> None:
    assert measure_once(name).corrupted == []


@templates
def test_no_fork_is_needless(name: str) -> None:
    assert measure_once(name).needless_forks == []


@templates
def test_the_doctor_expects_the_measured_forks(name: str) -> None:
    assert doctor_problem(measure_once(name), audit_once(name)) == ""


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(template_names())))
def test_a_template_with_arguments_for_thinking_is_played_with_reasoning(name: str) -> None:
    assert any("reasoning" in shape for shape in measure_once(name).shapes)


@templates
def test_a_template_without_calls_has_a_reason(name: str) -> None:
    assert measure_once(name).calls or reasons(measure_once(name), audit_once(name))


def test_the_page_has_a_row_for_every_template() -> None:
    rows = [row_cells(measure_once(name), audit_once(name)) for name in NAMES]
    PAGE.write_text(render_page(rows))
    assert len(rows) >= MIN_TEMPLATES
