"""`meseta train --profile`: some steps of a run as a file that Perfetto opens."""

from __future__ import annotations

from collections.abc import Callable

from meseta.comm import World
from meseta.comm.clocks import measure_rank_clocks
from meseta.spec import MesetaError
from meseta.telemetry.span import StageTimes
from meseta.telemetry.timeline import TIMELINE_FILE, StepRange, Timeline, make_rank_tracks
from meseta.telemetry.trace_events import to_trace_document
from meseta.train.resuming import CompletionReason
from meseta.train.run_dir import RunDir
from meseta.train.running_metrics import TrainingClock


def choose_profiled_steps(
    asked: StepRange | bool, done: int, num_steps: int, over: CompletionReason | None
) -> StepRange | None:
    """Which steps are profiled of a run that has `done` of `num_steps` steps behind it, where `asked` says so.

    Raises MesetaError where there are none: it is `over`, or those that are named are others.
    """
    if asked is False:
        return None
    if over is not None:
        raise MesetaError(
            f"--profile: this run {over.description}, and there is none left to profile; raise {over.config_key}, "
            f"choose another "
            "run_dir, or begin this one anew with --force"
        )
    if asked is True:
        return StepRange.default_after(done, num_steps)
    if asked.first <= done or asked.first > num_steps:
        raise MesetaError(
            f"--profile-steps {asked.first}:{asked.last}: this run does steps {done + 1:,} to {num_steps:,}; name some "
            "of these"
        )
    return StepRange(asked.first, min(asked.last, num_steps))


class Profiler:
    """Keeps what is timed in some steps of a run, and writes it when the last of them is done, or the run ends before.
    Every rank has one and calls it alike."""

    def __init__(
        self,
        steps: StepRange | None,
        run_dir: RunDir,
        world: World,
        times: StageTimes,
        done: int,
        clock: TrainingClock,
    ) -> None:
        """`steps`: which; None: none at all. `times` are those of the pipeline, of a run that has `done` steps behind
        it; `clock` stands still while the file is written.

        Raises MesetaError, on all ranks, where something else has the place of the file.
        """
        self._steps = steps
        self._run_dir, self._world, self._times = run_dir, world, times
        self._num_done_steps, self._clock = done, clock
        self._is_recording = False
        if steps is not None:
            world.run_on_rank_0(self._check_path)

    def on_step(self, step: int, say: Callable[[str], None]) -> None:
        """To be called between steps, when `step` are done: begins before the first one of `steps`, and ends as `close`
        does after the last one. Collective."""
        if self._steps is None:
            return
        if self._is_recording and step == self._steps.last:
            self.close(step, say)
        elif step == self._steps.first - 1:
            self._is_recording = True
            self._times.start_recording()
            self._world.transfers.start_recording()

    def close(self, step: int, say: Callable[[str], None]) -> None:
        """Write what there is after `step` steps, if anything is, tell where, and take in no more. Collective.

        Raises MesetaError, on all ranks, where it cannot be written.
        """
        steps, self._steps = self._steps, None
        if steps is None:
            return
        if not self._is_recording or step < steps.first:
            say(f"no timeline: training has ended at step {step:,}, before step {steps.first:,}")
            return
        with self._clock.pause():
            self._write(steps.first, step)
        say(f"timeline of steps {steps.first:,} to {step:,}: {self._run_dir.path / TIMELINE_FILE}")

    def _write(self, first: int, last: int) -> None:
        """What was kept of all ranks."""
        spans, transfers = self._times.stop_recording(), self._world.transfers.stop_recording()
        copies = self._times.pop_recorded_copies()
        clocks, rank = measure_rank_clocks(self._world), self._world.rank
        mine = make_rank_tracks(rank, spans, transfers, clocks[rank].offset_s, self._num_done_steps, copies)
        of_ranks = self._world.all_gather_object(mine)
        timeline = Timeline(first, last, tuple(clocks), tuple(track for tracks in of_ranks for track in tracks))
        self._world.run_on_rank_0(lambda: self._run_dir.write_json(TIMELINE_FILE, to_trace_document(timeline)))

    def _check_path(self) -> None:
        path = self._run_dir.path / TIMELINE_FILE
        if path.is_dir():
            raise MesetaError(f"--profile: {str(path)!r} is a folder; move it away")
