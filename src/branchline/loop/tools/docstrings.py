"""What a docstring says of a function and of each parameter, in the styles of Google, Sphinx and NumPy.

Whatever stands in no section is the description, before the sections or behind them; so nothing is said of a
parameter that its author did not say of it. Sections that tell a caller nothing of the call are left out.
"""

from __future__ import annotations

import re
from typing import Literal

_PARAMETERS = frozenset(
    {"args", "arguments", "parameters", "other parameters", "keyword args", "keyword arguments"}
)
_HIDDEN = frozenset(
    {"attributes", "example", "examples", "note", "notes", "raises", "returns", "see also", "yields"}
)
_UNDERLINE = re.compile(r"-{3,}\s*$")
# `name: …`, `name (type): …`
_GOOGLE = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
# `name`, `name : type`, `one, other : type`
_NUMPY = re.compile(r"\*{0,2}(\w+(?:\s*,\s*\*{0,2}\w+)*)\s*(?::.*)?$")
# `:param name: …`, `:param type name: …`
_SPHINX = re.compile(r":(param|parameter|arg|argument|key|keyword)\s+(?:[^:]*\s)?\*{0,2}(\w+)\s*:\s*(.*)$")
_SPHINX_HIDDEN = re.compile(
    r":(?:type|returns?|rtype|raises?|except|exception|yields?|var|ivar|cvar)\b[^:]*:(?:\s|$)"
)

Section = Literal["about", "google", "numpy", "sphinx", "hidden", "numpy hidden"]


def read_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """The description, and what is said of each parameter; `doc` as `inspect.getdoc` gives it.

    >>> read_docstring("Finds pages.\\n\\nArgs:\\n    query: What to look for.\\n\\nSlow at night.")
    ('Finds pages.\\n\\nSlow at night.', {'query': 'What to look for.'})
    """
    reader = _Reader(doc.splitlines())
    for place in range(len(reader.lines)):
        reader.take(place)
    texts = {name: " ".join(lines).strip() for name, lines in reader.described.items()}
    return "\n".join(reader.about).strip(), texts


class _Reader:
    """Goes through a docstring line by line; knows the section it is in and the parameter it reads of."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        self.about: list[str] = []
        self.described: dict[str, list[str]] = {}
        self._section: Section = "about"
        self._indent = 0
        """Of a section's parameters; 0: none has come yet."""
        self._current: list[str] | None = None

    def take(self, place: int) -> None:
        line = self.lines[place]
        depth = len(line) - len(line.lstrip())
        if not line.strip():
            if self._section == "about":
                self.about.append("")
        elif depth:
            self._indented(line, depth)
        elif not (_UNDERLINE.match(line) and place and self._heading(place - 1)):
            self._outermost(line, self._heading(place))

    def _heading(self, place: int) -> Section | None:
        """The section that a line begins: `Args:`, or `Parameters` with a line of dashes below."""
        line = self.lines[place].strip().lower()
        below = self.lines[place + 1] if place + 1 < len(self.lines) else ""
        is_underlined = bool(_UNDERLINE.match(below))
        if not is_underlined and not line.endswith(":"):
            return None
        title = line if is_underlined else line[:-1]
        if title in _PARAMETERS:
            return "numpy" if is_underlined else "google"
        if title in _HIDDEN:
            return "numpy hidden" if is_underlined else "hidden"
        return None

    def _outermost(self, line: str, heading: Section | None) -> None:
        """A line at the edge ends a section, but for NumPy's, whose own lines stand there."""
        if heading is not None:
            self._section, self._current, self._indent = heading, None, 0
        elif sphinx := _SPHINX.match(line):
            self._section = "sphinx"
            self._current = self.described[sphinx[2]] = [sphinx[3]]
        elif _SPHINX_HIDDEN.match(line):
            self._section = "hidden"
        elif self._section == "numpy" and (named := _NUMPY.match(line)):
            self._current = []
            for name in named[1].split(","):
                self.described[name.strip(" *")] = self._current
        elif self._section != "numpy hidden":
            if self._section != "about" and self.about and self.about[-1]:
                self.about.append("")
            self._section = "about"
            self.about.append(line)

    def _indented(self, line: str, depth: int) -> None:
        if self._section == "about":
            self.about.append(line)
        elif self._section == "google":
            self._indent = self._indent or depth
            argument = _GOOGLE.match(line.strip()) if depth <= self._indent else None
            if argument is not None:
                self._current = self.described[argument[1]] = [argument[2]]
            elif self._current is not None:
                self._current.append(line.strip())
        elif self._section in ("numpy", "sphinx") and self._current is not None:
            self._current.append(line.strip())
