"""benchmarks/bench_ops.py: checks of correctness, targets, and meaning of the results."""

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from peers import correctness, ops
from peers.installed import Peers, find_peers
from peers.ops_meseta import MesetaOperators
from peers.ops_peers import PyTorchOperators
from peers.workloads import OPS_WORKLOADS, OPTIMIZERS, shrink

from meseta.measure.harness.interleaved import Timing, TimingResult
from meseta.measure.harness.worker_group import TargetSpec, TimedWindow
from meseta.spec import MesetaError

ALL = Peers("peer-python", frozenset({"PyTorch", "FBGEMM", "TorchRec"}), ())
TINY = {traffic.name: shrink(traffic, max_rows=30, max_batch=8, max_tables=4) for traffic in OPS_WORKLOADS}


@pytest.mark.parametrize("name", ["mixed", "weighted", "mean"])
def test_operators_match_the_reference(name: str) -> None:
    pytest.importorskip("meseta._C")
    assert correctness.OperatorCheck().check(asdict(TINY[name]), "adam", "float32") == []


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_matches_the_reference(optimizer: str) -> None:
    pytest.importorskip("meseta._C")
    assert correctness.OperatorCheck().check(asdict(TINY["c"]), optimizer, "float32") == []


def test_the_check_reports_a_wrong_update(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("meseta._C")
    right = correctness.reference_step
    monkeypatch.setattr(correctness, "reference_step", lambda o, w, g, s, h: right(o, w, g * 1.001, s, h))
    wrong = correctness.OperatorCheck().check(asdict(TINY["c"]), "sgd", "float32")
    assert wrong and "rows of table 0 differ" in wrong[0]


def test_nothing_is_measured_after_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    class FailedCheck:
        def __init__(self, member: TargetSpec) -> None: ...
        def __enter__(self) -> "FailedCheck":
            return self

        def __exit__(self, *_: object) -> None: ...
        def call(self, method: str, **arguments: Any) -> list[str]:
            return ["lookup differs by 1"]

    monkeypatch.setattr(ops, "WorkerGroup", FailedCheck)
    with pytest.raises(MesetaError, match="so nothing is measured: sgd float32: lookup differs by 1"):
        ops.check_operators([TINY["c"]], [("sgd", "float32")])


def test_contests_contain_the_compared_targets() -> None:
    contests = dict(ops.contests(OPS_WORKLOADS[0], ("rowwise_adagrad", "adam"), None, (1, 2), ALL))
    assert [m.title for m in contests["rowwise_adagrad"]] == [
        *(f"ours rowwise_adagrad {dtype}" for dtype in ("float32", "float16", "bfloat16")),
        *("FBGEMM rowwise_adagrad float32", "TorchRec rowwise_adagrad float32", "FBGEMM rowwise_adagrad float16"),
    ]
    assert [m.title for m in contests["adam"]] == [
        "ours rowwise_adagrad float32", "ours adam float32", "PyTorch adam float32"
    ]  # fmt: skip
    assert {m.python for m in contests["rowwise_adagrad"] if m.name != "ours"} == {"peer-python"}
    alone = dict(ops.contests(OPS_WORKLOADS[0], ("adam",), ["float16"], (2,), Peers("", frozenset(), ())))
    assert [m.title for m in alone["adam"]] == ["ours rowwise_adagrad float16", "ours adam float16"]


def outcome(members: list[TargetSpec], seconds: dict[tuple[str, str], float]) -> TimingResult:
    facts = {"ids_per_call": {"lookup": 100, "operator": 100, "step": 100, "limit": 1000}, "bytes_per_id": 64.0}
    result = TimingResult()
    for member in members:
        bytes_each = {"adam": 3000.0}.get(member.variant[0], 1000.0)
        result.facts[member.title] = {**facts, "versions": {"torch": "9"}, "update_bytes": bytes_each}
        for (title, action), spent_s in seconds.items():
            if title == member.title:
                result.timings[title, action, 2] = Timing((TimedWindow(spent_s, 0.0),), 0.15)
    return result


def test_rates_and_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    [(_, members)] = ops.contests(OPS_WORKLOADS[0], ["adam"], None, (2,), ALL)
    base, ours, peer = (member.title for member in members)
    seconds = {(base, "step"): 0.1, (ours, "step"): 0.36, (peer, "step"): 3.6}
    seconds |= {(ours, "lookup"): 0.02, (ours, "limit"): 0.1, (peer, "lookup"): 0.04}
    monkeypatch.setattr(ops, "run_interleaved", lambda m, timing, log: outcome(m, seconds))
    result = ops.measure_operators(OPS_WORKLOADS[0], "adam", members, ops.TimingOptions(), print)
    lines = {line.target.title: line for line in result.measurements}
    assert lines[ours].lookups_per_s == 5000.0 and lines[ours].gather_limit_per_s == 10_000.0
    assert lines[peer].gather_limit_per_s == 10_000.0  # of the same rows, measured in our process
    share = result.step_ratio(lines[ours])
    assert share == pytest.approx(0.36 / (0.1 * 3.0))
    assert result.step_ratio(lines[base]) is None and result.step_ratio(lines[peer]) is None
    rows = {(c.case.split(" ", 3)[-1], c.metric, c.peer): c for c in ops.comparisons(result)}
    assert rows["adam float32", "train", "PyTorch adam float32"].ratio == pytest.approx(10.0)
    assert rows["adam float32", "lookup", "PyTorch adam float32"].ratio == pytest.approx(2.0)
    assert rows["adam float32", "lookup", "gather limit"].ratio == pytest.approx(0.5)
    assert rows["adam float32", "train step", "bytes x rowwise_adagrad's step"].ratio == pytest.approx(1 / share)


def test_our_target_counts_its_bytes() -> None:
    pytest.importorskip("meseta._C")
    traffic = replace(TINY["c"], dims=(16,) * 4)
    for optimizer, update_bytes in (("sgd", 128), ("rowwise_adagrad", 136), ("adagrad", 256), ("adam", 384)):
        target = MesetaOperators(asdict(traffic), optimizer, "float32")
        facts = target.facts()
        assert facts["update_bytes"] == update_bytes and facts["bytes_per_id"] == 64
        for action in facts["actions"]:
            assert target.time(action, 0, 2) > 0


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_the_target_of_pytorch_trains(optimizer: str) -> None:
    torch.use_deterministic_algorithms(False)
    target = PyTorchOperators(asdict(TINY["weighted"]), optimizer, "float32")
    before = target.tables[0].weight.detach().clone()
    assert target.time("lookup", 0, 1) > 0
    assert torch.equal(before, target.tables[0].weight)
    assert target.time("step", 0, 1) > 0
    assert not torch.equal(before, target.tables[0].weight)


def test_a_missing_peer_is_named_with_its_installation() -> None:
    peers = find_peers("/nowhere/python", enabled=True)
    assert peers.available == {"PyTorch"}
    assert (
        "FBGEMM is not installed in /nowhere" in peers.missing[0] and "pip install fbgemm-gpu-cpu" in peers.missing[0]
    )
    assert "--peer-python or PEER_PYTHON" in peers.missing[1]
    assert find_peers("/nowhere/python", enabled=False) == Peers("/nowhere/python", frozenset(), ())
