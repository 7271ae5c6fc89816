"""Timelines of runs on ranks, against metrics.jsonl and the duration of a step."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meseta.comm import World, clocks
from meseta.config import RunConfig
from meseta.report import write_report
from meseta.spec.stages import OVERLAPS
from meseta.system.interruption import TrainingInterrupt
from meseta.telemetry.timeline import OUTSIDE_STAGES, WAITING, StepRange, Timeline, TraceDocument
from meseta.train.run_dir import RunDir
from meseta.train.trainer import Trainer
from small_run import metrics, settings, without_times

from .pool import RankPool
from .test_training import ROW_WISE

Ranks = Callable[[int], RankPool]


def profile(document: dict[str, Any], steps: StepRange | bool, stop_after: int | None = None) -> None:
    """Run with a timeline on the ranks of this process. Rank 1 receives a signal after step `stop_after`."""
    world = World.current()
    trainer = Trainer(RunConfig.model_validate(document), world, profile=steps)
    if world.rank == world.size - 1 and stop_after is not None:
        record = trainer._record

        def note(result: Any) -> None:
            record(result)
            if trainer.step == stop_after:
                trainer.checkpoint_manager.signal_listener.signal_number = signal.SIGTERM

        trainer._record = note  # type: ignore[method-assign]
    if stop_after is None:
        trainer.run()
        return
    with pytest.raises(TrainingInterrupt):
        trainer.run()


def read(run_dir: Path) -> Timeline:
    return TraceDocument.model_validate_json((run_dir / "timeline.json").read_bytes()).to_timeline()


def seconds(timeline: Timeline, rank: int, name: str) -> float:
    """Return the seconds of a stage over the whole timeline."""
    tracks = [track for track in timeline.select_tracks(rank, "stage") if track.name == name]
    return sum(one.end_ns - one.begin_ns for track in tracks for one in track.slices) / 1e9


def test_stages_and_transfers_are_those_of_metrics_jsonl(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """The timeline covers steps 5 to 8, as the second line does."""
    sizes = {"train__accumulate_steps": 2, "train__max_steps": 8, "plan": ROW_WISE}
    document = settings(tiny, tmp_path / "run", **sizes, pipeline__overlap=list(OVERLAPS))
    ranks(2).run(profile, document, StepRange(5, 8))
    line = next(line for line in metrics(tmp_path / "run") if line["kind"] == "train" and line["step"] == 8)
    timeline = read(tmp_path / "run")
    assert (timeline.first, timeline.last, len(timeline.ranks)) == (5, 8, 2)
    assert {name: 4 * spent_s for name, spent_s in line["stages_s"].items()} == pytest.approx(
        {name: seconds(timeline, 0, name) for name in line["stages_s"]}, abs=1e-6
    )
    slices = [one for track in timeline.select_tracks(0, "transfer") for one in track.slices]
    for name, means in line["transfers"].items():
        sent = [one for one in slices if one.name == name]
        assert len(sent) == 4 * means["num_calls"], name
        assert sum(one.args["intra-host bytes"] for one in sent) == pytest.approx(4 * means["intra_host_bytes"])
        assert sum(one.end_ns - one.begin_ns for one in sent) == pytest.approx(4e9 * means["seconds"], abs=1e3)
    waited_ns = sum(one.end_ns - one.begin_ns for one in slices if one.name == WAITING and one.step)
    assert waited_ns == pytest.approx(4e9 * sum(means["wait_s"] for means in line["transfers"].values()), abs=1e4)
    assert any(
        track.name == "ids in flight (2)" for track in timeline.select_tracks(0, "transfer")
    )  # of both micro-batches
    page = write_report(tmp_path / "run").read_text()
    assert "A step over time" in page and "rank 1" in page and 'class="stage stage-gradient_dist"' in page


def test_lanes_of_an_overlapped_step_add_up_to_it(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """Named stages cover 98 % of a step on every rank. Steps are as long as those of real runs.

    The shares of the steps differ by what else the machine does, so one of eight steps suffices.
    """
    sizes = {
        "train__batch_size": 300,
        "model__bottom_mlp": [512, 256],
        "model__top_mlp": [2048, 1024],
        "plan": ROW_WISE,
    }
    document = settings(tiny, tmp_path / "run", **sizes, train__epochs=2, pipeline__overlap=list(OVERLAPS))
    ranks(2).run(profile, document, StepRange(3, 10))
    timeline = read(tmp_path / "run")
    assert [one.step for one in timeline.steps(0)] == list(range(3, 11))
    for rank in range(2):
        left = []
        for step in timeline.steps(rank):
            length_ns, by_stage = step.end_ns - step.begin_ns, dict[str, int]()
            for track in timeline.select_tracks(rank, "stage"):
                inside = [one for one in track.slices if step.begin_ns <= one.begin_ns < step.end_ns]
                by_stage[track.name] = sum(one.end_ns - one.begin_ns for one in inside)
            assert sum(by_stage.values()) == length_ns
            left.append(by_stage.pop(OUTSIDE_STAGES) / length_ns)
        assert min(left) <= 0.02, left


def test_a_timeline_changes_no_metric_and_is_written_on_a_signal(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """SIGTERM stops the run in the middle. The resumed run writes another timeline with its own steps."""
    short = {"train__max_steps": 8, "plan": ROW_WISE}
    ranks(2).run(profile, settings(tiny, tmp_path / "plain", **short), False)
    assert not (tmp_path / "plain/timeline.json").exists()
    document = settings(tiny, tmp_path / "run", **short)
    ranks(2).run(profile, document, StepRange(2, 60), 3)
    # The votes of a rank are exchanged with the loss of a step.
    assert [one.step for one in read(tmp_path / "run").steps(1)] == [2, 3, 4]
    ranks(2).run(profile, document, StepRange(6, 7))
    assert [one.step for one in read(tmp_path / "run").steps(1)] == [6, 7]
    train = [[line for line in metrics(tmp_path / name) if line["kind"] == "train"] for name in ("plain", "run")]
    assert without_times(train[0]) == without_times(train[1])


def test_one_process_has_stages_alone(tiny: Path, tmp_path: Path) -> None:
    profile(settings(tiny, tmp_path / "run"), True)
    timeline = read(tmp_path / "run")
    assert [one.step for one in timeline.steps(0)] == list(range(8, 15)) and not timeline.select_tracks(0, "transfer")
    assert seconds(timeline, 0, "lookup") > 0
    events = json.loads((tmp_path / "run/timeline.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    RunDir(tmp_path / "run").clear()
    assert not (tmp_path / "run/timeline.json").exists()


def clocks_apart(ahead_s: float) -> tuple[float, float]:
    """Return clock offsets if rank 1 is on another host, whose clock is ahead."""
    world, known = World.current(), (clocks.time.perf_counter, clocks.clock_id)
    real = time.perf_counter
    try:
        if world.rank == 1:
            clocks.time = type("Ahead", (), {"perf_counter": staticmethod(lambda: real() + ahead_s)})  # type: ignore[attr-defined]
        clocks.clock_id = lambda: f"of rank {world.rank}"  # type: ignore[attr-defined]
        clock = clocks.measure_rank_clocks(world)[1]
    finally:
        clocks.time, clocks.clock_id = time, known[1]  # type: ignore[attr-defined]
    return clock.offset_s, clock.error_s


def test_clocks_of_two_hosts_are_aligned(ranks: Ranks) -> None:
    for offset_s, error_s in ranks(2).run(clocks_apart, 12_345.0):
        assert abs(offset_s + 12_345.0) <= error_s < 1.0
