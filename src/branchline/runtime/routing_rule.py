"""A rule over the names of models and agents: which engine serves their calls, and whether these are trained.

Plain data, so that commands that serve nothing can read rules too.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from branchline.core.errors import InputError

_YES, _NO = ("yes", "true", "1"), ("no", "false", "0")


@dataclass(frozen=True)
class RoutingRule:
    """Sends calls with a matching model and agent to an engine. Patterns are those of a shell.

    >>> RoutingRule.parse("model=*haiku*,train=no")
    RoutingRule(model='*haiku*', agent='*', engine='', train=False)
    """

    model: str = "*"
    agent: str = "*"
    engine: str = ""
    """The name of an engine; empty for the default engine."""
    train: bool = True

    @classmethod
    def parse(cls, text: str) -> RoutingRule:
        """Reads a rule from a command line: `key=value` pairs separated by commas."""
        fields: dict[str, Any] = {}
        for pair in text.split(","):
            key, separator, value = (part.strip() for part in pair.partition("="))
            if not separator or key not in ("model", "agent", "engine", "train"):
                raise InputError(f"rule: got {pair!r}, expected model=…, agent=…, engine=… or train=yes|no")
            if key == "train":
                if value.lower() not in (*_YES, *_NO):
                    raise InputError(f"rule: got train={value}, expected yes or no")
                fields[key] = value.lower() in _YES
            else:
                fields[key] = value
        return cls(**fields)

    def matches(self, model: str, agent: str) -> bool:
        return fnmatchcase(model, self.model) and fnmatchcase(agent, self.agent)
