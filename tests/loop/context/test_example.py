"""`make example-long-document`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from examples import long_document
from examples.long_document import MODEL_LENGTH, STATIONS, check, draw_text, main, run, write_document
from PIL import Image

from branchline.loop.state import StopReason
from tests.chat.families import load_codec


def test_the_document_has_the_whole_walk() -> None:
    document = write_document()
    assert len(document) == 200_000
    assert all(document.count(f"station {name} ") == 1 for name in STATIONS)


def test_the_example_answers_with_deletion_and_ends_with_the_penalty_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load_codec("qwen3")
    assert main(["--png", str(tmp_path / "folder" / "chart.png")]) == 0
    printed = capsys.readouterr()
    assert "with deletion: 33 answers" in printed.out
    assert "ended by model_length, answer None, reward -1.0" in printed.out
    assert printed.err == ""
    with Image.open(tmp_path / "folder" / "chart.png") as image:
        assert image.format == "PNG"
        assert image.size == (900, 420)


def test_a_run_that_does_not_behave_fails_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = load_codec("qwen3")
    document = write_document().replace("Dunmere leads to", "Dunmere leads nowhere near")
    lost = asyncio.run(run(codec, document, deletes=True))
    assert lost.state.stop_reason is StopReason.FINISH
    problems = check(lost, lost)
    assert "with deletion: finish, answer 'Dunmere', expected 'Juniper'" in problems
    assert any(problem.startswith("without deletion: finish") for problem in problems)
    monkeypatch.setattr(long_document, "check", lambda *_: ["a problem"])
    monkeypatch.setattr(long_document, "draw_png", lambda *_: None)
    monkeypatch.setattr(long_document, "run", lambda *_, **__: asyncio.sleep(0, lost))
    assert main([]) == 1


def test_a_missing_tokenizer_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tokenizer", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("--tokenizer: ")


def test_the_chart_has_a_column_for_each_answer() -> None:
    chart = draw_text(
        [("a", "●", [0, MODEL_LENGTH // 2, MODEL_LENGTH]), ("b", "×", [100])], rows=4
    ).splitlines()
    assert chart[1].endswith("│  ●")
    assert chart[2].endswith("│ ● ")
    assert chart[4].endswith("│×  ")
