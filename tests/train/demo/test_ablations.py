"""Encoding again: rows that the tokenizer would write itself are unchanged, others are counted as drift."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from branchline.chat.generic.codec import GenericCodec  # noqa: E402
from branchline.export.packing import TrainingRow  # noqa: E402
from branchline.train.demo import MODEL_FOLDER, ablations  # noqa: E402
from branchline.train.demo.ablations import Drift, encode_again, logprob_gaps  # noqa: E402
from branchline.train.demo.demo import DemoSettings  # noqa: E402
from branchline.train.demo.warm_start import create_model  # noqa: E402
from tests.export.packed_rows import make_row  # noqa: E402

CODEC = GenericCodec.open(MODEL_FOLDER)
STOP = CODEC.encode("<|im_end|>").tolist()


def respell(text: str, rng: Random) -> list[int]:
    """Returns ids of a text, encoded in pieces."""
    cuts = sorted({0, len(text), *(rng.randrange(len(text) + 1) for _ in range(3))})
    parts = [text[start:end] for start, end in pairwise(cuts)]
    return [token for part in parts for token in CODEC.encode(part).tolist()]


def make_text_row(answers: list[list[int]]) -> TrainingRow:
    """Returns a row with a tool result after each answer but the last."""
    prompt = CODEC.encode("<|im_start|>user\nfind red-fox<|im_end|>\n<|im_start|>assistant\n").tolist()
    between = CODEC.encode("\n<|im_start|>tool\nok<|im_end|>\n<|im_start|>assistant\n").tolist()
    response: list[int] = []
    weights: list[float] = []
    for index, answer in enumerate(answers):
        ids = [*answer, *STOP]
        gap = between if index < len(answers) - 1 else []
        response += [*ids, *gap]
        weights += [0.5] * len(ids) + [0.0] * len(gap)
    return make_row(prompt, response, weights=weights, advantages=[2.0 if w else 0.0 for w in weights])


texts = st.lists(
    st.sampled_from(['<tool_call>\n{"name": "lookup"}\n</tool_call>', "owner: Rosa", "keeper green-swan"]),
    min_size=1,
    max_size=3,
)


@given(texts)
def test_a_row_in_the_tokenizers_own_spelling_is_unchanged(answers: list[str]) -> None:
    row = make_text_row([CODEC.encode(text).tolist() for text in answers])
    again, never_sampled = encode_again(CODEC, row)
    assert never_sampled == 0
    assert again.sample.prompt_ids.tolist() == row.sample.prompt_ids.tolist()
    assert again.sample.response_ids.tolist() == row.sample.response_ids.tolist()
    assert again.weights.tolist() == row.weights.tolist()
    assert again.advantages.tolist() == row.advantages.tolist()


@given(texts, st.randoms(use_true_random=False))
def test_the_text_stays_and_every_other_token_is_counted(answers: list[str], rng: Random) -> None:
    spelled = [respell(text, rng) for text in answers]
    row = make_text_row(spelled)
    again, never_sampled = encode_again(CODEC, row)
    for before, after in ((row.sample.prompt_ids, again.sample.prompt_ids),
                          (row.sample.response_ids, again.sample.response_ids)):  # fmt: skip
        assert CODEC.decode(before) == CODEC.decode(after)
    own = [CODEC.encode(text).tolist() for text in answers]
    assert (never_sampled > 0) == (own != spelled)
    assert never_sampled <= sum(map(len, own))
    trained = again.weights != 0
    assert trained.sum() == sum(len(ids) + len(STOP) for ids in own)
    assert np.isnan(again.sample.response_logprobs[trained]).all()


def test_an_id_that_is_no_token_is_counted_too() -> None:
    row = make_text_row([[*CODEC.encode("owner: Rosa").tolist(), 519]])
    _, never_sampled = encode_again(CODEC, row)
    assert never_sampled > 0


def test_the_gap_is_that_of_the_trained_and_the_sampled_tokens() -> None:
    model = create_model()
    own = make_text_row([CODEC.encode("owner: Rosa").tolist()])
    spelled = make_text_row([[token for char in "owner: Rosa" for token in CODEC.encode(char).tolist()]])
    again, _ = encode_again(CODEC, spelled)
    (gap,) = logprob_gaps(model, [spelled], [again])
    (found,) = logprob_gaps(model, [own], [own])
    engine_sum = float(spelled.sample.response_logprobs.sum())
    own_sum = float(own.sample.response_logprobs.sum())
    size, own_size = len(spelled.weights), len(own.weights)
    # Both rows train the same tokens, so they differ only in what the engine reported.
    assert {round(abs(gap * size + sign * engine_sum), 3) for sign in (1, -1)} & {
        round(abs(found * own_size + sign * own_sum), 3) for sign in (1, -1)
    }


def make_outcome(folder: Path, variant: str, seed: int, rewards: list[float]) -> None:
    run_folder = folder / f"{variant.replace(' ', '-')}-seed{seed}"
    run_folder.mkdir(parents=True)
    outcome = {"variant": variant, "seed": seed, "steps": len(rewards), "rewards": rewards, **Drift().summary}
    (run_folder / "outcome.json").write_text(json.dumps(outcome))


def test_variants_that_ran_apart_are_drawn_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_outcome(tmp_path, "exact", 0, [0.2, 0.8])
    make_outcome(tmp_path, "exact", 1, [0.4, 0.6])
    make_outcome(tmp_path, "no shares", 0, [0.1, 0.3])
    assert ablations.main(["--folder", str(tmp_path), "--figure-only"]) == 0
    assert (tmp_path / "ablations.png").read_bytes().startswith(b"\x89PNG")
    table = (tmp_path / "ablations.md").read_text()
    assert "| exact | 0.80 0.60 |" in table
    assert "| no shares | 0.30 |" in table
    assert table in capsys.readouterr().out


def test_a_folder_without_outcomes_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ablations.main(["--folder", str(tmp_path), "--figure-only"]) == 2
    assert f"--folder: got {tmp_path}, expected runs with outcome.json" in capsys.readouterr().err


def test_runs_of_different_lengths_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_outcome(tmp_path, "exact", 0, [0.2, 0.8])
    make_outcome(tmp_path, "exact", 1, [0.4])
    assert ablations.main(["--folder", str(tmp_path), "--figure-only"]) == 2
    assert "steps: got 1 and 2, expected runs of one length" in capsys.readouterr().err


def test_a_variant_that_runs_apart_draws_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, int]] = []

    async def run_variant(variant: str, settings: DemoSettings, folder: Path) -> dict[str, Any]:
        started.append((variant, settings.seed))
        return {}

    monkeypatch.setattr(ablations, "run_variant", run_variant)
    options = ["--folder", str(tmp_path), "--no-figure", "--variants", "no shares", "--seeds", "1", "2"]
    assert ablations.main(options) == 0
    assert started == [("no shares", 1), ("no shares", 2)]
    assert not list(tmp_path.iterdir())


def test_a_summary_of_nothing_is_zero() -> None:
    assert set(Drift().summary.values()) == {0.0}
