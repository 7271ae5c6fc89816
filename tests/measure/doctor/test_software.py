"""Checks of packages, core, GPUs and Triton on given facts, and the probe that collects facts."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from meseta.measure.doctor import checks, packages, probe
from meseta.measure.doctor.child_processes import run_children
from meseta.system.kernel import KernelFiles
from source_tree import ROOT

GOOD = {
    "torch": "2.13.0+cpu", "numpy": "2.4.6", "pyarrow": "26.0.1", "pydantic": "2.14.3", "typer": "0.29.2",
    "rich": "15.0.0", "fsspec": "2026.9.0", "safetensors": "0.8.0", "jaxtyping": "0.3.11", "pyyaml": "6.0.3",
    "cryptography": "50.0.2", "polars": "2.1.0", "tensorboard": "2.21.0", "s3fs": "2026.9.0", "gcsfs": "2026.9.0",
    "onnx": "1.22.0", "onnxscript": "0.7.1", "triton": "3.9.0", "mlflow-skinny": "3.17.2", "wandb": "0.31.0",
    "lightgbm": "4.7.0",
}  # fmt: skip
TORCH: dict[str, Any] = {"version": "2.13.0+cpu", "cuda": None, "hip": None}
CUDA = TORCH | {"cuda": "13.0"}
H100 = {"name": "NVIDIA H100", "total_bytes": 85_000_000_000, "free_bytes": 84_000_000_000}
NO_TORCH = {"error": "not tried, since torch does not load", "skipped": True}


def without(*names: str, **other: str) -> packages.VersionLookup:
    return ({name: version for name, version in GOOD.items() if name not in names} | other).get


def test_the_packages_are_those_of_the_project() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert dict(re.split(">=", entry) for entry in dependencies) == packages.REQUIRED


def test_all_packages_are_there() -> None:
    finding = packages.check_packages({}, GOOD.get)
    assert (
        finding.state == "ok"
        and "numpy 2.4.6, pyarrow 26.0.1" in finding.text
        and finding.figures["torch"] == GOOD["torch"]
    )


@pytest.mark.parametrize(
    ("facts", "installed", "text", "way"),
    [
        ({"import rich": {"error": "E"}}, without("rich"), "rich is not installed", "pip install 'rich>=13'"),
        ({}, without(pyarrow="9.0.1"), "pyarrow 9.0.1 is older than 17", "pip install 'pyarrow>=17'"),
        ({}, without(torch="2.9.1+cu128"), "torch 2.9.1+cu128 is older than 2.10", "pip install 'torch>=2.10'"),
        (
            {"import yaml": {"error": "ImportError: no symbol"}},
            GOOD.get,
            "pyyaml does not load (ImportError: no symbol)",
            "pip install --force-reinstall 'pyyaml>=6'",
        ),
    ],
)
def test_wrong_packages(facts: dict[str, Any], installed: packages.VersionLookup, text: str, way: str) -> None:
    finding = packages.check_packages(facts, installed)
    assert (finding.state, finding.text, finding.way_out) == ("problem", text, way)


def test_torch() -> None:
    assert packages.check_torch(TORCH, GOOD.get).text == "2.13.0+cpu, built for CPUs only"
    assert packages.check_torch(CUDA, GOOD.get).text.endswith("built for CUDA 13.0")
    missing = packages.check_torch({"error": "ModuleNotFoundError: No module named 'torch'"}, without("torch"))
    assert missing.state == "problem" and missing.way_out.startswith("pip install 'torch>=2.10'")
    broken = packages.check_torch({"error": "OSError: libtorch.so"}, GOOD.get)
    assert broken.state == "problem" and "2.13.0+cpu is installed, but does not load: OSError" in broken.text
    assert broken.way_out.startswith("pip install --force-reinstall torch==2.13.0;")


def test_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    optional = ("bench", "tensorboard", "mlflow", "wandb", "lightgbm", "onnx", "s3", "gcs")
    named = {re.split(">=", entry)[0] for extra in optional for entry in extras[extra]}
    assert packages.OPTIONAL.keys() == named
    assert packages.check_optional(GOOD.get).state == "ok"
    finding = packages.check_optional(without("polars"))
    assert (finding.state, finding.way_out) == ("note", "pip install polars") and "polars (a peer" in finding.text


def test_core() -> None:
    assert checks.check_core({"instruction_set": "avx2", "best": "avx2"}).state == "ok"
    assert checks.check_core(NO_TORCH).state == "note"
    missing = checks.check_core({"error": "ModuleNotFoundError: No module named 'meseta._C'"})
    assert missing.state == "problem" and "pip install ." in missing.way_out
    other = {"error": "ImportError: /MESETA_ISA/_C.so: no such file", "error_class": "ImportError"}
    assert "pip install ." in checks.check_core(other).way_out


@pytest.mark.parametrize(
    ("fact", "torch", "driver", "state", "words"),
    [
        ({"devices": []}, TORCH, None, "ok", "none; everything runs on the CPU"),
        (
            {"devices": [H100, H100]},
            CUDA,
            "580.95.05",
            "ok",
            "1: NVIDIA H100, 84.0 GB free of 85.0 GB; driver 580.95.05",
        ),
        ({"devices": []}, TORCH, "580.95.05", "note", "built without CUDA"),
        ({"devices": []}, CUDA, "450.1", "note", "built for CUDA 13.0, sees no GPU"),
        ({"error": "RuntimeError: no kernel image"}, CUDA, "580.1", "problem", "no kernel image (driver 580.1)"),
        (NO_TORCH, {"error": "x"}, None, "note", "torch does not load"),
    ],
)
def test_gpu(fact: Any, torch: Any, driver: str | None, state: str, words: str, tmp_path: Path) -> None:
    if driver:
        (tmp_path / "sys/module/nvidia").mkdir(parents=True)
        (tmp_path / "sys/module/nvidia/version").write_text(driver + "\n")
    finding = checks.check_gpu(fact, torch, KernelFiles(tmp_path))
    assert finding.state == state and words in finding.text and finding.figures["driver"] == driver


def test_the_driver_in_proc(tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    line = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version:  gcc\n"
    )
    (tmp_path / "proc/driver/nvidia/version").write_text(line)
    assert checks.driver_version(KernelFiles(tmp_path)) == "550.54.15"


@pytest.mark.parametrize(
    ("fact", "has_gpu", "installed", "state", "words"),
    [
        ({"version": "3.9.0", "target": None}, False, GOOD.get, "ok", "compiles kernels for GPUs"),
        ({"version": "3.9.0", "target": "this GPU"}, True, GOOD.get, "ok", "runs a kernel on this GPU"),
        ({"error": "No module"}, False, without("triton"), "ok", "not needed without a GPU"),
        ({"error": "No module"}, True, without("triton"), "problem", "training on a GPU needs it"),
        ({"error": "no C compiler"}, True, GOOD.get, "problem", "3.9.0 does not compile: no C compiler"),
        ({"error": "no ptxas"}, False, GOOD.get, "note", "3.9.0 does not compile: no ptxas; not needed without a GPU"),
        (NO_TORCH, False, GOOD.get, "note", "torch does not load"),
    ],
)
def test_triton(fact: Any, has_gpu: bool, installed: packages.VersionLookup, state: str, words: str) -> None:
    finding = checks.check_triton(fact, has_gpu, installed)
    assert finding.state == state and words in finding.text


@pytest.mark.parametrize(
    ("fact", "num_gpus", "state"),
    [
        ({"version": "2.27.5"}, 2, "ok"),
        ({"version": None}, 0, "ok"),
        ({"version": None}, 2, "problem"),
        (NO_TORCH, 0, "note"),
    ],
)
def test_nccl(fact: Any, num_gpus: int, state: str) -> None:
    assert checks.check_nccl(fact, num_gpus).state == state


def ask(monkeypatch: pytest.MonkeyPatch, folder: Path, stages: list[str], **modules: str) -> dict[str, Any]:
    """Return the facts of the probe if `folder` has these modules, which hide others."""
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT / 'src'}")
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")  # output is not buffered
    monkeypatch.setattr(probe, "PROBES", {stage: probe.PROBES[stage] for stage in stages})
    return dict(probe.run_probes(60.0))


def test_a_stage_that_kills_its_process_is_named_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    facts = ask(
        monkeypatch,
        tmp_path,
        ["import typer", "import yaml", "import rich", "import fsspec"],
        sitecustomize="print('5')",
        typer="print('a library that prints', end='')",
        yaml="import os; os.kill(os.getpid(), 4)",
        rich="raise ImportError('no such symbol')",
        fsspec="raise SystemExit(0)",
    )
    assert facts == {
        "import typer": {},
        "import yaml": {"error": "the process was killed by SIGILL"},
        "import rich": {"error": "ImportError: no such symbol", "error_class": "ImportError"},
        "import fsspec": {"error": "the process ended with exit code 0 and no error output"},
    }


def test_torch_that_does_not_load_is_tried_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stages = ["torch", "core", "gpu", "import yaml"]
    facts = ask(monkeypatch, tmp_path, stages, torch="raise OSError('libtorch_cpu.so: no such file')")
    assert facts["torch"]["error"] == "OSError: libtorch_cpu.so: no such file" and facts["import yaml"] == {}
    assert facts["core"] == facts["gpu"] == NO_TORCH


def test_a_core_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MESETA_ISA", raising=False)
    facts = ask(monkeypatch, tmp_path, ["processor", "core"], sitecustomize=NO_CORE, torch=SMALL_TORCH)
    assert facts["processor"] == {"instruction_set": "avx2", "best": "avx2"}
    finding = checks.check_core(facts["core"])
    assert finding.state == "problem" and "No module named 'meseta._C_avx2'" in finding.text


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        ("fast", "MesetaError: MESETA_ISA='fast' is unknown; available: avx2, avx512, baseline"),
        ("avx512", "MesetaError: MESETA_ISA='avx512': this processor runs 'avx2' at most; unset MESETA_ISA"),
    ],
)
def test_a_variable_that_names_no_core(chosen: str, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MESETA_ISA", chosen)
    finding = checks.check_core(ask(monkeypatch, tmp_path, ["core"], torch=SMALL_TORCH)["core"])
    assert (finding.state, finding.text, finding.way_out) == ("problem", text, "unset MESETA_ISA")


SMALL_TORCH = """
class backends:
    class cpu:
        def get_cpu_capability():
            return "AVX2"
"""
NO_CORE = """
import sys
class Hide:
    def find_spec(name, *_):
        if name.startswith("meseta._C"):
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Hide)
"""


def test_a_system_that_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(probe, "run_children", refuse)
    assert {fact["error"] for fact in probe.run_probes().values()} == {
        "no process could be started: [Errno 11] Resource temporarily unavailable"
    }


def test_children_that_hang_and_children_that_fail() -> None:
    [hanging] = run_children("timeit", [{}], 0.5, ["-n", "1", "-r", "1", "import time; time.sleep(60)"])
    assert hanging.exit_code is None and hanging.reason == "no answer within the time limit"
    [failed] = run_children("no_such_module_here", [{}], 30.0)
    assert failed.exit_code == 1 and "No module named no_such_module_here" in failed.reason
    assert failed.reason.startswith(sys.executable)
