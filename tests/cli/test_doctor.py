"""Tests of `meseta doctor` from the command line, on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bad_input.commands import run_here
from meseta.cli import doctor as command
from meseta.cli.main import main
from meseta.measure.doctor import checks, probe
from meseta.measure.doctor.packages import Finding, note, ok, problem
from meseta.system.processors import choose_num_threads
from source_tree import ROOT

TOPICS = [
    "meseta", "torch", "packages", "core", "processor", "bfloat16", "cores", "waiting", "memory", "pages",
    "shared memory", "open files", "GPU", "triton", "nccl", "gloo", "disk", "row files", "extras",
]  # fmt: skip


def run(*arguments: str, path: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT / 'src'}", "COLUMNS": "80", **variables}
    call = [sys.executable, "-m", "meseta.cli.main", "doctor", *arguments]
    return subprocess.run(call, capture_output=True, text=True, check=False, timeout=120, env=environment)


def test_this_machine(tmp_path: Path) -> None:
    pytest.importorskip("meseta._C")
    done = run_here("doctor", "--json", "--dir", tmp_path)
    assert done.err == ""
    document = json.loads(done.out)
    by_topic = {entry["topic"]: entry for entry in document["findings"]}
    assert list(by_topic) == TOPICS
    for topic in ("meseta", "torch", "packages", "core", "gloo"):
        assert by_topic[topic]["state"] == "ok", by_topic[topic]
    assert by_topic["cores"]["figures"]["num_usable"] == len(os.sched_getaffinity(0))
    threads = choose_num_threads()
    assert by_topic["cores"]["figures"]["num_threads"] == threads.number and str(threads) in by_topic["cores"]["text"]
    assert by_topic["memory"]["figures"]["total_bytes"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < by_topic["disk"]["figures"]["write_bytes_per_s"] < 1e12
    assert (done.code == 0) == document["ok"]
    assert list(tmp_path.iterdir()) == []


def test_a_machine_without_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch_cpu.so: no such file')")
    done = run("--dir", str(tmp_path / "none"), path=str(tmp_path))
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    lines = done.stdout.splitlines()
    [start] = [i for i, line in enumerate(lines) if line.startswith("problem  torch")]
    assert "libtorch_cpu.so" in " ".join(lines[start : start + 3])
    assert any(line.strip().startswith("-> pip install --force-reinstall torch==") for line in lines)
    assert any(line.startswith("note     gloo           not tried") for line in lines)
    assert lines[-1].startswith("2 problems will stop training; ")  # torch, and the missing folder
    assert max(map(len, lines)) <= 80 or "/" in max(lines, key=len)  # only paths are longer


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> object:
    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*findings: Finding) -> tuple[int, str]:
        monkeypatch.setattr(checks, "run_checks", lambda _: iter(findings))
        monkeypatch.setattr(sys, "argv", ["meseta", "doctor"])
        with pytest.raises(SystemExit) as left:
            main()
        return int(left.value.code or 0), capsys.readouterr().out

    yield call
    signal.signal(signal.SIGINT, handler)


def test_output(doctor: object) -> None:
    assert callable(doctor)
    findings = [
        ok("memory", "21 GB free"),
        note("pages", "2 MB pages are turned off, and lookups in large tables are slower", "echo madvise"),
    ]
    assert doctor(*findings) == (
        0,
        "ok       memory         21 GB free\n"
        "note     pages          2 MB pages are turned off, and lookups in large tables\n"
        "                        are slower\n"
        "                        -> echo madvise\n"
        "\n"
        "Nothing stops training; 1 note.\n",
    )
    code, out = doctor(*findings, problem("disk", "full", "delete"))
    assert code == 1 and out.endswith("-> delete\n\n1 problem will stop training; 1 note.\n")


def test_a_failed_check_is_reported_and_the_others_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object) -> Finding:
        raise KeyError("strange")

    monkeypatch.setattr(probe, "run_probes", lambda: {stage: {"error": "x"} for stage in probe.PROBES})
    for topic in ("check_memory", "check_cores"):
        monkeypatch.setattr(checks, topic, fail)
    monkeypatch.setattr(checks, "check_disk", lambda *_: ok("disk", "fine"))
    by_topic = {finding.topic: finding for finding in checks.run_checks(tmp_path)}
    assert list(by_topic) == TOPICS
    assert by_topic["memory"].state == "note" and "the check failed: KeyError" in by_topic["memory"].text


def test_no_finding_is_wider_than_the_terminal() -> None:
    wide = note("pages", "word " * 60, "do " * 60)
    assert max(len(line) for line in command._format_finding(wide, 80).splitlines()) <= 80 + len(
        "\x1b[33m\x1b[1m\x1b[0m"
    )
