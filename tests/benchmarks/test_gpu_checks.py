"""benchmarks/gpu_checks.py runs each check in a process, and its checks find planted faults."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import bench_dcnv2
import bench_gpu
import bench_models
import gpu_checks
import pytest
import torch
from dcnv2.shape import MLPERF
from gpu_checks import CHECKS, MAX_TOTAL_S, Check, ResultTable, run_checks
from gpu_parts import dcnv2, gpu_tests, kernels, main_job, memcheck, models
from gpu_parts.rows import Row, RowWriter, read_rows
from peers.plain_models import PLAIN

from meseta.measure.synthetic_batches import make_training_batches

MACHINE = {"card": "none", "commit": "abc"}


def script(name: str, text: str, time_limit_s: float = 60.0) -> Check:
    """Return a check that runs `text`, in which `write(**row)` adds a row."""
    begin = (
        "import json, subprocess, sys, time\n"
        "def write(**row):\n"
        "    with open(sys.argv[1], 'a') as file:\n"
        "        file.write(json.dumps(row) + '\\n')\n"
    )
    return Check(name, (sys.executable, "-S", "-c", begin + text), time_limit_s)


def good(name: str) -> Check:
    return script(name, "write(quantity='sum', value=2.5, unit='ms', limit='<= 3', result='met')")


def run(folder: Path, *checks: Check) -> tuple[bool, dict[str, list[Row]]]:
    """Run checks. Returns (whether all limits are met, rows by check)."""
    is_met = run_checks(checks, folder, ResultTable(folder, MACHINE, keep=False))
    stored = json.loads((folder / "results.json").read_text())
    assert stored["machine"] == MACHINE
    return is_met, {name: [Row(**row) for row in check["rows"]] for name, check in stored["checks"].items()}


def is_alive(process_id: int) -> bool:
    """Whether a process runs. One that has ended and waits for its parent does not."""
    stat = Path(f"/proc/{process_id}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_all_checks_take_ten_minutes_at_most() -> None:
    assert sum(check.time_limit_s for check in CHECKS) <= MAX_TOTAL_S == 10 * 60
    for check in CHECKS:
        module, function = check.command[-1].split(".")
        assert callable(getattr(import_module(f"gpu_parts.{module}"), function))


def test_a_good_check_is_a_row(tmp_path: Path) -> None:
    is_met, rows = run(tmp_path, good("first"))
    assert is_met
    assert rows == {"first": [Row(quantity="sum", value=2.5, unit="ms", limit="<= 3", result="met")]}
    head, _, lines = (tmp_path / "table.md").read_text().partition("\n\n")
    assert head == "- card: none\n- commit: abc"
    cells = [cell.strip() for cell in lines.splitlines()[2].strip("|").split("|")]
    assert cells[0].startswith("first, ") and cells[1:] == ["sum", "2.5 ms", "<= 3", "met"]


def test_a_crash_is_a_row_and_the_next_check_runs(tmp_path: Path) -> None:
    crash = script("crash", "write(quantity='before', value='kept')\nraise ValueError('planted | fault')")
    is_met, rows = run(tmp_path, crash, good("next"))
    kept, failed = rows["crash"]
    assert not is_met and kept.value == "kept"
    assert failed.result == "missed"
    assert failed.value == "exit code 1; last output: ValueError: planted | fault"
    assert rows["next"][0].result == "met"
    assert "ValueError: planted / fault" in (tmp_path / "table.md").read_text()


def test_a_killed_process_and_one_without_rows_are_rows(tmp_path: Path) -> None:
    killed = script("killed", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    is_met, rows = run(tmp_path, killed, script("silent", ""))
    assert not is_met
    assert [row.value for row in (*rows["killed"], *rows["silent"])] == [
        "exit code -9; last output: none",
        "no rows; last output: none",
    ]


def test_a_check_that_takes_too_long_is_killed_with_its_children(tmp_path: Path) -> None:
    text = (
        "child = subprocess.Popen(['sleep', '600'])\n"
        "write(quantity='child', value=child.pid)\n"
        "print('still waiting', flush=True)\n"
        "time.sleep(600)"
    )
    is_met, rows = run(tmp_path, script("slow", text, time_limit_s=8.0), good("next"))
    child, failed = rows["slow"]
    assert not is_met and failed.result == "missed"
    assert failed.value == "no end within 8 s; last output: still waiting"
    assert rows["next"][0].result == "met"
    assert isinstance(child.value, int)
    while is_alive(child.value):
        time.sleep(0.01)


def test_time_that_a_check_leaves_is_available_to_later_ones(tmp_path: Path) -> None:
    slow = script("slow", "time.sleep(600)", time_limit_s=0.0)
    is_met, rows = run(tmp_path, slow, good("first"), good("second")._replace(time_limit_s=0.0))
    assert not is_met and str(rows["slow"][0].value).startswith("no end within 0 s")
    assert [row.result for row in rows["first"] + rows["second"]] == ["met", "met"]


def test_the_table_is_written_after_each_check(tmp_path: Path) -> None:
    text = f"""
from pathlib import Path
stored = json.loads(Path({str(tmp_path)!r}, "results.json").read_text())
results = [check["rows"][0]["result"] for check in stored["checks"].values()]
write(quantity="results before", value=" ".join(results))
write(quantity="is in the table", value=str("first, " in Path({str(tmp_path)!r}, "table.md").read_text()))
"""
    _, rows = run(tmp_path, good("first"), script("second", text))
    assert [row.value for row in rows["second"]] == ["met skipped", "True"]
    assert {path.name for path in tmp_path.iterdir()} == {"table.md", "results.json", "first.log", "second.log"}


def test_a_run_without_time_names_the_skipped_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = ResultTable(tmp_path, MACHINE, keep=False)
    assert not run_checks([good("first"), good("second")], tmp_path, results, max_total_s=0.0)
    printed = capsys.readouterr().out
    assert printed.endswith("skipped: first, second\n")
    for name in ("first", "second"):
        assert f"| {name}, 0 s " in printed
    assert printed.count("no time was left of 0 s | ") == 2 and (tmp_path / "table.md").read_text() in printed


def test_an_interrupted_run_names_the_skipped_checks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_check = gpu_checks.run_check

    def interrupt(check: Check, *arguments: Any) -> list[Row]:
        # As the handler of SIGTERM does.
        return sys.exit(1) if check.name == "second" else run_check(check, *arguments)

    monkeypatch.setattr(gpu_checks, "run_check", interrupt)
    results = ResultTable(tmp_path, MACHINE, keep=False)
    with pytest.raises(SystemExit):
        run_checks([good("first"), good("second"), good("third")], tmp_path, results)
    assert capsys.readouterr().out.endswith("skipped: second, third\n")
    stored = json.loads((tmp_path / "results.json").read_text())["checks"]
    assert [stored[name]["rows"][0]["result"] for name in stored] == ["met", "skipped", "skipped"]


def start(monkeypatch: pytest.MonkeyPatch, *arguments: object, has_gpu: bool = True) -> Any:
    """Return the exit code or message of the command."""
    monkeypatch.setattr(sys, "argv", ["gpu_checks.py", *map(str, arguments)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "planted card")
    monkeypatch.setattr(gpu_checks.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as left:
        gpu_checks.main()
    return left.value.code


def test_the_exit_code_says_whether_a_limit_is_missed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bad = script("bad", "write(quantity='sum', value=4.0, limit='<= 3', result='missed')")
    monkeypatch.setattr(gpu_checks, "CHECKS", (good("good"), bad))
    assert start(monkeypatch, "--out", tmp_path / "all") == 1
    assert start(monkeypatch, "--out", tmp_path / "one", "--only", "good") == 0
    stored = json.loads((tmp_path / "all" / "results.json").read_text())
    assert list(stored["checks"]) == ["good", "bad"] and stored["machine"]["card"] == "planted card"
    assert stored["machine"]["torch"] == torch.__version__


def test_only_keeps_results_of_the_same_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_checks, "CHECKS", (good("first"), good("second")))

    def stored(*arguments: str) -> list[str]:
        assert start(monkeypatch, "--out", tmp_path, *arguments) == 0
        return list(json.loads((tmp_path / "results.json").read_text())["checks"])

    assert stored() == ["first", "second"]
    assert stored("--only", "second") == ["first", "second"]
    assert stored("--only", "second", "--commit", "other") == ["second"]


def test_without_a_gpu_it_stops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    message = start(monkeypatch, "--out", tmp_path / "out", has_gpu=False)
    assert message.startswith("gpu_checks: torch sees no GPU here") and not (tmp_path / "out").exists()


def test_rows_are_compared_with_limits(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    rows = RowWriter(path)
    rows.at_most("a", 0.7, 0.7, "ms")
    rows.at_most("b", 0.71, 0.7, "ms")
    rows.at_least("c", 3.0, 3.0, "x")
    rows.at_least("d", float("nan"), 3.0, "x")
    rows.holds("e", False, "broken")
    rows.skip("f", "no tool")
    with path.open("a") as file:
        file.write('{"quantity": "cut o')
    assert [(row.quantity, row.result) for row in read_rows(path)] == [
        ("a", "met"), ("b", "missed"), ("c", "met"), ("d", "missed"), ("e", "missed"), ("f", "skipped"),
    ]  # fmt: skip
    assert read_rows(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("lines", "exit_code", "results"),
    [
        (["..", "2 passed, 1 skipped in 3.0s"], 0, ["met"]),
        (["ss", "2 skipped in 3.0s"], 0, ["missed"]),
        (["FAILED tests/gpu/a.py::b - assert 1 == 2", "1 failed, 5 passed in 3.0s"], 1, ["missed", "missed"]),
        ([], 1, ["missed"]),
    ],
)
def test_skipped_tests_do_not_pass(lines: list[str], exit_code: int, results: list[str], tmp_path: Path) -> None:
    gpu_tests.add_outcome(RowWriter(tmp_path / "rows"), lines, exit_code)
    assert [row.result for row in read_rows(tmp_path / "rows")] == results


@pytest.mark.parametrize(
    ("lines", "exit_code", "result"),
    [
        (["========= ERROR SUMMARY: 0 errors"], 0, "met"),
        (["========= Invalid __global__ read", "========= ERROR SUMMARY: 1 error"], 9, "missed"),
        (["RuntimeError: planted", "========= ERROR SUMMARY: 0 errors"], 1, "missed"),
        ([], 0, "missed"),
    ],
)
def test_memcheck_reads_the_summary(lines: list[str], exit_code: int, result: str, tmp_path: Path) -> None:
    memcheck.add_outcome(RowWriter(tmp_path / "rows"), "eager", lines, exit_code)
    [row] = read_rows(tmp_path / "rows")
    assert row.result == result


def test_memcheck_is_skipped_without_the_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memcheck, "find_tool", lambda: None)
    memcheck.check(RowWriter(tmp_path / "rows"))
    assert [row.result for row in read_rows(tmp_path / "rows")] == ["skipped"]


def test_models_are_compared_with_torch_and_stored_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measure(name: str, *_: object) -> dict[str, float]:
        if name == "gdcn":
            raise RuntimeError("planted\nin two lines")
        return {"float32": 130.0, "bfloat16": 330.0, "torch": 100.0, "torch autocast": 300.0}

    monkeypatch.setattr(models, "measure", measure)
    monkeypatch.setattr(models, "make_training_batches", lambda _: [])
    monkeypatch.setattr(models, "RESULTS", tmp_path / "results.csv")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "planted card")
    lines = ["models,B 65536 planted card dhen float32,500", "models,B 65536 planted card dhen float32,100"]
    lines += ["models,B 65536 other card dhen bfloat16,1", "gpu,B 65536 planted card dhen bfloat16,1"]
    models.RESULTS.write_text("\n".join(["benchmark,case,value", *lines, ""]))
    models.compare(RowWriter(tmp_path / "rows"), 65536, ["gdcn", "dhen"], models.PEERS, models.MIN_RATIOS_65536)
    rows = read_rows(tmp_path / "rows")
    assert [(row.quantity, row.limit, row.result) for row in rows] == [
        ("gdcn, 65,536", "", "missed"),
        ("dhen, 65,536, float32", ">= 1.3", "met"),
        ("dhen, 65,536, float32: former", ">= 0.97", "met"),
        ("dhen, 65,536, bfloat16", ">= 1.1", "met"),
    ]
    assert rows[0].value == "RuntimeError: planted"
    assert [row.value for row in rows[1:]] == pytest.approx([1.3, 1.3, 1.1])


def test_stored_results_are_found() -> None:
    case = bench_models.result_case("dcnv2", 65536, "float32", "NVIDIA H100 80GB HBM3")
    assert models.former_rates()[case] > 0
    assert bench_models.result_case("dcnv2", 2048, "float32", "") == "dcnv2 float32"


def test_the_limits_name_every_model() -> None:
    assert len(PLAIN) == 8 and set(models.MIN_RATIOS_2048["float32"]) == set(PLAIN)
    assert all(set(ratios) == set(PLAIN) for ratios in models.MIN_RATIOS_65536.values())
    assert set(models.COMPILED) <= set(PLAIN)


def test_kernels_are_compared_with_a_copy(tmp_path: Path) -> None:
    class Job:
        shape = bench_gpu.SHAPES[1]

        def lookup_bytes(self) -> int:
            return 400

        def update_bytes(self, name: str) -> int:
            return 600

    rows = RowWriter(tmp_path / "rows")
    kernels.add_rates(rows, Job(), 100.0, 5.0, {"sgd": 10.0, "rowwise_adagrad": 12.0})
    lookup, sgd, adagrad, ratio = read_rows(tmp_path / "rows")
    assert (lookup.value, lookup.limit, lookup.result) == (80.0, ">= 80", "met")
    assert (sgd.value, sgd.result) == (60.0, "measured")
    assert (adagrad.value, adagrad.limit, adagrad.result) == (50.0, ">= 55", "missed")
    assert (ratio.value, ratio.limit, ratio.result) == (1.2, "<= 1.15", "missed")


@pytest.mark.parametrize(
    ("card", "dtype", "optimizer", "step_s", "expected"),
    [
        ("NVIDIA H200", "float32", "rowwise_adagrad", 0.03, (">= 1.81e+06", "met")),
        ("NVIDIA H200", "float32", "rowwise_adagrad", 0.031, (">= 1.81e+06", "missed")),
        ("NVIDIA H200", "float32", "adagrad", 0.031, ("", "measured")),
        ("NVIDIA H100 80GB HBM3", "bfloat16", "rowwise_adagrad", 0.034, (">= 1.6e+06", "met")),
        ("another", "float32", "rowwise_adagrad", 1.0, ("", "measured")),
    ],
)
def test_dcnv2_has_a_limit_for_each_card(
    card: str, dtype: Any, optimizer: Any, step_s: float, expected: tuple[str, str], tmp_path: Path
) -> None:
    shape = replace(MLPERF, rows_dtype=dtype, optimizer=optimizer)
    result = bench_dcnv2.Result(shape, step_s, {"lookup": 2.0, "backward": 9.5}, 12)
    rates = bench_dcnv2.CardRates(copy=4e12, matrix=7e14)
    dcnv2.add_outcome(RowWriter(tmp_path / "rows"), card, result, rates)
    rate, share, stages = read_rows(tmp_path / "rows")
    assert (rate.limit, rate.result) == expected and rate.value == pytest.approx(MLPERF.batch_size / step_s)
    assert 0 < float(share.value) < 100 and "backward 9.50 ms; 12 replayed steps" in str(stages.value)


@pytest.mark.parametrize("name", ["dlrm", "dhen"])
def test_the_models_compute_the_same(name: str) -> None:
    training = bench_models.make_workload(2048, quick=True)
    [samples, *_] = make_training_batches(training)
    model, plain = (
        bench_models.our_model(name, training, "float32", "cpu"),
        bench_models.PlainTraining(name, training, "cpu"),
    )
    bench_models.copy_weights(model, plain)
    bench_models.check(model, plain, samples)
    with torch.no_grad():
        next(plain.model.parameters()).mul_(1.5)
    with pytest.raises(AssertionError):
        bench_models.check(model, plain, samples)


def test_the_last_epoch_begins_after_its_first_line() -> None:
    def line(step: int, num_samples: int, time_s: float, **stages_s: float) -> dict[str, Any]:
        return {"step": step, "num_samples": num_samples, "time_s": time_s, "stages_s": stages_s}

    lines = [
        line(5, 1_600_000, 10.0, data=1.0),
        line(10, 3_200_000, 20.0, data=1.0),
        line(12, 4_000_000, 22.0, data=0.25),
        line(16, 4_800_000, 24.0, data=0.125),
    ]
    assert main_job.last_epoch(lines) == (400_000.0, 0.25)
    assert main_job.last_epoch([*lines[:-1], line(16, 4_800_000, 24.0)]) == (400_000.0, None)


@pytest.mark.parametrize(("auc", "result"), [(0.8019, "met"), (0.7979, "missed")])
def test_the_auc_is_compared_with_the_cpu(
    auc: float, result: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(main_job, "cpu_auc", lambda case: 0.8)
    monkeypatch.setattr(main_job, "last_epoch", lambda lines: (2e6, 0.25))
    graphs = {"num_graphs": 1, "num_replayed_steps": 90, "eager_steps": {"short batch": 3}}
    summary = {"test": {"auc": auc}, "num_steps": 93, "graphs": graphs}
    main_job.add_outcome(RowWriter(tmp_path / "rows"), main_job.CASES[0], summary, [])
    rate, waits, replayed, difference = read_rows(tmp_path / "rows")
    assert (rate.result, waits.value, waits.unit) == ("met", 25.0, "%")
    assert replayed.value == "90 of 93, 3 eager: short batch"
    assert difference.result == result and difference.value == pytest.approx(abs(auc - 0.8))
