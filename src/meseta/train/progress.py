"""Progress of training: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from meseta.telemetry.metrics_file import Line, TrainLine


class TrainProgress:
    """Prints steps, samples/s, loss, NE, AUC and remaining time to stderr, on rank 0 only."""

    def __init__(self, num_steps: int, *, first_step: int, visible: bool) -> None:
        self._console = Console(stderr=True)
        self._num_steps = num_steps
        self._is_visible = visible
        self._is_live = visible and self._console.is_terminal
        self._bar = Progress(
            TextColumn("train"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._is_live,
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("train", total=num_steps, completed=first_step, figures="")

    def __enter__(self) -> TrainProgress:
        if self._is_live:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_live:  # Stopping a bar that was not shown prints an empty line in some versions of rich.
            self._bar.stop()

    def step(self, step: int) -> None:
        """Set the number of steps done."""
        self._bar.update(self._task, completed=step)

    def log(self, line: Line) -> None:
        """Show the metrics of a line of metrics.jsonl."""
        if not self._is_visible:
            return
        if isinstance(line, TrainLine):
            left_s = (self._num_steps - line.step) * (line.seconds_per_step or 0.0)
            figures = f"{line.samples_per_s:,.0f} samples/s  {_format_metrics(line)}"
            self._bar.update(self._task, figures=figures)
            if not self._is_live:
                self.print_line(f"step {line.step}/{self._num_steps}  {figures}  {left_s:.0f} s left")
        else:
            figures = _format_metrics(line) or "no metrics"  # Empty split.
            self.print_line(f"{line.split} at step {line.step}: {figures}, {line.num_samples:,} samples")

    def print_line(self, text: str) -> None:
        """Print a line above the bar."""
        if self._is_visible:
            # Otherwise rich would wrap the line at 80 columns and interpret [brackets] as markup.
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def warn(self, notes: Iterable[str]) -> None:
        """Print each note as a warning."""
        for note in notes:
            self.print_line(f"warning: {note}")


def _format_metrics(line: Line) -> str:
    names = (("loss", "loss"), ("logloss", "logloss"), ("ne", "NE"), ("auc", "AUC"), ("calibration", "calibration"))
    values = [(label, value) for key, label in names if (value := getattr(line, key, None)) is not None]
    return "  ".join(f"{label} {value:.4f}" for label, value in values)
