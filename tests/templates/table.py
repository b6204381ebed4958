"""The table of docs/templates.md: one row per template of the corpus."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from branchline.chat.base import RewriteReason
from branchline.doctor.replay_report import assess_safety
from branchline.doctor.template_audit import TemplateAudit
from tests.templates.measure import Measurement

PAGE = Path(__file__).resolve().parents[2] / "docs" / "templates.md"
HEAD = (
    "template",
    "exact calls",
    "corrupted prompts",
    "forks by cause",
    "needless forks",
    "tool calls",
    "reasoning",
    "replies",
    "doctor",
    "right",
    "why not",
)
_INTRODUCTION = """\
# Chat templates

`make test-templates` writes this page. It fetches the chat templates that llama.cpp, TRL and axolotl collect,
gives each a small tokenizer with the control tokens of its source, and plays random conversations on it: some
that only grow, with and without tools, some with everything agents do (retries, edits, compaction,
sub-agents), some with `history=verbatim`.

- **exact calls**: the output follows exactly the ids that the engine received.
- **corrupted prompts**: the prompt's text is not what jinja2 alone renders for the conversation, apart from
  whitespace and the style of JSON in sampled replies.
- **forks by cause**: prompts that do not keep the path as it was sampled. A fork is *needless* if the
  template shows the reply at which it forks as it was sampled, and everything before it: replies apart from
  whitespace, the style of JSON and the ids of calls, everything else exactly. Not counted as needless: a fork
  with a template that writes no stop token, and a necessary fork that begins at an earlier message than it
  must.
- **tool calls**, **reasoning**: the parsers that the template selects. **replies**: the kinds of replies that
  the template shows and the parsers read back; only these were played. Templates are rendered with their
  default arguments; those that think only with `enable_thinking=true` or a similar argument are played with
  it too, in a row of their own.
- **doctor**: the verdict of `branchline doctor`, and after which messages it expects forks. It is *right* if
  conversations that only grow forked after exactly these, if a template that it calls safe lost nothing (no
  refused call, no reply that no parser reads), if its verdict on a safe template says so where results of
  tools are left out of prompts, and if one that it calls unsafe lost something, or cannot express every kind
  of reply. The doctor plays short conversations with the same codec; the table compares them with long
  random ones.
"""


def fork_roles(audit: TemplateAudit) -> frozenset[str]:
    """Returns the roles of the messages after which the doctor expects prompts to fork."""
    roles = frozenset().union(*(finding.forks_after for finding in audit.findings))
    return roles & {"user", "tool"}


def measured_fork_roles(measured: Measurement) -> frozenset[str]:
    return frozenset(fork.follows for fork in measured.growing_forks)


def doctor_problem(measured: Measurement, audit: TemplateAudit) -> str:
    """Returns what the doctor got wrong, or an empty text."""
    expected, found = fork_roles(audit), measured_fork_roles(measured)
    if expected != found:
        return f"the doctor expects forks after {_roles(expected)}, measured after {_roles(found)}"
    verdict = assess_safety(audit, "template")
    safe = verdict.safe
    if safe and measured.drops_results and "results" not in verdict.advice:
        return "the doctor does not say that results of tools are left out"
    lost = bool(measured.corrupted or measured.unread_shapes or measured.refused_calls)
    if safe and lost:
        return "the doctor calls it safe"
    if not safe and not lost and _expresses_all(measured) and not _never_ends(measured):
        return "the doctor calls it unsafe"
    return ""


def _expresses_all(measured: Measurement) -> bool:
    """Whether replies can have text, calls, several calls, and text next to calls."""
    shapes = {shape.removeprefix("reasoning+") for shape in measured.shapes}
    return shapes >= {"text", "call", "calls", "text+call", "text+calls"}


def _never_ends(measured: Measurement) -> bool:
    """Whether forks show that the template writes no stop token after a reply."""
    return bool(measured.forks_by_reason[RewriteReason.NO_TERMINATOR])


def reasons(measured: Measurement, audit: TemplateAudit) -> list[str]:
    """Returns everything that does not hold for a template."""
    found = []
    if measured.exact_calls < measured.calls:
        found.append(f"{measured.calls - measured.exact_calls} calls are not exact")
    if measured.corrupted:
        found.append(f"corrupted: {measured.corrupted[0]}")
    if measured.refusals:
        found.append(f"refuses {measured.refused_calls} calls: {measured.refusals.most_common(1)[0][0]}")
    # What is refused with one call is refused with several.
    refused = next((shape for shape in ("call", "calls") if shape in measured.refused_shapes), "")
    if refused:
        found.append(f"refuses a reply with {refused}: {measured.refused_shapes[refused]}")
    if not measured.shapes:
        found.append("not played")
    if measured.unread_shapes:
        found.append(f"no parser reads {', '.join(measured.unread_shapes)}")
    if measured.drops_results:
        found.append("leaves out the results of tools")
    problem = doctor_problem(measured, audit)
    return [*found, problem] if problem else found


def row_cells(measured: Measurement, audit: TemplateAudit) -> tuple[str, ...]:
    """Returns a row of the table."""
    causes = ", ".join(f"{count} {cause}" for cause, count in sorted(measured.forks_by_reason.items()))
    verdict = "safe" if assess_safety(audit, "template").safe else "unsafe"
    expected = fork_roles(audit)
    return (
        measured.name,
        f"{measured.exact_calls} of {measured.calls}",
        str(len(measured.corrupted)),
        causes or "none",
        str(len(measured.needless_forks)),
        str(audit.parsers.get("tool_calls", "none")),
        str(audit.parsers.get("reasoning", "none")),
        ", ".join(measured.shapes) or "none",
        f"{verdict}, forks after {_roles(expected)}" if expected else verdict,
        "no" if doctor_problem(measured, audit) else "yes",
        "; ".join(reasons(measured, audit)),
    )


def render_page(rows: Sequence[tuple[str, ...]]) -> str:
    """Returns the page with its table and a summary."""
    lines = [HEAD, ("---",) * len(HEAD), *(tuple(map(_cell, row)) for row in rows)]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return f"{_INTRODUCTION}\n{summary(rows)}\n\n{table}\n"


def summary(rows: Sequence[tuple[str, ...]]) -> str:
    exact = sum(int(row[1].split(" of ")[0]) for row in rows)
    calls = sum(int(row[1].split(" of ")[1]) for row in rows)
    corrupted, needless = (sum(int(row[HEAD.index(name)]) for row in rows) for name in HEAD[2:5:2])
    played = sum(not row[1].startswith("0 of 0") for row in rows)
    right = sum(row[HEAD.index("right")] == "yes" for row in rows)
    return (
        f"{len(rows)} rows, {played} of them played; {exact} of {calls} calls exact; "
        f"{corrupted} corrupted prompts; "
        f"{needless} needless forks; the doctor is right on {right} of {len(rows)}."
    )


def _roles(roles: frozenset[str]) -> str:
    return " and ".join(f"{role} messages" for role in sorted(roles)) or "no message"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
