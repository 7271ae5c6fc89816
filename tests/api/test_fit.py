"""A job that Python starts has the result of the command, also after an interruption."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import meseta
from api.conftest import CONFIG
from api.test_rows import KINDS
from meseta.api.fit import _choose_run_dir, _split_options
from meseta.cli.main import main
from meseta.data.prepare.staging import SPOOL_FOLDER
from meseta.errors import MesetaError
from sampling import sample
from small_run import final_checksum


@pytest.fixture
def run_command(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`run_command("train", ...)` runs a command of `meseta` in this process; it must succeed."""
    handler = signal.getsignal(signal.SIGINT)

    def run(*arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["meseta", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        assert not left.value.code

    yield run
    signal.signal(signal.SIGINT, handler)


def test_rows_in_memory_give_the_checkpoint_of_the_command(
    table: pa.Table, trained: meseta.Run, tmp_path: Path, run_command: Callable[..., None]
) -> None:
    pq.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    run_dir = tmp_path / "run"
    data = "--data", tmp_path / "rows.parquet", "--label", "label"
    run_command("train", tmp_path / "config.yaml", f"run_dir={run_dir}", *data)
    assert final_checksum(trained.path) == final_checksum(run_dir)
    assert not (trained.path / SPOOL_FOLDER).exists()


@pytest.mark.parametrize("kind", sample([*KINDS, "file"], k=0, seed=0))
def test_all_kinds_of_rows_give_the_same_checkpoint(
    kind: str, table: pa.Table, trained: meseta.Run, tmp_path: Path
) -> None:
    if kind == "file":
        pq.write_table(table, tmp_path / "rows.parquet")
    data = tmp_path / "rows.parquet" if kind == "file" else KINDS.get(kind, KINDS["stream"])(table)
    run = meseta.fit(data, "label", config=CONFIG, run_dir=tmp_path / "run", nproc=1)
    assert final_checksum(run.path) == final_checksum(trained.path)


def test_a_run_knows_its_result(trained: meseta.Run) -> None:
    assert set(trained.metrics) == {"valid", "test"} and 0.5 < trained.metrics["test"]["auc"] < 1
    history = trained.history.to_pylist()
    steps = [row["step"] for row in history if row["split"] == "train"]
    assert steps == sorted(steps) and steps[:2] == [5, 10] and history[0]["loss"] > 0
    assert {"train", "valid", "test"} == {row["split"] for row in history}
    assert trained.evaluate() == pytest.approx(
        {name: trained.metrics["test"][name] for name in trained.evaluate()}, nan_ok=True
    )
    assert trained.config.model.name == "deepfm" and trained.checkpoints[-1].summary is not None
    assert f"<code>{trained.path}</code>" in trained._repr_html_() and trained.report().read_text().startswith("<!")
    assert sum(p.numel() for p in trained.model.parameters()) > 0 and not trained.model.training


def test_predictions_are_those_of_the_command(
    table: pa.Table, trained: meseta.Run, tmp_path: Path, run_command: Callable[..., None]
) -> None:
    pq.write_table(table.slice(0, 300), tmp_path / "rows.parquet")
    out = tmp_path / "predictions.parquet"
    run_command("predict", trained.path, "--out", out, "--data", tmp_path / "rows.parquet")
    expected = pq.read_table(out)["prediction"]
    assert trained.predict(tmp_path / "rows.parquet")["prediction"].equals(expected)
    # Without labels, with other columns, in another order.
    shuffled = table.slice(0, 300).drop_columns("label").append_column("other", pa.array(["x"] * 300))
    assert trained.predict(shuffled.select(shuffled.column_names[::-1]))["prediction"].equals(expected)


def test_rows_without_a_column_or_of_another_type_are_refused(table: pa.Table, trained: meseta.Run) -> None:
    some = table.slice(0, 5)
    with pytest.raises(MesetaError, match=r"^data lacks 'city'"):
        trained.predict(some.drop_columns("city"))
    with pytest.raises(MesetaError, match=r"^data: column 'price' must be a number"):
        trained.predict(some.set_column(1, "price", pa.array(["a"] * 5)))


def test_a_moved_run_opens(table: pa.Table, trained: meseta.Run, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(trained.path, tmp_path / "moved"))
    shutil.rmtree(moved / "data")
    run = meseta.open_run(moved)
    rows = table.slice(0, 9)
    assert run.predict(rows).equals(trained.predict(rows)) and run.metrics == trained.metrics
    with pytest.raises(MesetaError, match="nothing"):
        meseta.open_run(tmp_path / "nothing")


@pytest.mark.soak
def test_the_same_rows_resume(table: pa.Table, trained: meseta.Run) -> None:
    before = final_checksum(trained.path)
    again = meseta.fit(KINDS["stream"](table), "label", config=CONFIG, run_dir=trained.path)
    assert final_checksum(again.path) == before


def test_other_rows_are_refused(table: pa.Table, trained: meseta.Run) -> None:
    with pytest.raises(MesetaError, match="has a run on other rows than these"):
        meseta.fit(table.slice(1), "label", config=CONFIG, run_dir=trained.path)
    assert not (trained.path / SPOOL_FOLDER).exists()


@pytest.mark.soak
def test_a_run_starts_from_another_one(
    table: pa.Table, trained: meseta.Run, tmp_path: Path, run_command: Callable[..., None]
) -> None:
    """Rows in memory and files have the same bits, and the parent is given as a path or text."""
    rows = table.slice(0, 300)
    pq.write_table(rows, tmp_path / "rows.parquet")
    fitted = meseta.fit(rows, run_dir=tmp_path / "fitted", start_from=trained.path)
    run_command("train", "--start-from", str(trained.path), "--data", str(tmp_path / "rows.parquet"),
                f"run_dir={tmp_path / 'command'}")  # fmt: skip
    assert final_checksum(fitted.path) == final_checksum(tmp_path / "command") != final_checksum(trained.path)
    with pytest.raises(MesetaError, match=r"start_from .* does not exist"):
        meseta.fit(rows, run_dir=tmp_path / "none", start_from=tmp_path / "nowhere")


@pytest.mark.soak
def test_a_moved_run_continues_with_the_same_rows(table: pa.Table, trained: meseta.Run, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(trained.path, tmp_path / "moved"))
    config = moved / "config.yaml"
    config.write_text(config.read_text().replace(str(trained.path), "/nowhere/run"))
    with pytest.raises(MesetaError, match=r"has a run on other rows than these \(hash \w+, now \w+\)"):
        meseta.fit(table.slice(1), "label", config=CONFIG, run_dir=moved)
    # Nothing is prepared or trained again.
    files = {path: path.stat().st_mtime_ns for path in moved.glob("data/**/*")}
    assert files and meseta.open_run(moved).evaluate() == trained.evaluate()
    run = meseta.fit(table, "label", config=CONFIG, run_dir=moved)
    assert run.metrics == trained.metrics and final_checksum(moved) == final_checksum(trained.path)
    assert {path: path.stat().st_mtime_ns for path in moved.glob("data/**/*")} == files


@pytest.mark.soak
def test_an_interrupted_run_resumes_after_it_was_moved(table: pa.Table, tmp_path: Path) -> None:
    job, run_dir = start_job(table, tmp_path, 1)
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=60)
    before = meseta.open_run(run_dir).checkpoints[-1].summary
    for name in ("fit", "resume"):
        shutil.copytree(run_dir, tmp_path / name / "run")
    run_dir.rename(tmp_path / "away")
    exec(JOB.format(config=CONFIG, data=str(tmp_path / "rows.parquet"), run_dir=str(tmp_path / "fit/run"), nproc=1))
    meseta.open_run(tmp_path / "resume/run").resume()
    for name in ("fit", "resume"):
        run = meseta.open_run(tmp_path / name / "run")
        after = run.checkpoints[-1].summary
        assert before is not None and after is not None and after.step > before.step and "test" in run.metrics
        assert not run_dir.exists()
    assert final_checksum(tmp_path / "fit/run") == final_checksum(tmp_path / "resume/run")


def test_a_second_fit_in_a_folder_is_refused(table: pa.Table, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def batches() -> Iterator[pa.RecordBatch]:
        yield table.to_batches()[0]
        with pytest.raises(MesetaError, match=rf"/run' is in use: another fit or resume of process {os.getpid()} on "):
            meseta.fit(table, "label", run_dir=run_dir)
        assert (run_dir / SPOOL_FOLDER).exists()
        raise OSError("the database is gone")

    with pytest.raises(OSError, match="the database is gone"):
        meseta.fit(pa.RecordBatchReader.from_batches(table.schema, batches()), "label", run_dir=run_dir)
    assert list(run_dir.iterdir()) == []


def test_resume_is_refused_while_a_fit_spools_rows(table: pa.Table, trained: meseta.Run, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(trained.path, tmp_path / "run"))

    def batches() -> Iterator[pa.RecordBatch]:
        yield table.to_batches()[0]
        with pytest.raises(MesetaError, match=rf"^resume: run_dir .* is in use: another fit .* {os.getpid()} on "):
            meseta.open_run(run_dir).resume()
        assert (run_dir / SPOOL_FOLDER).exists()
        raise OSError("the database is gone")

    with pytest.raises(OSError, match="the database is gone"):
        meseta.fit(pa.RecordBatchReader.from_batches(table.schema, batches()), "label", run_dir=run_dir)


@pytest.mark.soak
def test_a_killed_fit_leaves_no_lock(table: pa.Table, tmp_path: Path) -> None:
    pq.write_table(table, tmp_path / "rows.parquet")
    text = f"""
import time, pyarrow as pa, pyarrow.parquet as pq, meseta
def batches():
    yield table.to_batches()[0]
    print("spooled", flush=True)
    time.sleep(600)
table = pq.read_table({str(tmp_path / "rows.parquet")!r})
meseta.fit(pa.RecordBatchReader.from_batches(table.schema, batches()), run_dir={str(tmp_path / "run")!r})
"""
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None and job.stdout.readline() == "spooled\n"
        with pytest.raises(MesetaError, match=f"is in use: another fit or resume of process {job.pid} on "):
            meseta.fit(table, "label", config=CONFIG, run_dir=tmp_path / "run")
        job.kill()
    assert (tmp_path / "run" / SPOOL_FOLDER).exists()
    run = meseta.fit(table, "label", config=CONFIG, run_dir=tmp_path / "run")
    assert "test" in run.metrics and not list(run.path.glob(f"{SPOOL_FOLDER}*"))


def test_errors_of_the_command_are_raised(table: pa.Table, tmp_path: Path) -> None:
    with pytest.raises(MesetaError, match=r"^config: key 'train': early_stopping.patience needs evaluations"):
        meseta.fit(table, "label", config={"train": {"early_stopping": {"patience": 2}}}, run_dir=tmp_path / "a")
    with pytest.raises(MesetaError, match="valid=True must be a share"):
        meseta.fit(table, "label", valid=True, run_dir=tmp_path / "b")
    with pytest.raises(MesetaError, match=r"multi_valued 'a,b=,' has a comma"):
        meseta.fit(table, "label", multi_valued=["a,b=,"], run_dir=tmp_path / "c")
    with pytest.raises(MesetaError, match=r"dense 'price,age' has a comma"):
        meseta.fit(table, "label", dense=["price,age"], run_dir=tmp_path / "c")
    assert not list(tmp_path.glob(f"*/{SPOOL_FOLDER}"))


@pytest.mark.soak
def test_multi_valued_text_is_that_of_the_command(
    table: pa.Table, tmp_path: Path, run_command: Callable[..., None]
) -> None:
    lists = pa.array([f"{row % 7},{row % 5}" for row in range(table.num_rows)])
    rows = pa.table({"label": table["label"], "tags": lists, "colors": pa.array(["red|blue", "red"] * 750)})
    pq.write_table(rows, tmp_path / "rows.parquet")
    run = meseta.fit(rows, "label", multi_valued=["tags=,", "col*"], config=CONFIG, run_dir=tmp_path / "a")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    options = "--data", tmp_path / "rows.parquet", "--multi-valued", "tags=,", "--multi-valued", "colors=|"
    run_command("train", tmp_path / "config.yaml", f"run_dir={tmp_path / 'b'}", *options)
    assert final_checksum(run.path) == final_checksum(tmp_path / "b")
    probabilities = run.predict(rows.drop_columns("label"))
    assert len(probabilities) == table.num_rows


JOB = """
import sys, pyarrow.parquet as pq, meseta
config = {config}
config["train"] = {{**config["train"], "epochs": 24, "eval_every_epochs": 8, "early_stopping": {{"patience": 100}}}}
config["checkpoint"] = {{"every_steps": 20}}
try:
    meseta.fit(pq.read_table({data!r}), "label", config=config, run_dir={run_dir!r}, nproc={nproc})
except KeyboardInterrupt:
    print("interrupted by the user")
"""


def start_job(table: pa.Table, folder: Path, nproc: int) -> tuple[subprocess.Popen[str], Path]:
    """Start a job of many steps in another process, and wait for its first checkpoint."""
    pq.write_table(table, folder / "rows.parquet")
    run_dir = folder / "run"
    text = JOB.format(config=CONFIG, data=str(folder / "rows.parquet"), run_dir=str(run_dir), nproc=nproc)
    job = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    while not list(run_dir.glob("checkpoints/step-*/manifest.json")):
        assert job.poll() is None
        time.sleep(0.05)
    assert not (run_dir / SPOOL_FOLDER).exists()
    return job, run_dir


def processes_of(run_dir: Path) -> list[str]:
    """Return the command lines of all processes that name a run folder."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(run_dir) in text and str(os.getpid()) != path.parent.name:
            commands.append(text)
    return commands


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_an_interrupted_job_leaves_no_process_and_resumes(nproc: int, table: pa.Table, tmp_path: Path) -> None:
    job, run_dir = start_job(table, tmp_path, nproc)
    job.send_signal(signal.SIGINT)
    out, _ = job.communicate(timeout=60)
    assert "interrupted by the user" in out and processes_of(run_dir) == []
    run = meseta.open_run(run_dir)
    before = run.checkpoints[-1].summary
    assert before is not None and run.history.num_rows > 0 and "test" not in run.metrics
    (tmp_path / "rows.parquet").unlink()
    run.resume(nproc)
    after = run.checkpoints[-1].summary
    assert after is not None and after.step > before.step and "test" in run.metrics


@pytest.mark.soak
def test_the_job_stops_if_its_process_is_killed(table: pa.Table, tmp_path: Path) -> None:
    job, run_dir = start_job(table, tmp_path, 2)
    job.kill()
    job.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while processes_of(run_dir) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(run_dir) == []


def test_a_killed_preparation_leaves_rows_only_until_the_next_command(
    table: pa.Table, trained: meseta.Run, tmp_path: Path
) -> None:
    run_dir = Path(shutil.copytree(trained.path, tmp_path / "run"))
    (run_dir / SPOOL_FOLDER).mkdir()
    (run_dir / SPOOL_FOLDER / "abc.parquet").write_bytes(b"rows")
    run = meseta.open_run(run_dir).resume()
    assert not (run_dir / SPOOL_FOLDER).exists() and run.metrics == trained.metrics
    np.testing.assert_equal(run.predict({n: table[n] for n in table.column_names})["prediction"].shape, (1500,))


def test_held_out_rows_are_shares_times_files_or_rows(table: pa.Table, tmp_path: Path) -> None:
    cases: list[tuple[Any, list[str]]] = [
        (None, []),
        (0.2, ["--valid-fraction", "0.2"]),
        (0, ["--valid-fraction", "0"]),
        (1700000000, ["--valid-after", "1700000000"]),
        (np.int64(1700000000), ["--valid-after", "1700000000"]),
        (date(2026, 11, 1), ["--valid-after", "2026-11-01"]),
        ("2026-11-01T12:00:00", ["--valid-after", "2026-11-01T12:00:00"]),
        ("a.csv", ["--valid-files", "a.csv"]),
        ([Path("a.csv"), "b.csv"], ["--valid-files", "a.csv", "--valid-files", "b.csv"]),
    ]
    for value, expected in cases:
        assert _split_options("valid", value, tmp_path) == expected
    option, path = _split_options("valid", table, tmp_path)
    assert option == "--valid-files" and pq.read_table(path).num_rows == table.num_rows


@pytest.mark.soak
def test_a_split_of_rows_in_memory_is_that_of_a_file(table: pa.Table, tmp_path: Path) -> None:
    runs = []
    for name in ("rows", "file"):
        data, valid = table.slice(0, 1200), table.slice(1200)
        if name == "file":
            pq.write_table(valid, tmp_path / "valid.parquet")
        held_out = valid if name == "rows" else tmp_path / "valid.parquet"
        runs.append(meseta.fit(data, "label", valid=held_out, config=CONFIG, run_dir=tmp_path / name))
    assert final_checksum(runs[0].path) == final_checksum(runs[1].path)
    assert runs[0].metrics["valid"]["num_samples"] == 300


def test_a_new_folder_below_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    cases: list[tuple[Any, str]] = [(7, "runs/rows"), (7, "runs/rows-2"), ("a/clicks.csv", "runs/clicks")]
    for data, expected in cases:
        assert str(_choose_run_dir(None, {}, data)) == expected
    assert (
        str(_choose_run_dir("x", {"run_dir": "y"}, 7)) == "x" and str(_choose_run_dir(None, {"run_dir": "y"}, 7)) == "y"
    )
