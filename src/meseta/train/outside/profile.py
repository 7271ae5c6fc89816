"""`meseta train --profile`: some steps of a run as a file that Perfetto opens."""

from __future__ import annotations

from collections.abc import Callable

from meseta.comm import World
from meseta.comm.clocks import rank_clocks
from meseta.spec import MesetaError
from meseta.telemetry.span import StageTimes
from meseta.telemetry.timeline import TIMELINE_NAME, StepRange, Timeline, rank_tracks
from meseta.telemetry.trace_events import trace_document
from meseta.train.resuming import Over
from meseta.train.run_dir import RunDir
from meseta.train.running import TrainingClock


def choose_steps(asked: StepRange | bool, done: int, num_steps: int, over: Over | None) -> StepRange | None:
    """Which steps are profiled of a run that has `done` of `num_steps` steps behind it, where `asked` says so.

    Raises MesetaError where there are none: it is `over`, or those that are named are others.
    """
    if asked is False:
        return None
    if over is not None:
        raise MesetaError(
            f"--profile: this run {over.why}, and there is none left to profile; raise {over.key}, choose another "
            "run_dir, or begin this one anew with --force"
        )
    if asked is True:
        return StepRange.after(done, num_steps)
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
        self._done, self._clock = done, clock
        self._is_recording = False
        if steps is not None:
            world.on_first(self._check_place)

    def reach(self, step: int, say: Callable[[str], None]) -> None:
        """To be called between steps, when `step` are done: begins before the first one of `steps`, and ends as `close`
        does after the last one. Collective."""
        if self._steps is None:
            return
        if self._is_recording and step == self._steps.last:
            self.close(step, say)
        elif step == self._steps.first - 1:
            self._is_recording = True
            self._times.record()
            self._world.transfers.record()

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
        with self._clock.stopped():
            self._write(steps.first, step)
        say(f"timeline of steps {steps.first:,} to {step:,}: {self._run_dir.path / TIMELINE_NAME}")

    def _write(self, first: int, last: int) -> None:
        """What was kept of all ranks."""
        spans, transfers = self._times.recorded(), self._world.transfers.recorded()
        copies = self._times.recorded_copies()
        clocks, rank = rank_clocks(self._world), self._world.rank
        mine = rank_tracks(rank, spans, transfers, clocks[rank].offset_s, self._done, copies)
        of_ranks = self._world.gather_objects(mine)
        timeline = Timeline(first, last, tuple(clocks), tuple(track for tracks in of_ranks for track in tracks))
        self._world.on_first(lambda: self._run_dir.write_json(TIMELINE_NAME, trace_document(timeline)))

    def _check_place(self) -> None:
        path = self._run_dir.path / TIMELINE_NAME
        if path.is_dir():
            raise MesetaError(f"--profile: {str(path)!r} is a folder; move it away")
