"""Benchmark `meseta bench e2e`: targets that train the same DLRM, and comparison of their rates."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meseta.measure.bench.e2e_peers import PyTorchTraining, TorchRecTraining
from meseta.measure.bench.peers import TUNED_MALLOC, Peers
from meseta.measure.bench.workloads import shrink
from meseta.measure.harness.interleaved import TimingOptions, TimingResult, run_interleaved
from meseta.measure.harness.target import BenchmarkTarget
from meseta.measure.harness.worker_group import TargetSpec, WorkerGroup
from meseta.measure.synthetic_batches import DlrmWorkload
from meseta.spec import MesetaError
from meseta.system.processors import read_processor
from meseta.telemetry.benchmark_history import PeerComparison

AUTOCAST = "autocast"
"""Variant of a peer that computes in bfloat16 by autocast. It is shown, but not compared with Meseta in float32."""


@dataclass(frozen=True)
class MesetaTargets:
    """Benchmark targets of Meseta's training."""

    # The caller passes them, because this package must not import the training code that they use.

    target: type[BenchmarkTarget]
    """Target whose action `step` trains."""
    check: type[BenchmarkTarget]
    """Target whose method `check` compares losses with plain PyTorch."""


@dataclass(frozen=True)
class E2eResult:
    """Timings of all targets for one workload."""

    workload: DlrmWorkload
    targets: tuple[TargetSpec, ...]
    timing_result: TimingResult

    def samples_per_s(self, member: TargetSpec) -> float | None:
        """Return the median rate of all ranks in total, or `None` if the target was not timed."""
        seconds = self.timing_result.seconds(member, "step", member.thread_counts[0])
        return self.workload.lookups.batch_size / seconds if seconds else None

    def best_peer(self, num_ranks: int) -> TargetSpec | None:
        """Return the fastest target of another system in float32 on `num_ranks` ranks, or `None` if there is none."""
        rates = {
            member.title: (rate, member)
            for member in self.targets
            if member.name != "ours" and AUTOCAST not in member.variant and member.num_ranks == num_ranks
            if (rate := self.samples_per_s(member))
        }
        return max(rates.values(), key=lambda pair: pair[0])[1] if rates else None


def check_training(trainings: Sequence[DlrmWorkload], ours: MesetaTargets) -> None:
    """Compare losses of Meseta with those of plain PyTorch, on the same models with smaller tables.

    Raises MesetaError if they differ.
    """
    wrong: list[str] = []
    with WorkerGroup(TargetSpec(name="gate", target_class=ours.check, arguments={})) as team:
        for training in trainings:
            traffic = shrink(training.lookups, max_rows=1000, max_batch=256)
            shape = dataclasses.asdict(dataclasses.replace(training, lookups=traffic))
            wrong += team.call("check", workload=shape)
    if wrong:
        raise MesetaError(
            f"bench: Meseta's training deviates from the reference, so nothing is measured: {'; '.join(wrong[:3])}"
        )


def training_targets(
    training: DlrmWorkload, layout: tuple[int, int], ours: MesetaTargets, peers: Peers
) -> list[TargetSpec]:
    """Return the targets for `layout`, which is (number of processes, threads per process).

    Variants in bfloat16 are included only if the processor supports it efficiently.
    """
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
    targets = [member("ours", ours.target, variant, sys.executable) for variant in variants]
    for malloc in ((), ("malloc",)):
        if "PyTorch" in peers.available:
            targets.append(member("PyTorch", PyTorchTraining, ("sgd", "float32", *malloc), sys.executable, num_ranks))
            if pays:
                targets.append(
                    member("PyTorch", PyTorchTraining, ("sgd", AUTOCAST, *malloc), sys.executable, num_ranks)
                )
        if "TorchRec" in peers.available:
            for optimizer in ("sgd", "rowwise_adagrad"):
                targets.append(member("TorchRec", TorchRecTraining, (optimizer, "float32", *malloc), peers.python))
    return targets


def measure_training(
    training: DlrmWorkload, contestants: Sequence[TargetSpec], timing: TimingOptions, log: Callable[[str], None]
) -> E2eResult:
    """Time all targets in `contestants` on one workload."""
    outcome = run_interleaved(contestants, timing, lambda text: log(f"{training.name}: {text}"))
    return E2eResult(workload=training, targets=tuple(contestants), timing_result=outcome)


def comparisons(result: E2eResult) -> list[PeerComparison]:
    """Return the comparisons of Meseta with each peer on the same number of ranks, and with itself on fewer ranks."""
    pairs = []
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
            pairs.append(comparison)
    return pairs
