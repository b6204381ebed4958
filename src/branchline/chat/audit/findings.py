"""A finding: one question asked of a chat template, answered in a sentence, with the texts that show it.

`fine` asks for nothing; a `note` is worth knowing (most notes cost forks, none costs exactness); `unsafe`
means that something the model said would be lost, changed or not understood.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

Evidence = Mapping[str, str]
USE_VERBATIM = "serve with history=verbatim"
"""The remedy of everything that a template does to earlier messages: keep them as they were sampled."""


class Severity(StrEnum):
    """How much a finding matters."""

    FINE = "fine"
    NOTE = "note"
    UNSAFE = "unsafe"


@dataclass(frozen=True)
class Finding:
    """One question, answered."""

    name: str
    severity: Severity
    sentence: str
    evidence: Evidence = field(default_factory=dict)
    behaviour: str = ""
    """What the template does, to go on with "This template …", where somebody should act on it."""
    remedy: str = ""
    """How to act on it."""

    @property
    def ok(self) -> bool:
        return self.severity == Severity.FINE


def fine(name: str, sentence: str) -> Finding:
    return Finding(name, Severity.FINE, sentence)


def note(name: str, sentence: str, evidence: Evidence, does: str = "") -> Finding:
    """What costs forks says what it `does`; history=verbatim is the remedy."""
    return Finding(name, Severity.NOTE, sentence, evidence, does, USE_VERBATIM if does else "")


def unsafe(name: str, does: str, evidence: Evidence, remedy: str) -> Finding:
    return Finding(name, Severity.UNSAFE, f"It {does}.", evidence, does, remedy)
