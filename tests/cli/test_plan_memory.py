"""Tests that `meseta plan` never places more than the devices hold."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from meseta.planner import find_plan, make_plan
from meseta.spec import DeviceKind, Plan, Topology
from meseta.spec.constraints import Constraints
from meseta.spec.workload import load_workload
from sampling import product, sample

SHEETS = {"a100": 40, "h100": 80, "h200": 141, "b200": 1440 / 8}
"""GB of one GPU by NVIDIA's data sheets: A100 40GB, H100 SXM, H200 SXM; DGX B200 has 1,440 GB in 8."""
ROW_BYTES = 4 * 128 + 4
"""Bytes of a row of 128 float32 with its accumulator."""
Files = Callable[..., Path]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    def write(name: str, document: object) -> Path:
        (tmp_path / name).write_text(yaml.safe_dump(document))
        return tmp_path / name

    return write


def table_of(gigabytes: float, **more: object) -> dict[str, object]:
    return {"num_embeddings": int(gigabytes * 1e9 / ROW_BYTES), "embedding_dim": 128, **more}


def test_every_gpu_has_a_documented_memory() -> None:
    assert {"cpu", *SHEETS} == set(get_args(DeviceKind))


@pytest.mark.parametrize("case", sample(product(factor=[0.98, 1.01, 6.4], device=list(SHEETS)), k=1, seed=4))
def test_a_gpu_is_filled_to_its_data_sheet_and_not_beyond(
    run, files: Files, tmp_path: Path, case: dict[str, Any]
) -> None:
    device, factor, code = case["device"], case["factor"], int(case["factor"] > 1)
    machines, plan = files("machines.yaml", {"device": device}), tmp_path / "plan.yaml"
    workload = files("model.yaml", {"batch_size": 64, "tables": {"user": table_of(factor * SHEETS[device])}})
    ended = run("plan", workload, "--topology", machines, "--out", plan)
    assert ended[0] == code, ended
    [note] = [line for line in ended[1].splitlines() if line.startswith("Memory: ")]
    size = f"{SHEETS[device]:.3g}" if SHEETS[device] >= 100 else f"{SHEETS[device]:.1f}"
    assert note == (
        f"Memory: {size} GB for each {device}, as in its data sheet, since topology file {str(machines)!r} has no "
        "hbm_bytes"
    )
    assert plan.exists() == (code == 0)
    if code:
        assert "no plan fits" in ended[2] and "Traceback" not in ended[2]


@pytest.mark.soak
def test_the_same_plan_as_with_the_bytes_written_down(output_of, files: Files, tmp_path: Path) -> None:
    """The plan is the same on several ranks and hosts, and the page shows the note."""
    tables = {"user": table_of(90), "item": table_of(55), "page": table_of(0.1, copies=2)}
    workload, cluster = files("model.yaml", {"batch_size": 4096, "tables": tables}), {"num_hosts": 2, "device": "h100"}
    ended = []
    for name, more in (("bare", {}), ("full", {"hbm_bytes": 80_000_000_000})):
        machines = files(f"{name}.yaml", {**cluster, "devices_per_host": 2, **more})
        out = output_of("plan", workload, "--topology", machines, "--out", tmp_path / f"{name}.plan",
                        "--html", tmp_path / f"{name}.html")  # fmt: skip
        lines = [line for line in out.splitlines() if not line.startswith("wrote ")]
        ended.append((lines, Plan.load(tmp_path / f"{name}.plan", load_workload(workload).tables, 4)))
    (bare, plan), (full, expected) = ended
    assert bare[1:] == full and "as in its data sheet" in bare[0] and plan == expected
    pages = [(tmp_path / f"{name}.html").read_text() for name in ("bare", "full")]
    assert ["as in its data sheet" in page for page in pages] == [True, False]


def test_a_cpu_topology_without_memory_is_refused(run, files: Files, tmp_path: Path) -> None:
    workload = files("model.yaml", {"batch_size": 64, "tables": {"user": table_of(512)}})
    machines = files("machines.yaml", {"devices_per_host": 2})
    code, out, err = run("plan", workload, "--topology", machines, "--out", tmp_path / "plan.yaml")
    assert (code, out) == (1, "") and not (tmp_path / "plan.yaml").exists()
    [line] = err.splitlines()
    assert f"topology file {str(machines)!r}: hbm_bytes is missing" in line and "topology detect" in line


def test_make_plan_checks_nothing_where_the_topology_names_no_memory(files: Files) -> None:
    """Calls of `make_plan` and trainings know their devices, as documented."""
    workload = load_workload(files("model.yaml", {"batch_size": 64, "tables": {"user": table_of(512)}}))
    assert make_plan(workload, Topology(device="h100"))["user"].shards[0].ranks == (0,)


def test_the_fullest_rank_is_shown(output_of, files: Files, tmp_path: Path) -> None:
    """The fullest of 80 ranks holds a large table with few lookups, so it is not among the 64 busiest."""
    tables = {"large": table_of(50, pooling_factor=0.001), "busy": table_of(1, copies=79, pooling_factor=30)}
    others = [rank for rank in range(80) if rank != 70]
    rules = {
        "large": {"sharding": ["table_wise"], "ranks": [70]},
        "busy_*": {"sharding": ["table_wise"], "ranks": others},
    }
    workload = files("model.yaml", {"batch_size": 4096, "tables": tables})
    machines, constraints = (
        files("m.yaml", {"num_hosts": 10, "devices_per_host": 8, "device": "h100"}),
        files("c.yaml", {"tables": rules}),
    )
    out = output_of(
        "plan", workload, "--topology", machines, "--constraints", constraints, "--html", tmp_path / "p.html"
    )
    prediction = find_plan(
        load_workload(workload), Topology.load(machines), constraints=Constraints.load(constraints)
    ).prediction
    held = prediction.peak_bytes()
    assert held.argmax() == 70 and held[70] > 50e9
    assert 70 not in sorted(range(80), key=lambda rank: -prediction.compute_s[rank])[:64]
    assert f"fullest ranks: hbm {held[70] / 1e9:.1f} GB of 80.0 GB on rank 70" in out
    assert "the fullest and busiest 16 of 80" in out
    [row] = [line for line in out.splitlines() if re.match(r"70 +[\d.]", line)]
    assert f" {held[70] / 1e6:,.1f} " in row
    page = (tmp_path / "p.html").read_text()
    assert f"hbm {held[70] / 1e9:.1f} GB of 80.0 GB on rank 70" in page and ">rank 70<" in page
    busiest = int(prediction.compute_s.argmax())
    assert re.search(rf"^{busiest} +[\d.]", out, re.MULTILINE)
