"""From calls to samples: a session and its export, compared with the builder of agentcore-rl-toolkit."""

from __future__ import annotations

from functools import partial

import numpy as np
from agentcore_rl_toolkit.rollout_gateway import BaseTrace, TraceRecord, TrajectoryManager, TurnRecord

from benchmarks.measure import BenchmarkTable, best_cpu_s, format_ms
from benchmarks.workloads import ALL_WORKLOADS, Workload, commit_step, run_workload
from branchline import Export, Request, Session, export_samples


def table() -> BenchmarkTable:
    report = BenchmarkTable(
        "Trajectory building: 250 sampled + 400 observed tokens a turn",
        [
            "workload",
            "sampled",
            "delivered",
            "theirs",
            "target",
            "CPU ms",
            "+reading",
            "theirs",
            "ratio",
            "+reading",
            "target",
        ],
        [
            "Every call: prepare, commit, deliver; then export_samples. Theirs: record_turn, get_trajectory.",
            "With reading: messages read from dicts as well. Their prompt ids come pre-made; ours do not.",
            "Ratio: their CPU time over ours. Their prompts share int objects, which they compare faster.",
        ],
    )
    for make in ALL_WORKLOADS:
        workload = make()
        _check_prompts(workload)
        ours, theirs = _run_branchline(workload), _run_reference(workload)
        delivered = _trained_by_branchline(workload, ours) / workload.sampled_tokens
        their_share = _trained_by_reference(workload, theirs) / workload.sampled_tokens
        del ours, theirs
        canonical, read, reference = best_cpu_s(
            partial(_run_branchline, workload),
            partial(_run_branchline, workload, from_raw=True),
            partial(_run_reference, workload),
        )
        report.add_row(
            workload.name,
            f"{workload.sampled_tokens:,}",
            f"{delivered:.1%}",
            f"{their_share:.1%}",
            report.target_cell("100 %", delivered == 1),
            format_ms(canonical),
            format_ms(read),
            format_ms(reference),
            f"{reference / canonical:.1f}×",
            f"{reference / read:.1f}×",
            report.target_cell("ratio > 1", canonical < reference),
        )
    return report


def _run_branchline(workload: Workload, *, from_raw: bool = False) -> Export:
    return export_samples(run_workload(workload, from_raw=from_raw).tree)


def _run_reference(workload: Workload) -> list[TraceRecord]:
    manager = TrajectoryManager()
    for step in workload.steps:
        manager.record_turn(
            "episode",
            turn=TurnRecord(step.prompt_ids, step.id_list, "stop", step.logprob_list),
            prompt_messages=step.raw_messages,
            response_message=step.raw_output,
        )
    records: list[TraceRecord] = manager.get_trajectory("episode", base_sample=BaseTrace())
    return records


def _check_prompts(workload: Workload) -> None:
    """Asserts that both sides get the same prompt ids."""
    session = Session("check", workload.codec)
    for step in workload.steps:
        prompt_ids = session.prepare(Request(step.messages)).prompt_ids
        assert prompt_ids.tolist() == step.prompt_ids, "the sides get different prompts"
        commit_step(session, step)


def _trained_by_branchline(workload: Workload, export: Export) -> int:
    trained = [sample.response_ids[sample.response_mask == 1] for sample in export.samples]
    return _distinct_sampled(workload, np.concatenate(trained).tolist())


def _trained_by_reference(workload: Workload, records: list[TraceRecord]) -> int:
    trained: list[int] = []
    for record in records:
        response = record.token_ids[len(record.token_ids) - len(record.loss_mask) :]
        trained += [token for token, mask in zip(response, record.loss_mask, strict=True) if mask]
    return _distinct_sampled(workload, trained)


def _distinct_sampled(workload: Workload, trained: list[int]) -> int:
    sampled = {token for step in workload.steps for token in step.id_list}
    return len(sampled.intersection(trained))
