"""Tests of `meseta train`, `eval` and `predict` in this process: output, exit codes and one-line errors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml

import meseta
from meseta.measure.threads import use_num_threads
from meseta.system.environment_variables import WAIT_POLICY, WAIT_POLICY_VARIABLES
from small_run import metrics, settings, write_config
from source_tree import ROOT

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """Config of a finished run. Tests only read it."""
    from small_run import train

    folder = tmp_path_factory.mktemp("trained")
    document = settings(tiny, folder / "run")
    train(document)
    return write_config(folder / "config.yaml", document)


def error_of(run: Run, *arguments: object) -> str:
    """Return the one line that a refused command prints."""
    code, out, err = run(*arguments)
    assert code == 1 and out == ""
    [line] = err.splitlines()
    assert line.startswith("error: ")
    return line


def test_train_and_prepare_use_the_number_of_threads_of_doctor(
    run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_threads: list[int] = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, max_workers: int, thread_name_prefix: str) -> None:
            num_threads.append(max_workers)
            super().__init__(max_workers, thread_name_prefix)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("meseta.data.prepare.run.ThreadPoolExecutor", Pool)
    set_num_threads = torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda count: (num_threads.append(count), set_num_threads(count)))
    (tmp_path / "log.csv").write_text("label,color\n" + "1,red\n0,blue\n" * 20)
    assert run("prepare", tmp_path / "log.csv", "--out", tmp_path / "data", "--label", "label")[0] == 0
    config = write_config(tmp_path / "c.yaml", settings(tiny, tmp_path / "run", num_threads=None))
    assert num_threads == [3]
    with use_num_threads(1):
        assert run("train", config)[0] == 0
    assert 3 in num_threads[1:] and max(num_threads) == 3
    assert json.loads((tmp_path / "run/environment.json").read_text())["num_threads"] == 3


def test_train_prints_the_result_and_where_the_report_is(run: Run, tiny: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.yaml", settings(tiny, tmp_path / "run"))
    code, out, err = run("train", config, "train.epochs=2", "seed=3", "--verbose")
    assert code == 0
    first, speed, report = out.splitlines()
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert first.startswith(f"test AUC {summary['test']['auc']:.4f}  NE {summary['test']['ne']:.4f}  logloss ")
    assert "(279 samples)" in first and "samples/s, 1 rank" in speed
    assert report == f"report: {tmp_path / 'run/report.html'}" and (tmp_path / "run/report.html").exists()
    assert [line.split()[1] for line in err.splitlines() if line.startswith("step ")][:3] == ["4/28", "8/28", "12/28"]
    saved = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert saved["train"]["epochs"] == 2 and saved["seed"] == 3
    again = run("train", config, "train.epochs=2", "seed=3")
    assert again[0] == 0 and again[1].splitlines()[0] == first
    assert "resuming from step 28" in again[2]


def test_quiet_and_usual_output(run: Run, tiny: Path, tmp_path: Path) -> None:
    schedule = {"kind": "step", "step_every": 4, "step_factor": 0.5}
    document = settings(tiny, tmp_path / "run", train__epochs=1, train__eval_every_steps=8, schedule=schedule)
    config = write_config(tmp_path / "c.yaml", document)
    code, out, err = run("train", config)
    assert code == 0 and len(out.splitlines()) == 3
    words = [line.split(":")[0] for line in err.splitlines()]
    assert words == [
        "learning rate from step 5",
        "test at step 8",
        "learning rate from step 9",
        "learning rate from step 13",
        "test at step 14",
    ]
    assert "tables 0.1 -> 0.05, dense part 0.01 -> 0.005" in err.splitlines()[0]
    code, quiet_out, err = run("train", config, "--force", "--quiet")
    assert (code, err) == (0, "") and quiet_out.splitlines()[0] == out.splitlines()[0]
    assert len(quiet_out.splitlines()) == 3


@pytest.mark.parametrize(
    "command", [("train",), ("prepare", "log", "--out", "x"), ("sweep", "c", "a=[1]", "--out", "x")]
)
def test_quiet_and_verbose_contradict_each_other(run: Run, command: tuple[str, ...]) -> None:
    line = error_of(run, *command, "--quiet", "--verbose")
    assert line == f"error: {command[0]}: --quiet and --verbose contradict each other; omit one of them"


def test_the_teacher_and_ids_outside_are_printed(run: Run, tiny: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(tiny, data)
    document = json.loads((data / "dataset.json").read_text())
    document["teacher"] = {"auc": 0.8123, "ne": 0.7}
    document["sparse"][0]["num_embeddings"] = 100
    (data / "dataset.json").write_text(json.dumps(document))
    config = write_config(tmp_path / "c.yaml", settings(data, tmp_path / "run", embedding__id_policy="clamp"))
    code, out, _ = run("train", config)
    assert code == 0 and "best reachable: AUC 0.8123  NE 0.7000" in out
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    for what, counts in (("training", summary["ids_outside"]), ("the test split", summary["test"]["ids_outside"])):
        assert f"out-of-range ids in {what}, handled by embedding.id_policy: user {counts['user']}\n" in out


def test_eval_equals_the_summary(run: Run, trained: Path) -> None:
    code, out, _ = run("eval", trained.parent / "run")
    assert code == 0
    evaluation = json.loads(out)
    summary = json.loads((trained.parent / "run/summary.json").read_text())
    for name in ("num_samples", "num_positives", "logloss", "ne", "auc", "calibration"):
        assert evaluation[name] == summary["test"][name]
    assert evaluation["step"] == 14 and evaluation["split"] == "test"
    code, out, _ = run("eval", trained.parent / "run", "--split", "train")
    assert json.loads(out)["num_samples"] == summary["num_samples"]


def test_predict_writes_every_row_in_order(run: Run, trained: Path, tiny: Path, tmp_path: Path) -> None:
    code, out, _ = run("predict", trained.parent / "run", "--out", tmp_path / "p.parquet")
    assert code == 0 and out == f"wrote 279 predictions of test to {tmp_path / 'p.parquet'}\n"
    table = pq.read_table(tmp_path / "p.parquet")
    assert table["row"].to_pylist() == list(range(279))
    assert table["label"].to_pylist() == pq.read_table(tiny / "test")["label"].to_pylist()
    assert all(0 < p < 1 for p in table["prediction"].to_pylist())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.batchsize=4"], "unknown key 'train.batchsize'; did you mean 'batch_size'?"),
        (["trian.batch_size=4"], "unknown key 'trian'; did you mean 'train'?"),
        (["train.batch_size=many"], "key 'train.batch_size'"),
        (["train.batch_size"], "must look like train.batch_size=4096"),
        (["data.dir=/nowhere/at/all"], "dataset '/nowhere/at/all': cannot read dataset.json"),
        (["device=cuda"], "torch sees no GPU"),
        (["plan=/nowhere/plan.yaml"], "/nowhere/plan.yaml"),
        (["plan={tables: {usr: table_wise}}"], "usr"),
        (["--nproc", "0"], "--nproc must be at least 1, got 0"),
        (["--nproc", "-2"], "--nproc must be at least 1, got -2"),
    ],
)
def test_refused_before_anything_is_made(
    run: Run, tiny: Path, tmp_path: Path, overrides: list[str], message: str
) -> None:
    if overrides == ["device=cuda"]:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a GPU here")
    config = write_config(tmp_path / "c.yaml", settings(tiny, tmp_path / "run"))
    assert message in error_of(run, "train", config, *overrides)
    assert not (tmp_path / "run").exists()


def test_a_missing_config(run: Run, tmp_path: Path) -> None:
    assert "No such file or directory" in error_of(run, "train", tmp_path / "nothing.yaml")


@pytest.mark.parametrize("command", ["eval", "predict"])
def test_no_run_and_no_checkpoint(run: Run, tiny: Path, tmp_path: Path, command: str) -> None:
    more = ["--out", tmp_path / "p.parquet"] if command == "predict" else []
    assert "is not a run: it has no config.yaml" in error_of(run, command, tmp_path, *more)
    (tmp_path / "run").mkdir()
    write_config(tmp_path / "run/config.yaml", settings(tiny, tmp_path / "run"))
    assert "has no checkpoint yet; train it first" in error_of(run, command, tmp_path / "run", *more)


def test_a_config_of_a_run_that_was_broken(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run_dir: [")
    assert "config.yaml" in error_of(run, "eval", tmp_path)


def test_eval_of_an_unknown_split(run: Run, trained: Path) -> None:
    assert "has no split 'tset'; did you mean 'test'?" in error_of(
        run, "eval", trained.parent / "run", "--split", "tset"
    )


def test_resume_never_on_an_existing_run(run: Run, trained: Path) -> None:
    text = error_of(run, "train", trained, "checkpoint.resume=never")
    assert "checkpoint (step-000000014)" in text and "set checkpoint.resume=auto" in text


def test_a_run_dir_with_another_model(run: Run, trained: Path) -> None:
    before = metrics(trained.parent / "run")
    text = error_of(run, "train", trained, "model.embedding_dim=8")
    assert "embedding_dim 4 there, but 8 in the model" in text
    text = error_of(run, "train", trained, "model.name=dlrm_dcnv2")
    assert "use the config that it was trained with" in text
    assert metrics(trained.parent / "run") == before


def test_a_damaged_data_file(run: Run, tiny: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(tiny, data)
    [path] = (data / "train").glob("*.parquet")
    path.write_bytes(path.read_bytes()[:-100])
    config = write_config(tmp_path / "c.yaml", settings(data, tmp_path / "run"))
    assert "cannot be read" in error_of(run, "train", config)


def test_interrupted(run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meseta.pipeline import Pipeline

    step = Pipeline._train_step

    def press(self: Pipeline, *arguments: Any) -> object:
        if self.model.embeddings.step == 9:
            signal.raise_signal(signal.SIGINT)
        return step(self, *arguments)

    config = write_config(tmp_path / "c.yaml", settings(tiny, tmp_path / "run", checkpoint__every_steps=4))
    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "_train_step", press)
        code, out, err = run("train", config)
    assert code == 130 and out == ""
    saved = tmp_path / "run" / "checkpoints" / "step-000000010"
    assert err.splitlines()[-1] == f"stopped after step 10, saved in {saved}; the same command resumes from there"
    code, _, err = run("train", config)
    assert code == 0 and "resuming from step 10" in err


def test_the_wait_policy_of_threads_is_set_before_torch_is_loaded() -> None:
    program = (
        "import os, sys; import meseta.cli.main as cli; "
        "shown = lambda: print(os.environ['OMP_WAIT_POLICY'], os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules); "
        "cli.COMMAND = shown; cli.main()"
    )
    variables = {name: value for name, value in os.environ.items() if name not in WAIT_POLICY_VARIABLES}
    variables["PYTHONPATH"] = str(ROOT / "src")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=variables, check=True)
    assert done.stdout.split() == [*WAIT_POLICY.values(), "False"]


def test_the_version_is_shown(run: Run) -> None:
    code, out, _ = run("--version")
    assert code == 0 and out == f"meseta {meseta.__version__}, torch {version('torch')}\n"
