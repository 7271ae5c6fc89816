"""Progress lines of training."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from meseta.config import validate_document
from meseta.telemetry.detail import CurrentDetail, Detail
from meseta.telemetry.metrics_file import EvalLine, TrainLine
from meseta.train import progress as module
from meseta.train.progress import RateDrops, TrainProgress
from small_run import settings

LIFE_SIGN = "meseta.telemetry.detail.LIFE_SIGN_S"
STEP = TrainLine(step=2, num_samples=20, loss=0.5, ne=0.9, samples_per_s=1234.0, seconds_per_step=1.0)
STEP_TEXT = "step 2/4  1,234 samples/s  loss 0.5000  NE 0.9000  2 s left"
EVALUATION_TEXT = "test at step 2: AUC 0.7500, 1,200 samples"


def lines(capsys: pytest.CaptureFixture[str], *, trial: bool = False, visible: bool = True) -> list[str]:
    """Return the lines of a logged step, an evaluation, a note, a result and a warning."""
    progress = TrainProgress(4, 40, first_sample=0, visible=visible, trial=trial)
    with progress:
        progress.log(STEP)
        progress.step(2, 20)
        progress.log(EvalLine(step=2, num_samples=1200, auc=0.75))
        progress.print_line("note")
        progress.print_result("result")
        progress.warn(["full"])
    return capsys.readouterr().err.splitlines()


def test_an_evaluation_of_no_samples_has_no_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    TrainProgress(1, 1, first_sample=0, visible=True).log(EvalLine(step=1, num_samples=0, auc=None, logloss=None))
    assert capsys.readouterr().err.splitlines() == ["test at step 1: no metrics, 0 samples"]


@pytest.mark.parametrize(
    ("level", "trial", "first"),
    [
        (Detail.QUIET, False, []),
        (Detail.NORMAL, False, [EVALUATION_TEXT, "note"]),
        (Detail.VERBOSE, False, [STEP_TEXT, EVALUATION_TEXT, "note"]),
        (Detail.QUIET, True, []),
        (Detail.NORMAL, True, []),
        (Detail.VERBOSE, True, [STEP_TEXT, EVALUATION_TEXT, "note"]),
    ],
)
def test_lines_of_a_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, level: Detail, trial: bool, first: list[str]
) -> None:
    monkeypatch.setattr(CurrentDetail, "level", level)
    assert lines(capsys, trial=trial) == [*first, "result", "warning: full"]
    assert lines(capsys, trial=trial, visible=False) == []


@pytest.mark.parametrize("trial", [False, True])
def test_a_silent_minute_ends_with_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, trial: bool
) -> None:
    monkeypatch.setattr(LIFE_SIGN, 0.0)
    assert STEP_TEXT in lines(capsys, trial=trial)
    monkeypatch.setattr(CurrentDetail, "level", Detail.QUIET)
    assert STEP_TEXT not in lines(capsys, trial=trial)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_forced_colors_make_no_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Notebooks set these variables.
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-color"}.items():
        monkeypatch.setenv(name, value)
    assert lines(capsys)[:-2] == [EVALUATION_TEXT, "note"]


def test_a_terminal_has_a_bar_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    for level, shown in ((Detail.NORMAL, True), (Detail.QUIET, False)):
        screen = Screen()
        terminal = partial(
            Console, file=screen, force_terminal=True, width=100, _environ={"TERM": "xterm"}, color_system=None
        )
        monkeypatch.setattr(module, "Console", lambda stderr, terminal=terminal: terminal())
        monkeypatch.setattr(CurrentDetail, "level", level)
        # The estimated total of 50 samples is corrected at the end. The bar itself is drawn a few times per second.
        with TrainProgress(4, 50, first_sample=10, visible=True) as progress:
            progress.log(STEP)
            progress.step(2, 20)
            progress.log(EvalLine(step=2, num_samples=1200, auc=0.75))
            progress.step(4, 40)
        text = screen.getvalue()
        assert ("10/50 samples" in text and EVALUATION_TEXT in text) == shown
        assert ("40/40 samples 1,234/s  loss 0.5000" in text) == shown and "step 2/4" not in text


@pytest.mark.parametrize(
    ("schedule", "drops"),
    [
        ({"kind": "plateau"}, [3, 5]),
        ({"kind": "step", "step_every": 4}, [3, 5]),
        ({"kind": "step", "step_every": 3}, []),  # Lines are logged every four steps.
        ({"kind": "cosine"}, []),
    ],
)
def test_drops_of_rates(tmp_path: Path, schedule: dict[str, object], drops: list[int]) -> None:
    config = validate_document(settings(tmp_path, tmp_path / "run", schedule=schedule, train__eval_every_steps=1))
    detector = RateDrops(config)
    # The rates rise during the warm-up.
    rates = [(0.05, 0.5), (0.1, 1.0), (0.02, 1.0), (0.02, 1.0), (0.004, 0.25)]
    texts = {step: text for step, pair in enumerate(rates, start=1) if (text := detector.poll(step, *pair))}
    assert list(texts) == drops
    if drops:
        assert texts[3] == "learning rate from step 3: tables 0.1 -> 0.02"
        assert texts[5] == "learning rate from step 5: tables 0.02 -> 0.004, dense part 1 -> 0.25"
