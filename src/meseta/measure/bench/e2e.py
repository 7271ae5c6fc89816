"""`meseta bench e2e`: who trains the same DLRM, and what the figures mean."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meseta.machine.processors import read_processor
from meseta.measure.bench.e2e_peers import PyTorchTraining, TorchRecTraining
from meseta.measure.bench.peers import TUNED_MALLOC, Peers
from meseta.measure.bench.workloads import shrink
from meseta.measure.harness.interleaved import TimingOptions, TimingResult, run_interleaved
from meseta.measure.harness.target import BenchmarkTarget
from meseta.measure.harness.worker_group import TargetSpec, WorkerGroup
from meseta.measure.synthetic_batches import DlrmWorkload
from meseta.spec import MesetaError
from meseta.telemetry.benchmark_history import PeerComparison

AUTOCAST = "autocast"
"""A peer's variant that computes in bfloat16: shown, but ours in float32 is not measured against it."""


@dataclass(frozen=True)
class MesetaTargets:
    """Where our contender is; it stands above this folder, so it is handed down."""

    target: type[BenchmarkTarget]
    """Trains."""
    check: type[BenchmarkTarget]
    """Its `check` compares losses."""


@dataclass(frozen=True)
class E2eResult:
    """One contest."""

    workload: DlrmWorkload
    targets: tuple[TargetSpec, ...]
    timing_result: TimingResult

    def samples_per_s(self, member: TargetSpec) -> float | None:
        """Median rate of all ranks together."""
        seconds = self.timing_result.seconds(member, "step", member.thread_counts[0])
        return self.workload.lookups.batch_size / seconds if seconds else None

    def best_peer(self, num_ranks: int) -> TargetSpec | None:
        """The fastest other system in float32 on so many ranks."""
        rates = {
            member.title: (rate, member)
            for member in self.targets
            if member.name != "ours" and AUTOCAST not in member.variant and member.num_ranks == num_ranks
            if (rate := self.samples_per_s(member))
        }
        return max(rates.values(), key=lambda pair: pair[0])[1] if rates else None


def check_training(trainings: Sequence[DlrmWorkload], ours: MesetaTargets) -> None:
    """Compare our losses with plain PyTorch's on smaller tables; raises MesetaError where they differ."""
    wrong: list[str] = []
    with WorkerGroup(TargetSpec(name="gate", target_class=ours.check, arguments={})) as team:
        for training in trainings:
            traffic = shrink(training.lookups, max_rows=1000, max_batch=256)
            shape = dataclasses.asdict(dataclasses.replace(training, lookups=traffic))
            wrong += team.call("check", workload=shape)
    if wrong:
        raise MesetaError(f"bench: our training is wrong, so nothing is measured: {'; '.join(wrong[:3])}")


def training_targets(
    training: DlrmWorkload, layout: tuple[int, int], ours: MesetaTargets, peers: Peers
) -> list[TargetSpec]:
    """Everybody who trains on (processes, threads of each); in bfloat16 only where the processor multiplies it."""
    num_ranks, num_threads = layout
    table_bytes = 4.0 * training.lookups.num_elements
    size = f"{num_ranks} x {num_threads}"

    def member(
        name: str, contender: type[BenchmarkTarget], variant: tuple[str, ...], python: str, copies: int = 1
    ) -> TargetSpec:
        dense_dtype = "bfloat16" if {"bfloat16", AUTOCAST} & set(variant) else "float32"
        arguments = {"workload": dataclasses.asdict(training), "optimizer": variant[0], "dense_dtype": dense_dtype}
        return TargetSpec(
            name=name,
            variant=(*variant, size),
            target_class=contender,
            arguments=arguments,
            python=python,
            environment={**TUNED_MALLOC} if "malloc" in variant else {},
            num_ranks=num_ranks,
            thread_counts=(num_threads,),
            memory_bytes=copies * table_bytes + 1.5e9 * num_ranks,
        )

    pays = read_processor().bfloat16_unavailable_reason() is None
    variants = [("sgd", "float32"), *([("sgd", "bfloat16")] if pays else []), ("rowwise_adagrad", "float32")]
    found = [member("ours", ours.target, variant, sys.executable) for variant in variants]
    for malloc in ((), ("malloc",)):
        if "PyTorch" in peers.available:
            found.append(member("PyTorch", PyTorchTraining, ("sgd", "float32", *malloc), sys.executable, num_ranks))
            if pays:
                found.append(member("PyTorch", PyTorchTraining, ("sgd", AUTOCAST, *malloc), sys.executable, num_ranks))
        if "TorchRec" in peers.available:
            for optimizer in ("sgd", "rowwise_adagrad"):
                found.append(member("TorchRec", TorchRecTraining, (optimizer, "float32", *malloc), peers.python))
    return found


def measure_training(
    training: DlrmWorkload, contestants: Sequence[TargetSpec], timing: TimingOptions, log: Callable[[str], None]
) -> E2eResult:
    """Run one contest."""
    outcome = run_interleaved(contestants, timing, lambda text: log(f"{training.name}: {text}"))
    return E2eResult(workload=training, targets=tuple(contestants), timing_result=outcome)


def comparisons(result: E2eResult) -> list[PeerComparison]:
    """Ours beside every peer on as many ranks, and ours on several ranks beside ours on one."""
    found = []
    rates = {member.title: rate for member in result.targets if (rate := result.samples_per_s(member))}
    ours = [member for member in result.targets if member.name == "ours" and member.title in rates]
    for member in ours:
        others = [o for o in result.targets if o.num_ranks == member.num_ranks and o.name != "ours"]
        others += [o for o in ours if o.num_ranks < member.num_ranks and o.variant[:-1] == member.variant[:-1]]
        for other in others:
            if other.title not in rates:
                continue
            versions = {
                **result.timing_result.facts[member.title]["versions"],
                **result.timing_result.facts[other.title]["versions"],
            }
            comparison = PeerComparison(
                benchmark="e2e",
                case=f"{result.workload.name} {' '.join(member.variant)}",
                metric="training",
                value=rates[member.title],
                unit="samples/s",
                peer=other.title,
                peer_value=rates[other.title],
                versions=versions,
            )
            found.append(comparison)
    return found
