"""`meseta train --profile`: records some steps of a run in a timeline file for Perfetto."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from meseta.comm import World
from meseta.comm.clocks import measure_rank_clocks
from meseta.spec import MesetaError
from meseta.telemetry.span import StageTimes
from meseta.telemetry.timeline import TIMELINE_FILE, StepRange, Timeline, make_rank_tracks, to_trace_document
from meseta.train.resuming import CompletionReason
from meseta.train.run_dir import RunDir
from meseta.train.running_metrics import TrainingClock

ProfiledSteps: TypeAlias = StepRange | bool
"""Steps to profile. True selects a few steps after the start."""


def choose_profiled_steps(
    asked: ProfiledSteps, done: int, num_steps: int, over: CompletionReason | None
) -> StepRange | None:
    """Return the steps to profile in a run that has done `done` of `num_steps` steps, or `None` if `asked` is false.

    Raises MesetaError if the run is `over`, or the requested steps are not part of this run.
    """
    if asked is False:
        return None
    if over is not None:
        raise MesetaError(
            f"--profile: this run {over.description}, so no step is left to profile; raise {over.config_key}, "
            f"choose another "
            "run_dir, or start from the beginning with --force"
        )
    if asked is True:
        return StepRange.default_after(done, num_steps)
    if asked.first <= done or asked.first > num_steps:
        raise MesetaError(
            f"--profile-steps {asked.first}:{asked.last} is outside of this run, which does steps {done + 1:,} to "
            f"{num_steps:,}; choose some of these"
        )
    return StepRange(asked.first, min(asked.last, num_steps))


class Profiler:
    """Records stages and transfers during some steps, and writes a timeline after the last of them or at the end of the
    run.

    Every rank has one, and all ranks make the same calls.
    """

    def __init__(
        self,
        steps: StepRange | None,
        run_dir: RunDir,
        world: World,
        times: StageTimes,
        done: int,
        clock: TrainingClock,
    ) -> None:
        """Create a profiler. Raises MesetaError, on all ranks, if the path of the timeline is a folder.

        Args:
            steps: Steps to record, or `None`.
            run_dir: Run folder.
            world: Ranks of the run.
            times: Stage times of the pipeline.
            done: Number of steps that are done before.
            clock: Clock that is paused while the timeline is written.
        """
        self._steps = steps
        self._run_dir, self._world, self._times = run_dir, world, times
        self._num_done_steps, self._clock = done, clock
        self._is_recording = False
        if steps is not None:
            world.run_on_rank_0(self._check_path)

    def on_step(self, step: int, say: Callable[[str], None]) -> None:
        """Start or end recording after `step` steps are done. Collective. Call it between steps."""
        if self._steps is None:
            return
        if self._is_recording and step == self._steps.last:
            self.close(step, say)
        elif step == self._steps.first - 1:
            self._is_recording = True
            self._times.start_recording()
            self._world.transfers.start_recording()

    def close(self, step: int, say: Callable[[str], None]) -> None:
        """Write the steps recorded up to `step`, report the file, and stop. Collective. Raises MesetaError, on all
        ranks, if writing fails."""
        steps, self._steps = self._steps, None
        if steps is None:
            return
        if not self._is_recording or step < steps.first:
            say(f"no timeline: training ended at step {step:,}, before step {steps.first:,}")
            return
        with self._clock.pause():
            self._write(steps.first, step)
        say(f"timeline of steps {steps.first:,} to {step:,}: {self._run_dir.path / TIMELINE_FILE}")

    def _write(self, first: int, last: int) -> None:
        spans, transfers = self._times.stop_recording(), self._world.transfers.stop_recording()
        copies = self._times.pop_recorded_copies()
        clocks, rank = measure_rank_clocks(self._world), self._world.rank
        tracks_of_rank = make_rank_tracks(rank, spans, transfers, clocks[rank].offset_s, self._num_done_steps, copies)
        of_ranks = self._world.all_gather_object(tracks_of_rank)
        timeline = Timeline(first, last, tuple(clocks), tuple(track for tracks in of_ranks for track in tracks))
        self._world.run_on_rank_0(lambda: self._run_dir.write_json(TIMELINE_FILE, to_trace_document(timeline)))

    def _check_path(self) -> None:
        path = self._run_dir.path / TIMELINE_FILE
        if path.is_dir():
            raise MesetaError(f"--profile: {str(path)!r} must not be a folder; move it away")
