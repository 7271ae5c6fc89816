"""`meseta bench e2e`: who trains the same DLRM, and what the figures mean."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meseta.machine.processors import this_processor
from meseta.measure.bench.e2e_peers import Plain, TorchrecTraining
from meseta.measure.bench.peers import TUNED_MALLOC, Peers
from meseta.measure.bench.workloads import small
from meseta.measure.contest.contender import Contender
from meseta.measure.contest.contest import Outcome, TimingOptions, run_contest
from meseta.measure.contest.team import Member, Team
from meseta.measure.traffic import Training
from meseta.spec import MesetaError
from meseta.telemetry.history import PeerComparison

INFORMATIVE = "autocast"
"""A peer's variant that computes in bfloat16: shown, but ours in float32 is not measured against it."""


@dataclass(frozen=True)
class OurContenders:
    """Where our contender is; it stands above this folder, so it is handed down."""

    contender: type[Contender]
    """Trains."""
    gate: type[Contender]
    """Its `check` compares losses."""


@dataclass(frozen=True)
class E2eResult:
    """One contest."""

    training: Training
    members: tuple[Member, ...]
    outcome: Outcome

    def samples_per_s(self, member: Member) -> float | None:
        """Median rate of all ranks together."""
        seconds = self.outcome.seconds(member, "step", member.num_threads[0])
        return self.training.traffic.batch_size / seconds if seconds else None

    def best_peer(self, num_ranks: int) -> Member | None:
        """The fastest other system in float32 on so many ranks."""
        rates = {
            member.title: (rate, member)
            for member in self.members
            if member.name != "ours" and INFORMATIVE not in member.variant and member.num_ranks == num_ranks
            if (rate := self.samples_per_s(member))
        }
        return max(rates.values(), key=lambda pair: pair[0])[1] if rates else None


def check(trainings: Sequence[Training], ours: OurContenders) -> None:
    """Compare our losses with plain PyTorch's on smaller tables; raises MesetaError where they differ."""
    wrong: list[str] = []
    with Team(Member(name="gate", contender=ours.gate, arguments={})) as team:
        for training in trainings:
            traffic = small(training.traffic, max_rows=1000, max_batch=256)
            shape = dataclasses.asdict(dataclasses.replace(training, traffic=traffic))
            wrong += team.ask("check", training=shape)
    if wrong:
        raise MesetaError(f"bench: our training is wrong, so nothing is measured: {'; '.join(wrong[:3])}")


def members(training: Training, layout: tuple[int, int], ours: OurContenders, peers: Peers) -> list[Member]:
    """Everybody who trains on (processes, threads of each); in bfloat16 only where the processor multiplies it."""
    num_ranks, num_threads = layout
    table_bytes = 4.0 * training.traffic.num_elements
    size = f"{num_ranks} x {num_threads}"

    def member(name: str, contender: type[Contender], variant: tuple[str, ...], python: str, copies: int = 1) -> Member:
        dense_dtype = "bfloat16" if {"bfloat16", INFORMATIVE} & set(variant) else "float32"
        arguments = {"training": dataclasses.asdict(training), "optimizer": variant[0], "dense_dtype": dense_dtype}
        return Member(
            name=name,
            variant=(*variant, size),
            contender=contender,
            arguments=arguments,
            python=python,
            environment={**TUNED_MALLOC} if "malloc" in variant else {},
            num_ranks=num_ranks,
            num_threads=(num_threads,),
            memory_bytes=copies * table_bytes + 1.5e9 * num_ranks,
        )

    pays = this_processor().why_no_bfloat16() is None
    variants = [("sgd", "float32"), *([("sgd", "bfloat16")] if pays else []), ("rowwise_adagrad", "float32")]
    found = [member("ours", ours.contender, variant, sys.executable) for variant in variants]
    for malloc in ((), ("malloc",)):
        if "PyTorch" in peers.found:
            found.append(member("PyTorch", Plain, ("sgd", "float32", *malloc), sys.executable, num_ranks))
            if pays:
                found.append(member("PyTorch", Plain, ("sgd", INFORMATIVE, *malloc), sys.executable, num_ranks))
        if "TorchRec" in peers.found:
            for optimizer in ("sgd", "rowwise_adagrad"):
                found.append(member("TorchRec", TorchrecTraining, (optimizer, "float32", *malloc), peers.python))
    return found


def measure(
    training: Training, contestants: Sequence[Member], timing: TimingOptions, log: Callable[[str], None]
) -> E2eResult:
    """Run one contest."""
    outcome = run_contest(contestants, timing, lambda text: log(f"{training.name}: {text}"))
    return E2eResult(training=training, members=tuple(contestants), outcome=outcome)


def comparisons(result: E2eResult) -> list[PeerComparison]:
    """Ours beside every peer on as many ranks, and ours on several ranks beside ours on one."""
    found = []
    rates = {member.title: rate for member in result.members if (rate := result.samples_per_s(member))}
    ours = [member for member in result.members if member.name == "ours" and member.title in rates]
    for member in ours:
        others = [o for o in result.members if o.num_ranks == member.num_ranks and o.name != "ours"]
        others += [o for o in ours if o.num_ranks < member.num_ranks and o.variant[:-1] == member.variant[:-1]]
        for other in others:
            if other.title not in rates:
                continue
            versions = {
                **result.outcome.facts[member.title]["versions"],
                **result.outcome.facts[other.title]["versions"],
            }
            comparison = PeerComparison(
                benchmark="e2e",
                case=f"{result.training.name} {' '.join(member.variant)}",
                metric="training",
                value=rates[member.title],
                unit="samples/s",
                peer=other.title,
                peer_value=rates[other.title],
                versions=versions,
            )
            found.append(comparison)
    return found
