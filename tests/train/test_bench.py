"""The contenders of `meseta bench e2e`."""

from dataclasses import asdict, replace

import pytest
import torch

from meseta.measure.bench import e2e
from meseta.measure.bench.e2e_peers import PyTorchTraining
from meseta.measure.bench.peers import Peers
from meseta.measure.bench.workloads import E2E_WORKLOADS, shrink
from meseta.measure.harness.interleaved import Timing, TimingResult
from meseta.measure.harness.worker_group import TimedWindow
from meseta.measure.synthetic_batches import make_training_batches
from meseta.system.processors import Processor
from meseta.train.bench import MesetaTraining, TrainingCheck

OURS = e2e.MesetaTargets(target=MesetaTraining, check=TrainingCheck)
ALL = Peers("peer-python", frozenset({"PyTorch", "TorchRec"}), ())
TINY = {t.name: replace(t, lookups=shrink(t.lookups, max_rows=50, max_batch=16, max_tables=5)) for t in E2E_WORKLOADS}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("name", ["d16_2k", "rm1"])
def test_our_losses_are_plain_pytorch_s(name: str) -> None:
    pytest.importorskip("meseta._C")
    assert TrainingCheck().check(asdict(TINY[name])) == []


def test_the_gate_sees_another_learning_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("meseta._C")
    from meseta.train import bench

    monkeypatch.setattr(bench, "TOLERANCE", -1.0)
    wrong = TrainingCheck().check(asdict(TINY["d16_2k"]))
    assert len(wrong) == 5 and wrong[0].startswith("d16_2k, step 1: our loss is ")


def test_contenders_take_steps() -> None:
    pytest.importorskip("meseta._C")
    torch.use_deterministic_algorithms(False)
    for contender in (MesetaTraining(asdict(TINY["rm2"]), "sgd"), PyTorchTraining(asdict(TINY["rm2"]), "sgd")):
        assert contender.facts()["samples_per_call"] == 16
        assert contender.time("step", 0, 2) > 0
    plain, samples = PyTorchTraining(asdict(TINY["d16_2k"]), "sgd"), make_training_batches(TINY["d16_2k"])[0]
    losses = [plain.step(samples).item() for _ in range(5)]
    assert losses == sorted(losses, reverse=True)


def test_the_best_peer_counts_and_autocast_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    here = len(e2e.training_targets(TINY["d16_2k"], (1, 2), OURS, ALL))
    monkeypatch.setattr(Processor, "bfloat16_unavailable_reason", lambda _: "an old processor")
    assert len(e2e.training_targets(TINY["d16_2k"], (1, 2), OURS, ALL)) in (here, here - 3)
    monkeypatch.setattr(Processor, "bfloat16_unavailable_reason", lambda _: None)
    members = e2e.training_targets(TINY["d16_2k"], (1, 2), OURS, ALL)
    members += e2e.training_targets(TINY["d16_2k"], (2, 1), OURS, ALL)
    assert len({m.title for m in members}) == len(members) == 22
    tuned = [m for m in members if "malloc" in m.variant]
    assert len(tuned) == 8 and all("MALLOC_TOP_PAD_" in m.environment for m in tuned)
    outcome = TimingResult()
    for index, member in enumerate(members):
        seconds = 0.01 if "autocast" in member.variant else 0.1 + index
        outcome.timings[member.title, "step", member.thread_counts[0]] = Timing((TimedWindow(seconds, 0.0),), 0.15)
        outcome.facts[member.title] = {"versions": {}}
    result = e2e.E2eResult(workload=TINY["d16_2k"], targets=tuple(members), timing_result=outcome)
    best = result.best_peer(1)
    assert best is not None and best.title == "PyTorch sgd float32 1 x 2"
    found = {(c.case, c.peer): c.ratio for c in e2e.comparisons(result)}
    assert found["d16_2k sgd float32 1 x 2", best.title] == pytest.approx(3.1 / 0.1)
    assert ("d16_2k sgd float32 2 x 1", "ours sgd float32 1 x 2") in found
