"""`make check-docs`: every page is listed, its list is current, and a page that fails is reported."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from scripts import check_docs
from scripts.check_docs import PageResult, chosen_blocks, read_blocks, run_page
from scripts.docs_pages import PAGES, Page

ROOT = Path(__file__).parents[1]


NOTHING: Mapping[str, str] = MappingProxyType({})


def paste(
    text: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    stand_ins: Mapping[str, str] = NOTHING,
    left_out: Mapping[str, str] = NOTHING,
) -> PageResult:
    """Runs a page in the environment of the tests."""
    scripts, work = folder / "scripts", folder / "work"
    scripts.mkdir()
    work.mkdir()
    (folder / "page.md").write_text(text)
    monkeypatch.setattr(check_docs, "ROOT", folder)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src")}
    return run_page(Page("page.md", stand_ins, left_out), work, scripts, env)


def test_every_page_with_code_is_listed() -> None:
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs/guides").glob("*.md"),
        *(ROOT / "docs").glob("coming-from-*.md"),
    ]
    with_code = {str(page.relative_to(ROOT)) for page in pages if read_blocks(page.read_text())}
    assert {page.path for page in PAGES} == with_code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path)
def test_what_the_list_says_of_a_page_is_in_its_blocks(page: Page) -> None:
    chosen_blocks(page, (ROOT / page.path).read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path)
def test_a_page_says_what_to_install_before_anything_else(page: Page) -> None:
    blocks, _ = chosen_blocks(page, (ROOT / page.path).read_text())
    lines = [line for block in blocks for line in block.text.splitlines()]
    installs = [line for line in lines if "branchline" in line and line.startswith("pip install")]
    for line in installs:
        found = re.fullmatch(
            r"pip install '?branchline(\[[\w,]+\])?'?(.*?) +# in a checkout: pip install -e (\S+)(.*)", line
        )
        assert found is not None, line
        assert found[3].strip("'") == f".{found[1] or ''}"
        assert found[4] == found[2], "the same packages beside it"
    assert installs or page.path == "README.md" or not blocks


def test_stale_entries_of_the_list_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"page.md: got \['gone'\], expected texts of its blocks"):
        chosen_blocks(Page("page.md", stand_ins={"gone": "x"}), "```sh\nls\n```\n")


def test_blocks_run_in_order_in_one_shell_and_one_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = """\
```sh
export WORD=luminous
```
```python
import os
word = os.environ["WORD"]
```
```json
not run
```
```python
# saved.py
answer = 42
print("imported as", __name__)
```
"""
    page += "```python\nfrom saved import answer\nprint(word, answer)\n```\n```sh\necho done $WORD\n```\n"
    result = paste(page, tmp_path, monkeypatch)
    assert (result.code, result.output) == (0, "imported as saved\nluminous 42\ndone luminous\n")


@pytest.mark.parametrize(
    ("block", "shown"),
    [
        ("```sh\nfalse\n```\n", "line 5"),
        ("```sh\nfalse | cat\n```\n", "line 5"),
        ("```python\nimport nothing_like_it\n```\n", "No module named 'nothing_like_it'"),
        ("```python\nraise SystemExit(3)\n```\n", "SystemExit"),
        ("```sh\nbranchline serve --engine nothing\n```\n", "nothing"),
    ],
)
def test_a_block_that_fails_is_a_failure_with_its_line(
    block: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = paste(f"```sh\ntrue\n```\n{block}```sh\necho never\n```\n", tmp_path, monkeypatch)
    assert result.code != 0
    assert shown in result.output
    assert "failed in the block at line 5" in result.output
    assert "never" not in result.output


def test_a_server_in_front_is_stopped_when_it_answers_and_one_behind_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = """\
```sh
branchline serve --engine scripted --no-auth
branchline serve --engine scripted --no-auth &
curl --silent --retry 60 --retry-delay 1 --retry-connrefused http://127.0.0.1:8100/healthz
```
```python
from urllib.request import urlopen
print("answered", urlopen("http://127.0.0.1:8100/healthz").status)
```
"""
    result = paste(page, tmp_path, monkeypatch)
    assert result.code == 0, result.output
    assert "answered 200" in result.output


def test_stand_ins_replace_and_left_out_blocks_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = "```sh\necho model big\n```\n```sh\nneeds-a-gpu\n```\n"
    result = paste(
        page, tmp_path, monkeypatch, stand_ins={"big": "small"}, left_out={"needs-a-gpu": "needs a GPU"}
    )
    assert (result.code, result.output) == (0, "model small\n")
    assert result.skipped == ("line 5: needs a GPU",)
