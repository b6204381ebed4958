from __future__ import annotations

import inspect

import pytest

from branchline.loop.tools.docstrings import read_docstring

QUERY = {"query": "What to look for.", "limit": "How many, at most."}


def read(doc: str) -> tuple[str, dict[str, str]]:
    return read_docstring(inspect.cleandoc(doc))


GOOGLE = """Finds pages.

    Of the whole web.

    Args:
        query (str): What to look for.
        limit: How many,
            at most.

    Returns:
        url: Where it is.
    """
SPHINX = """Finds pages.

    Of the whole web.

    :param str query: What to look for.
    :param limit: How many,
        at most.
    :type limit: int
    :returns: Where
        it is.
    :raises ValueError: never
    """
NUMPY = """Finds pages.

    Of the whole web.

    Parameters
    ----------
    query : str
        What to look for.
    limit
        How many,
        at most.

    Returns
    -------
    url : str
        Where it is.
    """


@pytest.mark.parametrize("doc", [GOOGLE, SPHINX, NUMPY], ids=["google", "sphinx", "numpy"])
def test_every_style_says_the_same(doc: str) -> None:
    assert read(doc) == ("Finds pages.\n\nOf the whole web.", QUERY)


@pytest.mark.parametrize(
    ("behind", "about"),
    [
        ("The index is rebuilt every night.", "The index is rebuilt every night."),
        ("Tip: use short words.", "Tip: use short words."),
        ("Warning:\n        Slow: very.", "Warning:\n    Slow: very."),
        ("Note:\n        query: is not cached.", ""),
    ],
)
@pytest.mark.parametrize("doc", [GOOGLE, SPHINX])
def test_a_line_at_the_edge_ends_a_section(doc: str, behind: str, about: str) -> None:
    told = f"Finds pages.\n\nOf the whole web.\n\n{about}".rstrip()
    assert read(f"{doc}\n    {behind}\n") == (told, QUERY)


def test_behind_numpys_parameters_a_sentence_belongs_to_no_parameter() -> None:
    doc = NUMPY.partition("    Returns")[0] + "    It is slow, at night.\n    Parameters: see above.\n"
    assert read(doc) == (
        "Finds pages.\n\nOf the whole web.\n\nIt is slow, at night.\nParameters: see above.",
        QUERY,
    )


def test_numpys_parameters_can_share_what_is_said_of_them() -> None:
    doc = """Adds.

    Parameters
    ----------
    a, b : int
        A number.
    """
    assert read(doc) == ("Adds.", {"a": "A number.", "b": "A number."})


def test_what_looks_like_a_section_but_is_none_is_text() -> None:
    doc = """Says:

    :class:`Page` is what it finds.

    Usage
    -----
    Args are named.
    """
    assert read(doc) == (
        "Says:\n\n:class:`Page` is what it finds.\n\nUsage\n-----\nArgs are named.",
        {},
    )
    assert read("") == ("", {})
