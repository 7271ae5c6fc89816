"""Progress of training: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from meseta.config import RunConfig
from meseta.telemetry.detail import CurrentDetail, Detail, LifeSignTimer, can_redraw
from meseta.telemetry.metrics_file import Line, TrainLine


class TrainProgress:
    """Prints samples, samples/s, loss, remaining time and evaluations to stderr, on rank 0 only.

    Without a terminal, a line appears per evaluation, and after a minute without any. See `Detail` for more or less.
    """

    def __init__(
        self,
        num_steps: int,
        num_samples: int,
        *,
        first_sample: int,
        visible: bool,
        trial: bool = False,
    ) -> None:
        """Create the progress of `num_steps` steps with about `num_samples` samples, including those done before.

        Args:
            num_steps: Number of steps of the run.
            num_samples: Estimated number of samples of the run.
            first_sample: Number of samples that are done.
            visible: Whether to print anything.
            trial: Whether this is a trial, whose lines are printed only with `--verbose`.
        """
        self._console = Console(stderr=True)
        self._num_steps = num_steps
        self._is_visible = visible
        self._prints_lines = visible and CurrentDetail.level > (Detail.NORMAL if trial else Detail.QUIET)
        self._is_live = visible and can_redraw(self._console) and not CurrentDetail.is_quiet()
        # Trials show that they live, although they print no evaluations.
        self._gives_life_signs = visible and not self._is_live and not CurrentDetail.is_quiet()
        self._timer = LifeSignTimer()
        self._metrics = ""
        self._seconds_per_step = 0.0
        self._bar = Progress(
            TextColumn("trial" if trial else "train"),
            BarColumn(bar_width=16),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} samples"),
            TextColumn("{task.fields[metrics]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._is_live,
            refresh_per_second=4,
            transient=trial,
        )
        self._task = self._bar.add_task("train", total=max(num_samples, 1), completed=first_sample, metrics="")

    def __enter__(self) -> TrainProgress:
        if self._is_live:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_live:  # Stopping a bar that was not shown prints an empty line in some versions of rich.
            self._bar.stop()

    def step(self, step: int, num_samples: int) -> None:
        """Set the numbers of steps and samples done."""
        # The total is an estimate, because filters leave out samples.
        total = num_samples if step == self._num_steps else None
        self._bar.update(self._task, completed=num_samples, total=total)
        if self._gives_life_signs and self._timer.is_due():
            self._print(self._format_step(step))

    def log(self, line: Line) -> None:
        """Show the metrics of a line of metrics.jsonl."""
        if isinstance(line, TrainLine):
            self._seconds_per_step = line.seconds_per_step or 0.0
            self._metrics = f"{line.samples_per_s:,.0f} samples/s  {_format_metrics(line)}"
            loss = "" if line.loss is None else f"  loss {line.loss:.4f}"
            self._bar.update(self._task, metrics=f"{line.samples_per_s:,.0f}/s{loss}")
            if CurrentDetail.level == Detail.VERBOSE:
                self.print_line(self._format_step(line.step))
        else:
            metrics = _format_metrics(line) or "no metrics"  # Empty split.
            self.print_line(f"{line.split} at step {line.step}: {metrics}, {line.num_samples:,} samples")

    def _format_step(self, step: int) -> str:
        left_s = (self._num_steps - step) * self._seconds_per_step
        rest = f"  {self._metrics}  {left_s:.0f} s left" if self._metrics else ""
        return f"step {step}/{self._num_steps}{rest}"

    def print_line(self, text: str) -> None:
        """Print a line above the bar, unless this is a trial or the command is quiet."""
        if self._prints_lines:
            self._print(text)

    def _print(self, text: str) -> None:
        self._timer.restart()
        # Otherwise rich would wrap the line at 80 columns and interpret [brackets] as markup.
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def print_result(self, text: str) -> None:
        """Print a line above the bar, also if the command is quiet."""
        if self._is_visible:
            self._print(text)

    def warn(self, notes: Iterable[str]) -> None:
        """Print each note as a warning."""
        for note in notes:
            self.print_result(f"warning: {note}")


class RateDrops:
    """Detects drops of learning rates by schedules 'step' and 'plateau'.

    A schedule that drops between two lines of metrics.jsonl counts as a smooth decay, which is not reported.
    """

    def __init__(self, config: RunConfig) -> None:
        schedules = {"tables": config.embedding_schedule, "dense part": config.dense_schedule}
        self._parts = [
            part
            for part, schedule in schedules.items()
            if schedule.kind == "plateau"
            or (schedule.kind == "step" and (schedule.step_every or 1) >= config.train.log_every_steps)
        ]
        self._rates: dict[str, float] = {}

    def poll(self, step: int, table_rate: float, dense_rate: float) -> str | None:
        """Return a line with the rates that are lower in step `step`, counted from 1, than in the previous call, or
        `None` without any."""
        rates, before = {"tables": table_rate, "dense part": dense_rate}, self._rates
        self._rates = rates
        drops = [
            f"{part} {before[part]:.4g} -> {rates[part]:.4g}"
            for part in self._parts
            if rates[part] < before.get(part, 0.0)
        ]
        return f"learning rate from step {step}: {', '.join(drops)}" if drops else None


def _format_metrics(line: Line) -> str:
    names = (("loss", "loss"), ("logloss", "logloss"), ("logloss_clamped", "(clamped)"), ("ne", "NE"), ("auc", "AUC"),
             ("calibration", "calibration"))  # fmt: skip
    values = [(label, value) for key, label in names if (value := getattr(line, key, None)) is not None]
    return "  ".join(f"{label} {value:.4f}" for label, value in values)
