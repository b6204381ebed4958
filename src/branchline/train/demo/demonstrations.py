"""Demonstrations of mixed quality: they know every format and every step, and often choose a wrong step.

A demonstrator reads a prompt as text, as a model would, and returns the next message. At each decision it
takes the right step with the given probability. Its replies are sometimes encoded with other ids than the
tokenizer's own for the same text, as the replies of real models are.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from random import Random

from branchline.core.message import Message, ToolCall
from branchline.engines.scripted import ScriptedRequest
from branchline.train.demo.archive import ANIMALS, COLORS, DELETED, ITEMS, NAMES

_ITEM = re.compile(r"Who is the owner of the (\w+)\?")
_NOTE = re.compile(r'"note": "\w+ ([\w-]+)"')
_REPORT = re.compile(r"reports as follows\. (.*)\n")
_JOB = re.compile(r"find ([\w-]+)")


@dataclass(frozen=True)
class DemonstratorConfig:
    """Probabilities of the right step at each decision."""

    opens_catalog: float = 0.6
    deletes_page: float = 0.5
    delegates: float = 0.85
    looks_up: float = 0.55
    reads_owner: float = 0.75
    reports: float = 0.95


PERFECT = DemonstratorConfig(1, 1, 1, 1, 1, 1)


class Demonstrator:
    """A rule for a scripted engine."""

    def __init__(self, rng: Random, config: DemonstratorConfig | None = None) -> None:
        self._rng = rng
        self._config = config or DemonstratorConfig()

    def __call__(self, request: ScriptedRequest) -> Message:
        text = request.prompt_text
        return self._clerk(text) if "lookup(" in text else self._main(text)

    def _main(self, text: str) -> Message:
        config, item = self._config, self._find(_ITEM, text, self._rng.choice(ITEMS))
        if report := _REPORT.findall(text):
            return Message("assistant", report[-1]) if self._draw(config.reports) else self._guess()
        if DELETED in text:
            key = self._find(_NOTE, text, self._random_key())
            return self._call("delegate", task=f"find {key}") if self._draw(config.delegates) else self._guess()
        if "catalog\n" in text:
            key = self._find(re.compile(rf"\n{item} ([\w-]+)"), text, self._random_key())
            if self._draw(config.deletes_page):
                return self._call("forget", note=f"{item} {key}")
            return self._call("delegate", task=f"find {key}") if self._draw(0.7) else self._guess()
        if self._draw(config.opens_catalog):
            return self._call("catalog")
        return self._call("delegate", task=f"find {self._random_key()}") if self._draw(0.4) else self._guess()

    def _clerk(self, text: str) -> Message:
        if owner := re.findall(r"\n(owner: \w+)", text):
            if self._draw(self._config.reads_owner):
                return Message("assistant", owner[-1])
            return Message("assistant", "owner: " + self._find(re.compile(r"keeper: (\w+)"), text, NAMES[0]))
        if "no record" in text:
            return self._guess()
        key = self._find(_JOB, text, self._random_key())
        if self._draw(self._config.looks_up):
            return self._call("lookup", key=key)
        return self._guess() if self._draw(0.8) else self._call("lookup", key=self._random_key())

    def _draw(self, probability: float) -> bool:
        return self._rng.random() < probability

    def _guess(self) -> Message:
        return Message("assistant", f"owner: {self._rng.choice(NAMES)}")

    def _random_key(self) -> str:
        return f"{self._rng.choice(COLORS)}-{self._rng.choice(ANIMALS)}"

    def _call(self, name: str, **arguments: str) -> Message:
        return Message("assistant", tool_calls=(ToolCall(name, json.dumps(arguments)),))

    def _find(self, pattern: re.Pattern[str], text: str, default: str) -> str:
        found = pattern.findall(text)
        return str(found[-1]) if found else default
