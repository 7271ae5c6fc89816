"""`meseta status RUN`: progress of a run, state of its ranks, the rank that others wait for, and Python stacks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from meseta.system.time_limits import HANG_EXIT_CODE
from meseta.telemetry.diagnosis import (
    MISSED_HEARTBEAT_TIMEOUT_S,
    Diagnosis,
    describe_state,
    diagnose_exit,
    find_diverged,
    find_stuck,
    find_unresponsive,
)
from meseta.telemetry.formatting import format_decimal, format_duration
from meseta.telemetry.rank_record import RANKS_FOLDER, RankProcess, collect_stacks, read_rank_records

POLL_INTERVAL_S = 1.5
"""Seconds between two reads of the rank records. Each rank sends a heartbeat in this time."""
STUCK_TIMEOUT_S = 5.0
"""Seconds of waiting for one transfer after which a rank counts as stuck. Most transfers take milliseconds."""


def status(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a training run.")],
    stacks: Annotated[
        bool | None,
        typer.Option(
            help="Request Python stacks from the ranks of this host.", show_default="--stacks if the run is stuck"
        ),
    ] = None,
) -> None:
    """Show the progress of a run, the state of each rank, and the rank that others wait for.

    Exits with 76 if the run is stuck, and with 0 if it is running or has ended.
    """
    if not (run_dir / RANKS_FOLDER).exists() and (progress := _read_progress(run_dir)):
        print(f"{run_dir}: no rank records, which only runs on several ranks write, on a file system of their hosts")
        print(*progress, sep="\n")
        return
    # Report missing records before the wait.
    read_rank_records(run_dir)
    time.sleep(POLL_INTERVAL_S)
    ranks = read_rank_records(run_dir)
    now_ns = time.monotonic_ns()
    trouble, how = _diagnose(ranks, now_ns)
    state = next(iter(ranks.values())).state
    absent = f", of which {len(ranks)} have a record" if len(ranks) != state.num_ranks else ""
    print(f"{run_dir}: {state.num_ranks} ranks of `{state.command}`{absent}, {how}", *_read_progress(run_dir), sep="\n")
    for number, rank in ranks.items():
        print(f"rank {number} on {rank.state.host}, process {rank.state.pid}: {_describe_rank(rank, now_ns)}")
    if trouble is not None:
        print(f"{trouble.kind}: {trouble.text}")
    wants_stacks = how == "stuck" if stacks is None else stacks
    for number, text in (collect_stacks(ranks) if wants_stacks else {}).items():
        print(
            f"\nstacks of rank {number}:"
            if text
            else f"\nno stacks of rank {number}: {_missing_stacks_reason(ranks[number])}"
        )
        if text:
            print(text.rstrip())
    raise typer.Exit(HANG_EXIT_CODE if how == "stuck" else 0)


def _read_progress(run_dir: Path) -> list[str]:
    """Return one line of text about the newest training line and the newest evaluation in metrics.jsonl, if any."""
    # Pydantic takes as long to import as everything else here.
    from meseta.telemetry.metrics import METRICS
    from meseta.telemetry.metrics_file import METRICS_FILE, EvalLine, TrainLine, read_metrics_lines

    train, evaluation = None, None
    try:
        for line in read_metrics_lines(run_dir / METRICS_FILE):
            train = line.record if isinstance(line.record, TrainLine) else train
            evaluation = line.record if isinstance(line.record, EvalLine) else evaluation
        age_s = time.time() - (run_dir / METRICS_FILE).stat().st_mtime
    except OSError:  # Training writes the file at its first log.
        return []
    texts = []
    if train is not None:
        speed = f", {train.samples_per_s:,.0f} samples/s" if train.samples_per_s is not None else ""
        values = {"log loss": train.label_loss, "NE": train.ne, "AUC": train.auc}
        texts.append(f"step {train.step:,}{speed}{_format_metrics(values)}")
    if evaluation is not None:
        values = {metric.name: metric.value_in(evaluation) for metric in METRICS if metric.is_main}
        texts.append(f"{evaluation.split} at step {evaluation.step:,}{_format_metrics(values)}")
    return [f"{METRICS_FILE}, written {format_duration(max(age_s, 0.0))} ago: {'; '.join(texts)}"] if texts else []


def _format_metrics(values: Mapping[str, float | None]) -> str:
    return "".join(f", {name} {format_decimal(value)}" for name, value in values.items() if value is not None)


def _diagnose(ranks: Mapping[int, RankProcess], now_ns: int) -> tuple[Diagnosis | None, str]:
    """Return (diagnosis, state of the run). The diagnosis is `None` if no problem was detected."""
    alive = {number: rank.state for number, rank in ranks.items() if rank.is_alive}
    if not any(rank.is_local for rank in ranks.values()):
        return None, "on other hosts: run the command there"
    if not alive:
        return diagnose_exit({number: rank.state for number, rank in ranks.items() if rank.is_local}), "ended"
    silent = {number: (now_ns - state.heartbeat_ns) / 1e9 for number, state in alive.items()}
    trouble = (
        find_unresponsive(alive, silent, MISSED_HEARTBEAT_TIMEOUT_S)
        or find_diverged(alive)
        or find_stuck(alive, now_ns, STUCK_TIMEOUT_S)
    )
    return trouble, "running" if trouble is None else "stuck"


def _describe_rank(rank: RankProcess, now_ns: int) -> str:
    """Return the state of a rank and its last heartbeat, or the reason why it is blocked."""
    if not rank.is_local:
        # Times of another host cannot be compared with this host's clock.
        return describe_state(rank.state, None)
    if not rank.is_alive:
        return f"ended, last at {describe_state(rank.state, None)}"
    beat = f"heartbeat {max((now_ns - rank.state.heartbeat_ns) / 1e9, 0.0):.1f} s ago"
    return f"{describe_state(rank.state, now_ns)}; {rank.blocked_reason or beat}"


def _missing_stacks_reason(rank: RankProcess) -> str:
    """Return why a rank that is alive has not written its stacks."""
    if rank.blocked_reason:
        way = f"; `kill -CONT {rank.state.pid}` resumes it" if rank.is_stopped else ""
        return f"it is {rank.blocked_reason} and cannot answer{way}"
    return "it does not answer; it may belong to another user, or be waiting for a processor"
