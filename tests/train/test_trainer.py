"""The trainer: engine and trainer agree, versions move with the weights, a run continues where it ended."""

from __future__ import annotations

import asyncio
import itertools
import json
from functools import partial
from pathlib import Path
from random import SystemRandom
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from openai import AsyncOpenAI  # noqa: E402

from branchline.chat.generic.codec import GenericCodec  # noqa: E402
from branchline.core.errors import BranchlineError, InputError  # noqa: E402
from branchline.export.packing import TrainingRow  # noqa: E402
from branchline.rollout.session_gateway import AgentSession  # noqa: E402
from branchline.train.metrics import read_metrics  # noqa: E402
from branchline.train.seeded_engine import SeededEngine  # noqa: E402
from branchline.train.trainer import StepResult, Trainer, TrainerConfig, describe_step  # noqa: E402
from tests.train.test_packed_forward import row_logprobs  # noqa: E402
from tests.train.tiny_policy import (  # noqa: E402
    QUESTIONS,
    ask_twice,
    create_policy,
    create_trainer,
    small_config,
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_policy(tmp_path_factory.mktemp("policy"))


def run_steps(trainer: Trainer[str]) -> list[StepResult]:
    async def collect() -> list[StepResult]:
        return [result async for result in trainer.steps()]

    return asyncio.run(collect())


def weights_of(trainer: Trainer[str]) -> Any:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def without_times(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.endswith("_time")}


def test_new_tokens_carry_the_new_version_and_the_logprobs_of_the_trainers_weights(
    policy: Path, tmp_path: Path
) -> None:
    trainer = create_trainer(policy, tmp_path / "run", steps=3)
    before: dict[int, Any] = {}
    rows: dict[int, list[TrainingRow]] = {}
    build_rows = trainer.build_rows

    def keep_rows(groups: Any) -> list[TrainingRow]:
        # Called before the update of a step, with the weights that sampled its tokens.
        rows[trainer.step] = build_rows(groups)
        before[trainer.step] = [row_logprobs(trainer.model, row).detach() for row in rows[trainer.step]]
        return rows[trainer.step]

    trainer.build_rows = keep_rows  # type: ignore[method-assign]
    start = weights_of(trainer)
    results = run_steps(trainer)
    assert (weights_of(trainer) != start).any()
    assert sorted(rows) == [0, 1, 2]
    for version, step_rows in rows.items():
        for row, expected in zip(step_rows, before[version], strict=True):
            trained = row.weights != 0
            assert set(row.sample.response_versions[trained].tolist()) == {version}
            engine = torch.from_numpy(row.sample.response_logprobs[trained]).double()
            assert torch.allclose(engine, expected[torch.from_numpy(trained)], atol=1e-5)
    for result in results:
        assert result.metrics["sampling/sampling_logp_difference/max"] < 1e-5
        assert result.metrics["staleness"] == 0
        assert result.metrics["sampled_tokens"] == result.metrics["delivered_tokens"] > 0
    assert "logprobs of engine and trainer differ by" in describe_step(results[0].metrics)
    assert "logprobs of engine and trainer" not in describe_step(results[1].metrics)


def test_a_resumed_run_continues_the_same_curve(policy: Path, tmp_path: Path) -> None:
    whole = create_trainer(policy, tmp_path / "whole", steps=4)
    expected = [without_times(result.metrics) for result in run_steps(whole)]
    first = create_trainer(policy, tmp_path / "parts", steps=2)
    run_steps(first)
    second = create_trainer(policy, tmp_path / "parts", steps=4, resume=True)
    assert second.step == 2
    run_steps(second)
    found = [without_times(line) for line in read_metrics(tmp_path / "parts" / "metrics.jsonl")]
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    assert [line["reward"] for line in found] == [line["reward"] for line in expected]
    assert [line["total_sampled_tokens"] for line in found] == [
        line["total_sampled_tokens"] for line in expected
    ]
    assert torch.allclose(weights_of(second), weights_of(whole), atol=1e-4)
    assert (weights_of(first) - weights_of(second)).abs().max() > 1e-3


async def ask_at_random_times(question: str, session: AgentSession) -> float:
    """Requests of all sessions arrive in another order in each run."""
    await asyncio.sleep(SystemRandom().random() * 0.02)
    reward = await ask_twice(question, session)
    await asyncio.sleep(SystemRandom().random() * 0.02)
    return reward


def test_deterministic_runs_with_one_seed_are_equal_bit_for_bit(policy: Path, tmp_path: Path) -> None:
    found = []
    for name in ("one", "other"):
        trainer = create_trainer(
            policy, tmp_path / name, ask_at_random_times, steps=3, deterministic=True, update={"passes": 2}
        )
        metrics = [without_times(result.metrics) for result in run_steps(trainer)]
        found.append((metrics, weights_of(trainer)))
    (metrics, weights), (others, other_weights) = found
    assert metrics == others
    assert torch.equal(weights, other_weights)
    first = create_trainer(
        policy, tmp_path / "parts", ask_at_random_times, steps=2, deterministic=True, update={"passes": 2}
    )
    run_steps(first)
    second = create_trainer(
        policy,
        tmp_path / "parts",
        ask_at_random_times,
        resume=True,
        steps=3,
        deterministic=True,
        update={"passes": 2},
    )
    assert [without_times(result.metrics) for result in run_steps(second)] == metrics[2:]
    assert torch.equal(weights_of(second), weights)


def test_runs_with_one_seed_sample_the_same_and_differ_by_rounding(policy: Path, tmp_path: Path) -> None:
    one, other = (
        run_steps(create_trainer(policy, tmp_path / name, ask_at_random_times, steps=2))
        for name in ("one", "other")
    )
    for result, again in zip(one, other, strict=True):
        for metric in ("reward", "sampled_tokens", "trained_tokens"):
            assert result.metrics[metric] == again.metrics[metric]
        assert result.metrics["grad_norm"] == pytest.approx(again.metrics["grad_norm"], rel=1e-3)


def test_a_checkpoint_is_a_model_folder_with_its_tokenizer(policy: Path, tmp_path: Path) -> None:
    trainer = create_trainer(policy, tmp_path / "run", steps=2, checkpoint_every=1, keep_checkpoints=1)
    run_steps(trainer)
    (folder,) = (tmp_path / "run" / "checkpoints").iterdir()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(
        torch.cat([parameter.detach().flatten() for parameter in loaded.parameters()]), weights_of(trainer)
    )
    assert GenericCodec.open(folder).stop_ids == trainer.codec.stop_ids
    assert (folder / "model.safetensors").exists()
    assert json.loads((folder / "trainer_state.json").read_text())["step"] == 2


def test_a_run_without_checkpoints_writes_none_also_at_its_end(policy: Path, tmp_path: Path) -> None:
    run_steps(create_trainer(policy, tmp_path / "run", steps=2, checkpoint_every=None))
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 2
    assert not (tmp_path / "run" / "checkpoints").exists()
    with pytest.raises(InputError, match="checkpoint_every: got 0, expected 1 or more"):
        small_config(checkpoint_every=0)


def test_every_sampled_token_is_trained_or_has_no_advantage(policy: Path, tmp_path: Path) -> None:
    async def reward_some(question: str, session: AgentSession) -> float:
        reward = await ask_twice(question, session)
        return 1.0 if question == "Who?" else reward

    lines = [result.metrics for result in run_steps(
        create_trainer(policy, tmp_path / "run", reward_some, steps=4)
    )]  # fmt: skip
    for line in lines:
        accounted = line["trained_tokens"] + line["tokens_without_advantage"]
        assert accounted == line["delivered_tokens"] == line["sampled_tokens"] > 0
    assert sum(line["tokens_without_advantage"] for line in lines) > 0
    assert sum(line["trained_tokens"] for line in lines) > 0


def test_episodes_are_at_most_as_stale_as_allowed(policy: Path, tmp_path: Path) -> None:
    results = run_steps(create_trainer(policy, tmp_path / "run", steps=5, max_staleness=2))
    staleness = [result.metrics["staleness"] for result in results]
    assert max(staleness) <= 2
    assert max(staleness) > 0
    assert [result.step for result in results] == [1, 2, 3, 4, 5]


def test_an_interrupted_run_leaves_its_last_complete_step(policy: Path, tmp_path: Path) -> None:
    async def interrupt() -> None:
        trainer = create_trainer(policy, tmp_path / "run", steps=50)
        started = asyncio.Event()

        async def consume() -> None:
            async for _ in trainer.steps():
                started.set()

        task = asyncio.create_task(consume())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(interrupt())
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    resumed = create_trainer(policy, tmp_path / "run", steps=len(lines) + 1, resume=True)
    assert resumed.step == len(lines) >= 1
    (result,) = run_steps(resumed)
    assert result.step == len(lines) + 1


def test_a_run_folder_is_not_overwritten(policy: Path, tmp_path: Path) -> None:
    run_steps(create_trainer(policy, tmp_path / "run", steps=1))
    with pytest.raises(InputError, match="has a run; resume it"):
        create_trainer(policy, tmp_path / "run", steps=2)
    with pytest.raises(InputError, match="seed: this run has 0, got 7"):
        create_trainer(policy, tmp_path / "run", steps=2, seed=7, resume=True)


def fail_on_call(number: int, function: Any, error: BaseException) -> Any:
    """Returns the function, but its call with this number raises."""
    calls = itertools.count(1)

    def run(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            raise error
        return function(*args, **kwargs)

    return run


def fail_in_the_third_forward_pass(trainer: Trainer[str], monkeypatch: pytest.MonkeyPatch) -> None:
    update, steps = trainer._updater.update, itertools.count(1)

    def fail(*args: Any, **kwargs: Any) -> Any:
        if next(steps) == 3:
            forward = trainer._updater._forward
            # The last of the update; with two passes, the first computes the logprobs at its start.
            count = 3 if trainer.config.update.passes == 2 else 1
            last = fail_on_call(count, forward, MemoryError("out of memory"))
            monkeypatch.setattr(trainer._updater, "_forward", last)
        return update(*args, **kwargs)

    monkeypatch.setattr(trainer._updater, "update", fail)


def fail_in_the_third_rows(trainer: Trainer[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fail = fail_on_call(3, trainer.build_rows, ValueError("out of memory"))
    monkeypatch.setattr(trainer, "build_rows", fail)


def fail_in_the_second_weight_update(trainer: Trainer[str], monkeypatch: pytest.MonkeyPatch) -> None:
    update = SeededEngine.update_weights
    monkeypatch.setattr(SeededEngine, "update_weights", fail_on_call(2, update, MemoryError("out of memory")))


def fail_in_the_second_report(trainer: Trainer[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = SimpleNamespace(start=lambda *_: None, finish=lambda: None)
    tracker.log = fail_on_call(2, lambda *_: None, OSError("out of memory"))
    monkeypatch.setattr(trainer._metrics._trackers, "_trackers", [tracker])


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    "fail",
    [
        fail_in_the_third_forward_pass,
        fail_in_the_third_rows,
        fail_in_the_second_weight_update,
        fail_in_the_second_report,
    ],
)
def test_a_run_that_fails_keeps_its_finished_steps(
    fail: Any,
    passes: int,
    policy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    update = {"passes": passes, "max_batch_tokens": None}
    trainer = create_trainer(policy, tmp_path / "run", steps=4, update=update)
    weights: list[Any] = []
    write = trainer._metrics.write

    def keep_weights(metrics: dict[str, float]) -> None:
        weights.append(weights_of(trainer).clone())
        write(metrics)

    with monkeypatch.context() as patches:
        fail(trainer, patches)
        patches.setattr(trainer._metrics, "write", keep_weights)
        with pytest.raises((MemoryError, ValueError, OSError), match="out of memory"):
            run_steps(trainer)
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    assert "the run ended after step 2 of 4, which is saved in" in caplog.text
    resumed = create_trainer(policy, tmp_path / "run", steps=3, resume=True, update=update)
    assert resumed.step == 2
    assert len(weights) == 2
    assert torch.equal(weights_of(resumed), weights[-1])
    run_steps(resumed)
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]


def test_a_row_over_the_limit_does_not_end_a_run(policy: Path, tmp_path: Path) -> None:
    (result,) = run_steps(create_trainer(policy, tmp_path / "run", steps=1, update={"max_batch_tokens": 20}))
    assert result.metrics["long_rows"] > 0
    assert result.metrics["grad_norm"] > 0


def test_a_fault_inside_the_optimizer_saves_no_half_step(
    policy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = create_trainer(policy, tmp_path / "run", steps=4, checkpoint_every=1)
    optimizer: Any = trainer._updater.optimizer
    optimizer.step = fail_on_call(3, optimizer.step, MemoryError("out of memory"))
    with pytest.raises(MemoryError):
        run_steps(trainer)
    assert "left some weights changed and others not" in caplog.text
    resumed = create_trainer(policy, tmp_path / "run", steps=2, resume=True)
    assert resumed.step == 2
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 2


def test_a_checkpoint_that_cannot_be_written_leaves_no_part_of_it(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fill_the_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    trainer = create_trainer(policy, tmp_path / "run", steps=1)
    monkeypatch.setattr(torch, "save", fill_the_disk)
    with pytest.raises(OSError, match="No space left"):
        run_steps(trainer)
    assert "step 1 could not be saved: OSError" in caplog.text
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_failed_episode_trains_nothing_and_the_others_continue(policy: Path, tmp_path: Path) -> None:
    async def fail_sometimes(question: str, session: AgentSession) -> float:
        reward = await ask_twice(question, session)
        if session.id.endswith("-0"):
            raise RuntimeError("the tool server is gone")
        return reward

    (result,) = run_steps(create_trainer(policy, tmp_path / "run", fail_sometimes, steps=1))
    assert result.metrics["failed_episodes"] == 2
    assert result.metrics["episodes"] == 6
    assert 0 < result.metrics["delivered_tokens"] < result.metrics["sampled_tokens"]
    failed = [trajectory for group in result.groups for trajectory in group.trajectories if trajectory.failed]
    assert {trajectory.session[-2:] for trajectory in failed} == {"-0"}


def test_an_agent_that_always_fails_ends_the_run_with_its_error(policy: Path, tmp_path: Path) -> None:
    async def fail(question: str, session: AgentSession) -> float:
        raise RuntimeError("no key")

    with pytest.raises(BranchlineError, match="all episodes failed, the first with RuntimeError: no key"):
        run_steps(create_trainer(policy, tmp_path / "run", fail, steps=1))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_an_agent_of_the_loop_is_found_by_its_name(policy: Path, tmp_path: Path) -> None:
    Trainer(policy, "single_turn", [{}], run_folder=tmp_path / "known")
    with pytest.raises(InputError, match=r"'single'.*single_turn"):
        Trainer(policy, "single", [{}], run_folder=tmp_path / "unknown")


def test_an_agent_may_post_its_reward_instead_of_returning_it(policy: Path, tmp_path: Path) -> None:
    async def post(question: str, session: AgentSession) -> None:
        await session.reward(await ask_twice(question, session), tool_errors=0)

    (posted,) = run_steps(create_trainer(policy, tmp_path / "posted", post, steps=1))
    (returned,) = run_steps(create_trainer(policy, tmp_path / "returned", steps=1))
    assert posted.metrics["reward"] == returned.metrics["reward"]


def test_the_constant_normaliser_divides_by_episodes_and_length(policy: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 1, "group_std": "none", "update": {"learning_rate": 0.0}}
    token, constant = (
        run_steps(create_trainer(policy, tmp_path / name, **options, **changes))[0].metrics
        for name, changes in (
            ("token", {"normaliser": "token"}),
            ("constant", {"normaliser": "constant", "constant_length": 100}),
        )
    )
    # The mean over all tokens times their number, over episodes × length.
    expected = token["grad_norm"] * token["delivered_tokens"] / (6 * 100)
    assert constant["grad_norm"] == pytest.approx(expected, rel=1e-3)
    for changes in ({"normaliser": "constant"}, {"constant_length": 5}):
        with pytest.raises(InputError, match=r"constant_length: got .* expected a number of tokens"):
            small_config(**changes)


def test_rewards_are_reported_as_trl_does(policy: Path, tmp_path: Path) -> None:
    rewards = {"step0-group0": [1.0, 0.0, 0.5], "step0-group1": [2.0, 2.0, 2.0]}

    async def reward(question: str, session: AgentSession) -> float:
        await ask_twice(question, session)
        group, slot = session.id.rsplit("-", 1)
        return rewards[group][int(slot)]

    (result,) = run_steps(create_trainer(policy, tmp_path / "run", reward, steps=1))
    values = torch.tensor([*rewards["step0-group0"], *rewards["step0-group1"]])
    assert result.metrics["reward"] == pytest.approx(values.mean().item())
    assert result.metrics["reward_std"] == pytest.approx(values.std().item())
    assert result.metrics["frac_reward_zero_std"] == 0.5


def test_what_is_not_known_is_not_shown_as_zero(policy: Path, tmp_path: Path) -> None:
    async def reward_all(question: str, session: AgentSession) -> float:
        await ask_twice(question, session)
        return 1.0

    (result,) = run_steps(create_trainer(policy, tmp_path / "run", reward_all, steps=1))
    assert "entropy" not in result.metrics
    assert "entropy -  kl to sampler -" in describe_step(result.metrics)


async def ask_with(session: AgentSession, **options: Any) -> float:
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        message = {"role": "user", "content": "Who?"}
        reply = await client.chat.completions.create(
            model="policy",
            messages=[message],  # type: ignore[list-item]
            max_tokens=6,
            **options,
        )
    return float(len(reply.choices[0].message.content or ""))


def test_what_an_agent_asks_of_sampling_is_overridden_and_counted(
    policy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def restrict(question: str, session: AgentSession) -> float:
        return await ask_with(
            session,
            temperature=0.0,
            top_p=0.1,
            presence_penalty=1.5,
            frequency_penalty=0.0,
            seed=7,
            logit_bias={"40": 100},
            extra_body={"top_k": 1, "min_p": 0.0, "repetition_penalty": 1.3, "min_tokens": 6},
        )

    async def ask(question: str, session: AgentSession) -> float:
        return await ask_with(session)

    (restricted,) = run_steps(create_trainer(policy, tmp_path / "restricted", restrict, steps=1))
    (plain,) = run_steps(create_trainer(policy, tmp_path / "plain", ask, steps=1))
    names = {"temperature", "top_p", "top_k", "presence_penalty", "repetition_penalty", "seed", "logit_bias",
             "min_tokens"}  # fmt: skip
    counts = {name: value for name, value in restricted.metrics.items() if name.startswith("overridden/")}
    assert counts == {f"overridden/{name}": 6.0 for name in names}
    assert not any(name.startswith("overridden/") for name in plain.metrics)
    assert caplog.text.count("top_p: the agent asks for 0.1, which the run overrides") == 1
    # All episodes are sampled as if the agent had asked for nothing.
    for one, other in zip(restricted.groups, plain.groups, strict=True):
        for left, right in zip(one.trajectories, other.trajectories, strict=True):
            assert [sample.response_ids.tolist() for sample in left.samples] == [
                sample.response_ids.tolist() for sample in right.samples
            ]
    texts = {trajectory.reward for group in restricted.groups for trajectory in group.trajectories}
    assert len(texts) > 1


def test_the_sampling_of_the_run_is_used_and_overrides_the_agents(policy: Path, tmp_path: Path) -> None:
    async def ask(question: str, session: AgentSession) -> float:
        return await ask_with(session, top_p=0.9)

    (result,) = run_steps(create_trainer(policy, tmp_path / "run", ask, steps=1, sampling={"top_k": 1}))
    assert result.metrics["overridden/top_p"] == 6
    texts = {tuple(t.samples[0].response_ids.tolist()) for group in result.groups for t in group.trajectories}
    assert len(texts) <= 2  # Greedy, for at most two tasks.


def test_invalid_settings_are_refused_with_their_names() -> None:
    with pytest.raises(InputError, match="group_size: got 1, expected 2 or more"):
        small_config(group_size=1)
    with pytest.raises(InputError, match=r"sampling\.temperature"):
        TrainerConfig(sampling={"temperature": 0.5})
    with pytest.raises(InputError, match="group_std: got False, expected one of sample, population, none"):
        small_config(group_std=False)
    with pytest.raises(
        InputError, match="normaliser: got 'mean', expected one of token, trajectory, episode"
    ):
        small_config(normaliser="mean")
    with pytest.raises(InputError, match="layout: got 'packed', expected one of auto, tree, rows"):
        small_config(update={"layout": "packed"})
    with pytest.raises(InputError, match="max_staleness: got 1, expected 0 for a deterministic run"):
        small_config(deterministic=True, max_staleness=1)
    with pytest.raises(InputError, match="passes: got 0"):
        small_config(update={"passes": 0})


async def another_agent(task: Any, session: Any) -> float:
    return await ask_twice(task, session)


def test_a_resumed_run_has_the_settings_that_it_began_with(policy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_steps(create_trainer(policy, folder, steps=1))
    resume = partial(create_trainer, policy, folder, steps=2, resume=True)
    for changes, problem in (
        ({"agent": another_agent}, r"agent: this run has '.*:ask_twice', got '.*:another_agent'"),
        ({"group_size": 4}, "group_size: this run has 3, got 4"),
        ({"sampling": {"max_tokens": 3}}, r"sampling: this run has .*, got {'max_tokens': 3}"),
        ({"group_std": "none"}, "group_std: this run has 'sample', got 'none'"),
        ({"update": {"temperature": 0.5}}, r"update.temperature: this run has 1.0, got 0.5"),
        ({"update": {"weight_decay": 0.5}}, r"update.weight_decay: this run has 0.0, got 0.5"),
    ):
        with pytest.raises(InputError, match=problem):
            resume(**changes)
    config = small_config(steps=2)
    with pytest.raises(InputError, match="reward: this run has None, got"):
        Trainer(policy, ask_twice, QUESTIONS, config, run_folder=folder, resume=True, reward=lambda *_: 1.0)
    with pytest.raises(InputError, match="tasks: this run has"):
        Trainer(policy, ask_twice, ["another"], config, run_folder=folder, resume=True)
    assert resume(checkpoint_every=1, max_staleness=1, episode_timeout_s=9.0).step == 1


def test_a_run_folder_of_an_older_version_continues_with_one_sentence(
    policy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    run_steps(create_trainer(policy, folder, steps=1))
    settings = (folder / "run.json").read_text()
    (folder / "run.json").unlink()
    assert create_trainer(policy, folder, steps=2, resume=True).step == 1
    (sentence,) = [one.message for one in caplog.records if "run.json" in one.message]
    assert "does not say what the run had as model, agent, reward, tasks" in sentence
    assert (folder / "run.json").read_text() == settings
