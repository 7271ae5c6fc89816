"""The machinery of benchmarks/bench_house.py: what it draws, compares, allows and judges."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from house_parts.checkouts import Allowed, Checkout, Ledger, first_difference, table
from house_parts.listed import agreement_seconds
from house_parts.plan_cases import planned, read_workload
from house_parts.plans import compare_planned, draw_workload
from house_parts.prepared import CASES
from house_parts.speed import LEAST, Verdict, take_turns
from house_parts.trained import sampled_config

from meseta.config import RunConfig
from meseta.planner import find_plan
from meseta.spec import Topology
from meseta.spec.workload import load_workload
from source_tree import ROOT


@pytest.fixture(scope="module")
def checkout() -> Iterator[Checkout]:
    made = Checkout("this", ROOT)
    made.interpreter = sys.executable
    yield made
    made.close()


@pytest.mark.soak  # a server of commands starts, which nothing but benchmarks/bench_house.py has
@pytest.mark.parametrize("words", [["eval", "."], ["plan", "diff"]])
def test_commands_end_as_in_a_shell(checkout: Checkout, words: list[str]) -> None:
    forked, started = checkout.meseta(*words), checkout.command(*words)
    assert (forked.returncode, forked.stdout, forked.stderr) == (1, started.stdout, started.stderr)


@pytest.mark.soak
def test_a_command_is_killed_at_its_moment(checkout: Checkout, tmp_path: Path) -> None:
    synth = ("data", "synth", "--rows", 10_000_000, "--out", tmp_path / "raw")
    assert checkout.meseta(*synth, when=lambda: any(tmp_path.iterdir())).returncode == -signal.SIGKILL
    start = time.monotonic()
    assert checkout.meseta("--help", when=lambda: time.monotonic() > start + 60).returncode == 0


def test_differences_are_told_or_allowed() -> None:
    ledger = Ledger("runs")
    ledger.compare("config 1", "checksum", "a", "a")
    ledger.compare("config 1", "plan", {"a": [1, 2]}, {"a": [1, 3]})
    ledger.compare("config 2", "unlisted", None, 0)
    allowed = (Allowed("runs", "unl*", "summaries have it now"), Allowed("plans", "plan", "of another part"))
    refused, meant = ledger.split(allowed)
    assert [one.what for one in refused] == ["plan"] and list(meant) == ["summaries have it now"]
    lines = table([ledger], allowed)
    assert "| runs | 3 | 1 | 1 |" in lines
    assert "runs: DIFFERS: plan: config 1: a: [1] 2 became 3" in lines


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, "b: nothing became 2"),
        ([1], [1, 2], "1 and 2 entries"),
        ("same, then x", "same, then y", "'same, then x' became 'same, then y'"),
        ("short", "shorter", "'short' became 'shorter'"),
    ],
)
def test_the_first_difference(before: Any, after: Any, told: str) -> None:
    assert first_difference(before, after) == told


def test_configs_are_drawn_again_and_are_valid(tmp_path: Path) -> None:
    drawn = [sampled_config(number, tmp_path) for number in range(40)]
    assert drawn == [sampled_config(number, tmp_path) for number in range(40)]
    assert {ranks for _, ranks in drawn} == {1, 2, 4}
    assert {document["train"]["accumulate_steps"] for document, _ in drawn} == {1, 3}
    assert {document["embedding"]["dtype"] for document, _ in drawn} == {"float32", "bfloat16", "float64"}
    for document, _ in drawn:
        RunConfig.model_validate({**document, "run_dir": str(tmp_path / "run")})


@pytest.mark.parametrize("number", range(8))
def test_workloads_are_read_as_the_command_reads_them(tmp_path: Path, number: int) -> None:
    document, machines = draw_workload(number)
    path = tmp_path / "workload.yaml"
    path.write_text(yaml.safe_dump(document))
    assert read_workload(yaml.safe_load(path.read_text())) == load_workload(path)
    Topology(**machines)


@pytest.mark.parametrize(
    "hosts", [(1, 1), (1, 4), *(pytest.param(hosts, marks=pytest.mark.soak) for hosts in ((2, 2), (4, 8)))]
)
def test_the_agreement_takes_what_the_page_says(hosts: tuple[int, int]) -> None:
    document, _ = draw_workload(1)
    topology = Topology(num_hosts=hosts[0], devices_per_host=hosts[1], device="a100")
    found = planned(read_workload(document), topology)
    assert found["collectives"].get("agree", 0.0) == pytest.approx(agreement_seconds(topology, num_flags=0), rel=1e-12)


def test_other_places_seconds_and_bytes_are_found() -> None:
    document, machines = draw_workload(1)
    workload, topology = read_workload(document), Topology(**machines)
    now = planned(workload, topology)
    added = now["collectives"]["agree"]
    before = {**now, "collectives": {k: v for k, v in now["collectives"].items() if k != "agree"}}
    before["step_s"] = now["step_s"] - added
    for change, expected in (
        ({}, ["predicted step, by agree"]),
        ({"step_s": now["step_s"]}, ["predicted step"]),
        ({"shards": now["shards"][1:]}, ["shards, as dear"]),
        ({"shards": now["shards"][1:], "step_s": now["step_s"]}, ["shards"]),
        (
            {"phases": {**now["phases"], "steady": now["phases"]["start"]}},
            ["predicted step, by agree", "bytes of steady"],
        ),
    ):
        ledger = Ledger("plans")
        compare_planned(ledger, "workload", {**before, **change}, now, machines)
        assert [one.what for one in ledger.differences] == expected
    assert now["step_s"] == find_plan(workload, topology).prediction.step_s


@pytest.mark.parametrize("name", CASES)
def test_raw_files_are_written_alike(tmp_path: Path, name: str) -> None:
    made = []
    for part in ("first", "second"):
        folder = tmp_path / part
        folder.mkdir()
        made.append([path.read_bytes() for path in CASES[name](folder).sources])
    assert made[0] == made[1] and all(made[0])


def test_a_loss_of_speed_is_one_that_the_interval_proves() -> None:
    assert Verdict.of([0.99, 1.0, 0.97]).passes(LEAST)
    assert not Verdict.of([0.90, 0.91, 0.92]).passes(LEAST)
    assert Verdict.of([0.5]).passes(LEAST)  # one turn proves nothing


def test_turns_are_paired_and_alternate(tmp_path: Path) -> None:
    order = []

    def measure(checkout: Checkout, folder: Path) -> dict[str, float]:
        order.append(checkout.name)
        return {"case": {"before": 2.0, "after": 1.0}[checkout.name] * len(order)}

    pair = Checkout("before", tmp_path), Checkout("after", tmp_path)
    verdicts = take_turns(measure, *pair, tmp_path, 2)
    assert order == ["before", "after", "after", "before"]
    assert verdicts["case"].mean == pytest.approx((2 * 1 / (1 * 2) + 3 * 1 / (4 * 2)) / 2)
