"""A search tool over a small generated corpus, and questions that cannot be answered without it.

The towns are made up, so no model knows them. The same seed gives the same corpus and the same questions.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from branchline.loop.tools.functions import FunctionTool, tool

_STARTS = ("Al", "Bren", "Cor", "Del", "Es", "Fal", "Gor", "Hal", "Is", "Kel", "Lor", "Mar")
_ENDS = ("bach", "dale", "furt", "garn", "holm", "mere", "nock", "sund", "vik", "wen")
_RIVERS = ("Ash", "Brill", "Cairn", "Dove", "Esk", "Fenn", "Gleam", "Hurl")
_CRAFTS = ("amber", "bells", "clocks", "glass", "ink", "lace", "rope", "saffron", "tiles", "violins")
_PEOPLE = ("Agnes Holt", "Bruno Falk", "Clara Winter", "David Storm", "Edda Lind", "Felix Brandt")


@dataclass(frozen=True)
class Town:
    """A page of the corpus."""

    name: str
    river: str
    founded: int
    craft: str
    mayor: str

    @property
    def page(self) -> str:
        return (
            f"{self.name} is a town on the river {self.river}. It was founded in {self.founded} "
            f"and is known for its {self.craft}. Its mayor is {self.mayor}."
        )


@dataclass(frozen=True)
class Question:
    """A question and its answer."""

    text: str
    answer: str

    @property
    def task_row(self) -> dict[str, Any]:
        """A row of a dataset for `Task.read`."""
        prompt = [{"role": "user", "content": self.text}]
        return {"agent_name": "tool", "prompt": prompt, "tools": ["search"], "answer": self.answer}


def towns(count: int = 24, seed: int = 0) -> list[Town]:
    """Towns with distinct names; the first have distinct crafts, so that a craft identifies a town."""
    draw = random.Random(seed)
    names = [start + end for start in _STARTS for end in _ENDS]
    draw.shuffle(names)
    crafts = draw.sample(_CRAFTS, len(_CRAFTS))
    return [
        Town(
            name,
            draw.choice(_RIVERS),
            draw.randint(900, 1700),
            crafts[index] if index < len(crafts) else "market",
            draw.choice(_PEOPLE),
        )
        for index, name in enumerate(names[:count])
    ]


def questions(corpus: list[Town], count: int, seed: int = 0) -> list[Question]:
    """Questions about a town that is given by its name or by its craft."""
    draw = random.Random(seed)
    drawn: list[Question] = []
    for _ in range(count):
        town = draw.choice(corpus)
        subject = town.name if town.craft == "market" else f"the town known for its {town.craft}"
        drawn.append(
            draw.choice(
                (
                    Question(f"In which year was {town.name} founded?", str(town.founded)),
                    Question(f"On which river does {subject} lie?", town.river),
                    Question(f"Who is the mayor of {subject}?", town.mayor),
                )
            )
        )
    return drawn


class Index:
    """Ranks pages by the rare words they share with a query."""

    def __init__(self, pages: list[str]) -> None:
        self._pages = pages
        self._words = [Counter(_words(page)) for page in pages]
        frequency = Counter(word for words in self._words for word in words)
        self._weight = {word: math.log(1 + len(pages) / count) for word, count in frequency.items()}

    def search(self, query: str, limit: int) -> list[str]:
        """The best pages, best first, without pages that share no word."""
        query_words = set(_words(query))
        scores = [sum(self._weight[word] for word in query_words if word in words) for words in self._words]
        best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
        return [self._pages[index] for index in best[:limit] if scores[index] > 0]


def search_tool(corpus: list[Town]) -> FunctionTool:
    """A search tool over one corpus."""
    index = Index([town.page for town in corpus])

    @tool
    async def search(query: str, limit: int = 3) -> str:
        """Searches an encyclopedia of towns.

        Args:
            query: Words to look for.
            limit: The maximum number of pages.
        """
        return "\n\n".join(index.search(query, limit)) or "Nothing found."

    return search


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
