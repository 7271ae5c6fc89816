"""`meseta bench ops`: which contenders meet on a configuration, and what their figures mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from meseta.measure.bench.gate import Gate
from meseta.measure.bench.ops_ours import Ours
from meseta.measure.bench.ops_peers import EmbeddingBags, Fbgemm, Torchrec
from meseta.measure.bench.peers import TUNED_MALLOC, Peers
from meseta.measure.bench.workloads import small
from meseta.measure.contest.contest import Outcome, TimingOptions, run_contest
from meseta.measure.contest.team import Member, Team
from meseta.measure.traffic import Traffic
from meseta.spec import MesetaError
from meseta.telemetry.history import PeerComparison

BASE = "rowwise_adagrad"
"""The optimizer that the steps of the others are measured against."""
MODEL_LIMIT = 1.3
"""How much longer than its share of bytes another optimizer's step may take."""
PEERS = {
    "rowwise_adagrad": (("FBGEMM", "float32"), ("TorchRec", "float32"), ("FBGEMM", "float16")),
    "sgd": (("PyTorch", "float32"), ("FBGEMM", "float32"), ("TorchRec", "float32"), ("FBGEMM", "float16")),
    "adagrad": (("PyTorch", "float32"), ("FBGEMM", "float32"), ("TorchRec", "float32")),
    "adam": (("PyTorch", "float32"),),
}
"""Who else has an optimizer on CPUs, in which dtype."""
_PEERS = {"FBGEMM": Fbgemm, "TorchRec": Torchrec, "PyTorch": EmbeddingBags}
_STATES = {"sgd": 0, "rowwise_adagrad": 0, "adagrad": 1, "rmsprop": 1, "rowwise_adam": 1, "lars": 1, "sgd_momentum": 1}
_PROCESS_BYTES = 0.8e9


@dataclass(frozen=True)
class Line:
    """The figures of one member with so many threads; rates in 1/s, None where not measured."""

    member: Member
    num_threads: int
    lookups: float | None
    operator: float | None
    """The bare operator, without the module around it."""
    trained: float | None
    step_s: float | None
    limit: float | None
    """Rows a second that memory gives, for our dtype."""
    bytes_per_id: float
    is_noisy: bool
    update_bytes: float | None
    """Bytes of an update per unique row, of ours."""


@dataclass(frozen=True)
class OpsResult:
    """One contest: ours with one optimizer, and whoever has it too."""

    traffic: Traffic
    optimizer: str
    lines: tuple[Line, ...]
    outcome: Outcome

    def find(self, name: str, variant: tuple[str, str], num_threads: int) -> Line | None:
        """The line of a member."""
        for line in self.lines:
            if (line.member.name, line.member.variant, line.num_threads) == (name, variant, num_threads):
                return line
        return None

    def base(self, line: Line) -> Line | None:
        """What a line is compared with: our own with its optimizer and dtype; for ours, that in float32, or itself."""
        optimizer, dtype = line.member.variant
        if line.member.name != "ours":
            return self.find("ours", (optimizer, dtype), line.num_threads)
        return self.find("ours", (optimizer, "float32"), line.num_threads) or line

    def alone(self, line: Line) -> Line | None:
        """The same member with one thread, for one of ours with several."""
        optimizer, dtype = line.member.variant
        several = line.member.name == "ours" and line.num_threads > 1
        return self.find("ours", (optimizer, dtype), 1) if several else None

    def model_share(self, line: Line) -> float | None:
        """Step time over what the bytes of its rows and state let expect from row-wise Adagrad's; at most MODEL_LIMIT
        is wanted. None for other systems, and for row-wise Adagrad itself."""
        optimizer, dtype = line.member.variant
        base = self.find("ours", (BASE, dtype), line.num_threads)
        if line.member.name != "ours" or optimizer == BASE or base is None:
            return None
        if not (line.step_s and base.step_s and line.update_bytes and base.update_bytes):
            return None
        return line.step_s / (base.step_s * line.update_bytes / base.update_bytes)


def check(traffics: Sequence[Traffic], variants: Sequence[tuple[str, str]]) -> None:
    """Compare our lookups and train steps with plain torch in float64, on the same tables with fewer rows.

    Raises MesetaError where they differ: figures of a wrong operator are worth nothing.
    """
    gate = Member(name="gate", contender=Gate, arguments={})
    wrong: list[str] = []
    with Team(gate) as team:
        for traffic in traffics:
            shape = dataclasses.asdict(small(traffic, max_rows=500, max_batch=256, max_tables=8))
            for optimizer, dtype in variants:
                lines = team.ask("check", traffic=shape, optimizer=optimizer, dtype=dtype)
                wrong += [f"{optimizer} {dtype}: {line}" for line in lines]
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise MesetaError(
            f"bench: our operators are wrong, so nothing is measured: {'; '.join(wrong[:3])}{more}; "
            "run the tests of src/meseta/ops"
        )


def contests(
    traffic: Traffic, optimizers: Sequence[str], dtypes: Sequence[str] | None, threads: tuple[int, ...], peers: Peers
) -> Iterator[tuple[str, list[Member]]]:
    """(optimizer, members) of each contest on a configuration. `dtypes` None: all that are stored, for row-wise
    Adagrad; float32 for the others."""
    for optimizer in optimizers:
        own = dtypes or (("float32", "float16", "bfloat16") if optimizer == BASE else ("float32",))
        variants = [] if optimizer == BASE else [(BASE, dtype) for dtype in own]
        members = [_ours(traffic, variant, threads) for variant in [*variants, *((optimizer, d) for d in own)]]
        members += [
            _peer(traffic, name, (optimizer, dtype), threads, peers)
            for name, dtype in PEERS.get(optimizer, ())
            if name in peers.found and dtype in own
        ]
        yield optimizer, members


def measure(
    traffic: Traffic, optimizer: str, members: Sequence[Member], timing: TimingOptions, log: Callable[[str], None]
) -> OpsResult:
    """Run one contest."""
    outcome = run_contest(members, timing, lambda text: log(f"{traffic.name}: {text}"))
    lines = []
    for member in members:
        if member.title in outcome.failures:
            continue
        lines += [_line(member, threads, outcome, members) for threads in member.num_threads]
    return OpsResult(traffic=traffic, optimizer=optimizer, lines=tuple(lines), outcome=outcome)


def comparisons(result: OpsResult) -> list[PeerComparison]:
    """Every figure of ours beside the peers', the gather limit, one thread and the model, for the history."""
    found = []
    for line in result.lines:
        base = result.base(line)
        if base is None:
            continue
        ours, other = (line, base) if line.member.name == "ours" else (base, line)
        threads = f"{line.num_threads} thread{'s' * (line.num_threads > 1)}"
        for metric, value, unit, peer, peer_value in _pairs(result, line, ours, other):
            if not value or not peer_value:
                continue
            comparison = PeerComparison(
                benchmark="ops",
                case=f"{result.traffic.name} {threads} {' '.join(ours.member.variant)}",
                metric=metric,
                value=value,
                unit=unit,
                peer=peer,
                peer_value=peer_value,
                versions={**_versions(result, ours), **_versions(result, other)},
            )
            found.append(comparison)
    return found


_Pair = tuple[str, float | None, str, str, float | None]


def _pairs(result: OpsResult, line: Line, ours: Line, other: Line) -> Iterator[_Pair]:
    """(metric, value, unit, peer, value of the peer) of a line; None where one was not measured."""
    rate = "lookups/s"
    if ours is not other:
        yield "lookup", ours.lookups, rate, other.member.title, other.lookups
        yield "train", ours.trained, rate, other.member.title, other.trained
    if line.member.name != "ours":
        return
    yield "lookup", line.lookups, rate, "gather limit", line.limit
    yield "bare operator", line.operator, rate, "gather limit", line.limit
    alone = result.alone(line)
    if alone is not None:
        yield "lookup", line.lookups, rate, "1 thread", alone.lookups
        yield "train", line.trained, rate, "1 thread", alone.trained
        yield "gather limit", line.limit, rate, "1 thread", alone.limit
    share = result.model_share(line)
    if share is not None and line.step_s is not None:
        yield "train step", 1e3 * line.step_s, "ms", f"bytes x {BASE}'s step", 1e3 * line.step_s / share


def _versions(result: OpsResult, line: Line) -> dict[str, str]:
    versions: dict[str, str] = result.outcome.facts[line.member.title]["versions"]
    return versions


def _line(member: Member, threads: int, outcome: Outcome, members: Sequence[Member]) -> Line:
    facts = outcome.facts[member.title]
    seconds = {action: outcome.seconds(member, action, threads) for action in ("lookup", "operator", "step")}

    def rate(action: str) -> float | None:
        spent_s = seconds[action]
        return facts["ids_per_call"][action] / spent_s if spent_s else None

    limit, bytes_per_id = None, 0.0
    for other in members:  # the limit is measured in our process, on tables of the same shape and dtype
        own = outcome.facts.get(other.title, {})
        spent_s = outcome.seconds(other, "limit", threads)
        if other.name == "ours" and other.variant[1] == member.variant[1] and spent_s and "bytes_per_id" in own:
            limit, bytes_per_id = own["ids_per_call"]["limit"] / spent_s, own["bytes_per_id"]
            if other is member or other.variant == member.variant:
                break
    timings = [timing for key, timing in outcome.timings.items() if key[0] == member.title and key[2] == threads]
    return Line(
        member=member,
        num_threads=threads,
        lookups=rate("lookup"),
        operator=rate("operator"),
        trained=rate("step"),
        step_s=seconds["step"],
        limit=limit,
        bytes_per_id=bytes_per_id,
        is_noisy=any(timing.is_noisy for timing in timings),
        update_bytes=facts.get("update_bytes"),
    )


def _ours(traffic: Traffic, variant: tuple[str, str], threads: tuple[int, ...]) -> Member:
    optimizer, dtype = variant
    element_bytes = {"float64": 8, "float32": 4}.get(dtype, 2)
    states = _STATES.get(optimizer, 2)
    return Member(
        name="ours",
        variant=variant,
        contender=Ours,
        arguments={"traffic": dataclasses.asdict(traffic), "optimizer": optimizer, "dtype": dtype},
        num_threads=threads,
        memory_bytes=_PROCESS_BYTES + traffic.num_elements * (element_bytes + 4 * states),
    )


def _peer(traffic: Traffic, name: str, variant: tuple[str, str], threads: tuple[int, ...], peers: Peers) -> Member:
    ours = _ours(traffic, variant, threads)
    return dataclasses.replace(
        ours,
        name=name,
        contender=_PEERS[name],
        environment=TUNED_MALLOC,
        # PyTorch is everywhere, so it runs with the very torch that ours runs with.
        python=ours.python if name == "PyTorch" else peers.python,
    )
