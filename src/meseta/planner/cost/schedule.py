"""Schedules of training steps in which transfers overlap with computation.

A rank computes, starts a transfer, or waits for one. `step_program` lists these actions in the order of
`meseta.pipeline`. `Schedule.longest_cycle` predicts the duration of a step from them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import permutations
from typing import Literal, NamedTuple

import numpy as np

from meseta.planner.cost.reuse import Floats
from meseta.spec import Workload
from meseta.spec.stages import Overlap
from meseta.spec.transfer import GRADIENT_NORM, GRADIENT_TRANSFERS, INTRA_HOST_SUFFIX

ComputeOp = Literal["lookup", "table_update", "dense_only", "score", "back of score", "dense_only backward"]
"""Computation of a step. `dense_only` is `forward_dense`, which needs only dense inputs, and `score` is the remaining
dense part."""
COMPUTE_OPS: tuple[ComputeOp, ...] = (
    "lookup",
    "table_update",
    "dense_only",
    "score",
    "back of score",
    "dense_only backward",
)
# Actions of a rank, and transfers on its link, with overlap `embeddings` and `ids` on one host:
#
#    rank   lookup | dense_only | score | back of score | dense_only backward | table_update | lookup ...
#    link     embeddings, counts | ids .................| gradients ..........|..dense ..............
#
# Transfers use the link one after the other, in the order in which they start. All-reduces of replicated data let those
# transfers overtake for which a rank waits immediately.
EMBEDDINGS, HOST_POOLED_BAGS = "embeddings", "embeddings inter-host"
ALL_REDUCES = ("replicas", "dense")
"""Transfers of the all-reduce lane, which other transfers may overtake."""
PACKING_PREFIX = "packing of "
"""Prefix for the name of a transfer's packing, half of which precedes the transfer, and half follows it."""
MERGED_TRANSFERS = {"weights": "ids", "weights" + INTRA_HOST_SUFFIX: "ids" + INTRA_HOST_SUFFIX}
"""Transfers that start and end together with another one."""
BATCH_NORM_TRANSFERS = ("batch norm", GRADIENT_TRANSFERS["batch norm"])
"""Transfers inside the forward and backward pass of the dense part, for which a rank waits immediately."""
# Each of these has its own group. `gradients of hosts` takes less time than predicted, because the gradients of a
# module are sent while the backward pass continues.
FSDP_TRANSFERS = ("parameters", "gradients of parameters", "gradients of hosts", "norms")
"""Transfers of parameters that are sharded over a host. Ranks wait for them."""
_RANK, _LAST_ROW_TRANSFER, _LAST_ALL_REDUCE = ("main", 0), ("last of rows", 0), ("last of sums", 0)


ScheduleEvent = tuple[str, int]
"""Event of a schedule: the end of a transfer, by name and instance, or the position of a rank."""


class Action(NamedTuple):
    """Action of a rank in a step."""

    kind: Literal["compute", "begin", "wait"]
    name: str
    """Name of the transfer to start or wait for. For `compute`, a computation or a transfer of `FSDP_TRANSFERS`."""
    instance: int = 0
    """Index among the transfers with this name in the step."""
    time_share: float = 1.0
    """Share of the seconds that all actions with this name take in a step."""

    @property
    def end_event(self) -> ScheduleEvent:
        return self.name, self.instance


# Methods follow the methods of `Pipeline` with similar names.
@dataclass
class _ProgramBuilder:
    overlapped: frozenset[Overlap]
    num_micro_batches: int
    is_hierarchical: bool
    """Whether ids are exchanged in two hops."""
    reduces_across_hosts: bool
    """Whether bags are exchanged in two hops."""
    transfers: frozenset[str]
    actions: list[Action] = field(default_factory=list)

    @property
    def clips_rows(self) -> bool:
        """Whether rows move only after all gradients of the step have arrived."""
        return GRADIENT_NORM in self.transfers

    @property
    def micro_batch_share(self) -> float:
        return 1.0 / self.num_micro_batches

    def compute(self, name: str, share: float = 1.0) -> None:
        if name not in FSDP_TRANSFERS or name in self.transfers:
            self.actions.append(Action("compute", name, 0, share))

    def start(self, name: str, part: int = 0, share: float = 1.0) -> None:
        if name in self.transfers:
            self.actions += [Action("compute", PACKING_PREFIX + name, part), Action("begin", name, part, share)]

    def wait(self, name: str, part: int = 0) -> None:
        if name in self.transfers:
            self.actions += [Action("wait", name, part), Action("compute", PACKING_PREFIX + name, part)]

    def start_and_wait(self, name: str, part: int = 0, share: float = 1.0) -> None:
        self.start(name, part, share)
        self.wait(name, part)

    def build(self) -> None:
        if "ids" not in self.overlapped:
            self.start("label weights")
            for part in range(self.num_micro_batches):
                self.start("counts", part, self.micro_batch_share)
        for part in range(self.num_micro_batches):
            if part == 0 or "embeddings" not in self.overlapped:
                self.lookup(part)
            if part == 0 and "ids" in self.overlapped:
                self.start("label weights")
                self.start("counts")
            if "embeddings" in self.overlapped and self.reduces_across_hosts:
                self.start_second_hop(part)
            if part == 0 and "dense" in self.overlapped and not self.clips_rows:
                self.synchronize()
            self.score(part)
            if part == 0 and "ids" in self.overlapped and self.is_hierarchical:
                for number, share in self.id_instances():
                    self.wait("ids", number)
                    self.start("ids" + INTRA_HOST_SUFFIX, number, share)
            if part == self.num_micro_batches - 1:
                self.start("agree")
                if "agree" not in self.overlapped:
                    self.wait("agree")
            self.backward(part)

    def id_instances(self) -> Iterator[tuple[int, float]]:
        """Yield (instance, share) of the ids that are sent ahead: those of the first micro-batch, and all others."""
        yield 0, self.micro_batch_share
        if self.num_micro_batches > 1:
            yield 1, 1.0 - self.micro_batch_share

    def lookup(self, part: int) -> None:
        levels = ("ids", "ids" + INTRA_HOST_SUFFIX) if self.is_hierarchical else ("ids",)
        if "ids" not in self.overlapped:
            self.wait("counts", part)
            if self.is_hierarchical:
                self.start_and_wait("counts" + INTRA_HOST_SUFFIX, part, self.micro_batch_share)
            for name in levels:
                self.start_and_wait(name, part, self.micro_batch_share)
        elif part < 2:
            self.wait(levels[-1], part)
        self.compute("lookup", self.micro_batch_share)
        self.start(EMBEDDINGS, part, self.micro_batch_share)

    def start_second_hop(self, part: int) -> None:
        self.wait(EMBEDDINGS, part)
        self.start(HOST_POOLED_BAGS, part, self.micro_batch_share)

    def synchronize(self) -> None:
        self.wait("dense")
        self.compute("norms")

    def score(self, part: int) -> None:
        if "embeddings" in self.overlapped:
            self.compute("dense_only", self.micro_batch_share)
        elif self.reduces_across_hosts:
            self.start_second_hop(part)
        self.wait(HOST_POOLED_BAGS if self.reduces_across_hosts else EMBEDDINGS, part)
        if part == 0 and "ids" in self.overlapped:
            self.wait("counts")
            if self.is_hierarchical:
                self.start_and_wait("counts" + INTRA_HOST_SUFFIX)
            for number, share in self.id_instances():
                self.start("ids", number, share)
        if "embeddings" in self.overlapped and part + 1 < self.num_micro_batches:
            self.lookup(part + 1)
        if "embeddings" not in self.overlapped:
            self.compute("dense_only", self.micro_batch_share)
        if part == 0:
            self.wait("label weights")
        self.compute("score", self.micro_batch_share)
        self.compute("parameters", self.micro_batch_share / 2)
        self.start_and_wait(BATCH_NORM_TRANSFERS[0], part, self.micro_batch_share)
        self.start_and_wait("logits", part, self.micro_batch_share)

    def backward(self, part: int) -> None:
        is_last = part == self.num_micro_batches - 1
        self.compute("back of score", self.micro_batch_share)
        self.start_and_wait(BATCH_NORM_TRANSFERS[1], part, self.micro_batch_share)
        self.compute("parameters", self.micro_batch_share / 2)
        for name in FSDP_TRANSFERS[1:3]:
            self.compute(name, self.micro_batch_share)
        self.start(
            GRADIENT_TRANSFERS[HOST_POOLED_BAGS if self.reduces_across_hosts else EMBEDDINGS],
            part,
            self.micro_batch_share,
        )
        if is_last:
            self.start("replicas")
        overlaps = "gradients" in self.overlapped or (is_last and self.clips_rows)
        if not overlaps:
            self.finish_gradient_dist([part])
            if is_last:
                self.update()
        self.compute("dense_only backward", self.micro_batch_share)
        if is_last:
            self.start("dense")
            if "dense" not in self.overlapped:
                self.synchronize()
        if is_last and overlaps:
            self.finish_gradient_dist(range(0 if "gradients" in self.overlapped else part, self.num_micro_batches))
            self.update()

    def finish_gradient_dist(self, parts: Iterable[int]) -> None:
        for part in parts:
            if self.reduces_across_hosts:
                self.wait(GRADIENT_TRANSFERS[HOST_POOLED_BAGS], part)
                self.start(GRADIENT_TRANSFERS[EMBEDDINGS], part, self.micro_batch_share)
            self.wait(GRADIENT_TRANSFERS[EMBEDDINGS], part)

    def update(self) -> None:
        if "agree" in self.overlapped:
            self.wait("agree")
        if self.clips_rows:
            self.wait("replicas")
            if "dense" in self.overlapped:
                self.synchronize()
            self.start_and_wait(GRADIENT_NORM)
        self.compute("table_update")
        self.start_and_wait("row statistics")
        if not self.clips_rows:
            self.wait("replicas")


def step_program(hidden: Collection[Overlap], num_parts: int, transfers: Collection[str]) -> tuple[Action, ...]:
    """List the actions of a rank in one step.

    Args:
        hidden: Transfers that overlap with computation.
        num_parts: Number of micro-batches.
        transfers: Names of the transfers of the step. Transfers that start together, such as ids and weights, have one
            name.
    """
    names = frozenset(transfers)
    writer = _ProgramBuilder(
        frozenset(hidden), num_parts, "ids" + INTRA_HOST_SUFFIX in names, HOST_POOLED_BAGS in names, names
    )
    writer.build()
    # A wait may precede the start of its transfer in the list, because the previous step started the transfer.
    halves = {(PACKING_PREFIX + op.name, op.instance): op.time_share / 2 for op in writer.actions if op.kind == "begin"}
    return tuple(op._replace(time_share=halves.get(op.end_event, op.time_share)) for op in writer.actions)


@dataclass(frozen=True)
class Schedule:
    """Sequence of actions that is repeated in each step."""

    actions: tuple[Action, ...]

    @cached_property
    def timed_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(op.name for op in self.actions if op.kind != "wait"))

    def longest_cycle(self, seconds: Floats) -> tuple[Floats, Floats]:
        """Return the seconds per step of the longest cycle [N], and how often a step of this cycle contains each name
        [N, names].

        The N cases have the durations `seconds` [N, names]. For any durations, no step is shorter than any of these
        cycles.
        """
        # A step lasts as long as its longest cycle: the sum of durations divided by the number of steps that it spans
        # (F. Baccelli et al., "Synchronization and Linearity", Wiley 1992, section 2.5).
        moments, between = (
            self._boundary_events,
            [self._longest_paths_from(source, seconds) for source in self._boundary_events],
        )
        best = _no_path(*seconds.shape)
        for length in range(1, len(moments) + 1):
            for cycle in permutations(range(len(moments)), length):
                if cycle[0] == min(cycle):  # Rotations of a cycle are equal.
                    paths = [between[a][b] for a, b in zip(cycle, (*cycle[1:], cycle[0]), strict=True)]
                    best = _max_path(best, _LongestPath(np.sum([path.seconds for path in paths], axis=0) / length,
                                               np.sum([path.visit_counts for path in paths],
                                               axis=0) / length))  # fmt: skip
        return best.seconds, best.visit_counts

    def duration_array(self, seconds: Mapping[str, float]) -> Floats:
        """Return durations as an array [1, names] for `longest_cycle`. Missing names have duration 0."""
        return np.array([[float(seconds.get(name, 0.0)) for name in self.timed_names]])

    def step_s(self, seconds: Mapping[str, float]) -> float:
        """Return the seconds per step for the given durations."""
        return float(self.longest_cycle(self.duration_array(seconds))[0][0])

    def wait_seconds(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds per step that a rank waits for each transfer. Waiting and computation add up to
        the step."""
        durations, moments = self.duration_array(seconds), self._boundary_events
        step_s = self.longest_cycle(durations)[0][0]
        after = (
            np.array([[path.seconds[0] for path in self._longest_paths_from(one, durations)] for one in moments])
            - step_s
        )
        for middle in range(len(moments)):
            after = np.maximum(after, after[:, middle, None] + after[None, middle, :])
        start = int(np.diag(after).argmax())  # This event is on the longest cycle, which determines all other times.
        state = dict(zip(moments, after[start].tolist(), strict=True))
        waits: dict[str, float] = {}
        for op, comes_s, goes_on_s in self._simulate_step(
            state, dict(zip(self.timed_names, durations[0].tolist(), strict=True))
        ):
            if op.kind == "wait":
                waits[op.name] = waits.get(op.name, 0.0) + goes_on_s - comes_s
        return waits

    @cached_property
    def _overtaking(self) -> dict[ScheduleEvent, tuple[Action, ...]]:
        """Transfers that overtake each all-reduce. Each transfer that a rank waits for immediately has an empty
        tuple."""
        pairs = zip(self.actions, (*self.actions[1:], self.actions[0]), strict=True)
        awaited = {
            op.end_event for op, following in pairs if (following.kind, following.end_event) == ("wait", op.end_event)
        }
        overtaking: dict[ScheduleEvent, tuple[Action, ...]] = dict.fromkeys(awaited, ())
        for index, op in enumerate(self.actions):
            if op.kind == "begin" and op.name in ALL_REDUCES:
                order = [*self.actions[index + 1 :], *self.actions[:index]]
                stop = next(
                    i for i, one in enumerate(order) if one.end_event == op.end_event or one.name in ALL_REDUCES
                )
                overtaking[op.end_event] = tuple(
                    one
                    for one in order[:stop]
                    if one.kind == "begin" and one.end_event in awaited and one.name not in ALL_REDUCES
                )
        return overtaking

    def _predecessors(self, op: Action) -> tuple[ScheduleEvent, ...]:
        return (
            (_LAST_ROW_TRANSFER,)
            if op.end_event in self._overtaking and op.name not in ALL_REDUCES
            else (_LAST_ROW_TRANSFER, _LAST_ALL_REDUCE)
        )

    def _link_usage(self, op: Action) -> list[tuple[str, float]]:
        """Return (name, share) of the transfers that occupy the link: the given one, and those that overtake it."""
        return [(one.name, one.time_share) for one in (op, *self._overtaking.get(op.end_event, ()))]

    @cached_property
    def _boundary_events(self) -> tuple[ScheduleEvent, ...]:
        """Events of a step that the next step depends on."""
        begun, events = set[ScheduleEvent](), [_RANK]
        for op in self.actions:
            if op.kind == "begin":
                begun.add(op.end_event)
            elif op.kind == "wait" and op.end_event not in begun and op.end_event not in events:
                events.append(op.end_event)
        return tuple(events)

    @cached_property
    def _last_transfers(self) -> dict[ScheduleEvent, ScheduleEvent]:
        """Last transfer of each lane, if the next step waits for it."""
        begun = [op.end_event for op in self.actions if op.kind == "begin"]
        rows, sums = ([node for node in begun if (node[0] in ALL_REDUCES) is is_sum] for is_sum in (False, True))
        return {
            lane: nodes[-1]
            for lane, nodes in ((_LAST_ROW_TRANSFER, rows), (_LAST_ALL_REDUCE, sums))
            if nodes and nodes[-1] in self._boundary_events
        }

    def _longest_paths_from(self, source: ScheduleEvent, seconds: Floats) -> list[_LongestPath]:
        """Return the longest paths from an event to all boundary events of the next step."""
        num_cases, num_names = seconds.shape
        nowhere, column = _no_path(num_cases, num_names), {name: number for number, name in enumerate(self.timed_names)}

        def along(path: _LongestPath, parts: Iterable[tuple[str, float]]) -> _LongestPath:
            row = np.zeros(num_names)
            for name, share in parts:
                row[column[name]] += share
            return _LongestPath(path.seconds + seconds @ row, path.visit_counts + row)

        to: dict[ScheduleEvent, _LongestPath] = dict.fromkeys(
            (*self._boundary_events, _LAST_ROW_TRANSFER, _LAST_ALL_REDUCE), nowhere
        )
        to[source] = _LongestPath(np.zeros(num_cases), np.zeros((num_cases, num_names)))
        to |= {lane: to[node] for lane, node in self._last_transfers.items()}
        for op in self.actions:
            if op.kind == "compute":
                to[_RANK] = along(to[_RANK], [(op.name, op.time_share)])
            elif op.kind == "wait":
                to[_RANK] = _max_path(to[_RANK], to[op.end_event])
            else:
                begun = to[_RANK]
                for node in self._predecessors(op):
                    begun = _max_path(begun, to[node])
                to[op.end_event] = to[_LAST_ALL_REDUCE if op.name in ALL_REDUCES else _LAST_ROW_TRANSFER] = along(
                    begun, self._link_usage(op)
                )
        return [to[node] for node in self._boundary_events]

    def _simulate_step(
        self, state: Mapping[ScheduleEvent, float], seconds: Mapping[str, float]
    ) -> Iterator[tuple[Action, float, float]]:
        """Yield (action, start, end) for each action of a step that begins with the times `state`."""
        at = {_LAST_ROW_TRANSFER: -np.inf, _LAST_ALL_REDUCE: -np.inf, **state}
        at |= {lane: at[node] for lane, node in self._last_transfers.items()}
        for op in self.actions:
            before = at[_RANK]
            if op.kind == "compute":
                at[_RANK] = before + op.time_share * seconds[op.name]
            elif op.kind == "wait":
                at[_RANK] = max(before, at[op.end_event])
            else:
                taken_s = sum(share * seconds[name] for name, share in self._link_usage(op))
                at[op.end_event] = max(before, *(at[node] for node in self._predecessors(op))) + taken_s
                at[_LAST_ALL_REDUCE if op.name in ALL_REDUCES else _LAST_ROW_TRANSFER] = at[op.end_event]
            yield op, before, at[_RANK]


class _LongestPath(NamedTuple):
    seconds: Floats
    """Length of each path [N]. -inf if there is no path."""
    visit_counts: Floats
    """Number of times that a path contains each name [N, names]."""


def _no_path(num_cases: int, num_names: int) -> _LongestPath:
    return _LongestPath(np.full(num_cases, -np.inf), np.zeros((num_cases, num_names)))


def _max_path(one: _LongestPath, other: _LongestPath) -> _LongestPath:
    is_other = other.seconds > one.seconds
    if not is_other.any():
        return one
    parts = np.where(is_other[:, None], other.visit_counts, one.visit_counts)
    return _LongestPath(np.maximum(one.seconds, other.seconds), parts)


@lru_cache(maxsize=64)
def make_schedule(hidden: frozenset[Overlap], num_parts: int, transfers: frozenset[str]) -> Schedule:
    """Return the schedule of `step_program`. Results are cached."""
    return Schedule(step_program(hidden, num_parts, transfers))


# A layer computes three matrix products of equal size: its output, the gradient of its input, and the gradient of its
# weights.
FORWARD_SHARE = 1 / 3


def schedule_for(workload: Workload, names: Iterable[str]) -> Schedule | None:
    """Return the schedule of a step with the given transfers, or `None` if no transfer overlaps with computation."""
    transfers = frozenset(MERGED_TRANSFERS.get(name, name) for name in names)
    if not workload.overlap or not transfers:
        return None
    return make_schedule(frozenset(workload.overlap), workload.dense_exchange.num_micro_batches, transfers)


def dense_op_seconds(workload: Workload, dense_s: float) -> dict[str, float]:
    """Divide the seconds of the dense part among its operations, by the names of `ComputeOp`."""
    dense = workload.dense
    before_s = dense_s * dense.before_flops_per_sample / dense.flops_per_sample if dense.flops_per_sample else 0.0
    score_s = dense_s - before_s
    return {
        "dense_only": FORWARD_SHARE * before_s,
        "score": FORWARD_SHARE * score_s,
        "back of score": (1.0 - FORWARD_SHARE) * score_s,
        "dense_only backward": (1.0 - FORWARD_SHARE) * before_s,
    }


class TransferCost(NamedTuple):
    """Predicted time of one transfer of a step."""

    name: str
    seconds: Floats
    """Total seconds of each rank [R], including packing and encoding."""
    link_s: Floats
    """Seconds that the link of each rank is busy [R]. The rank itself packs, encodes and decodes in the remaining
    seconds."""

    @property
    def packing_s(self) -> Floats:
        return self.seconds - self.link_s

    def exposed_s(self, hidden_s: float) -> Floats:
        """Return the exposed seconds of each rank [R] if computation hides `hidden_s` seconds of the slowest link."""
        return self.seconds if hidden_s == 0.0 else self.seconds - np.minimum(self.link_s, hidden_s)


@dataclass(frozen=True)
class OverlappedStep:
    """Predicted step in which some transfers overlap with computation."""

    step_s: float
    hidden_s: tuple[float, ...]
    """Hidden seconds on the link of each transfer. Negative if the transfer waits for another one on the link."""

    @staticmethod
    def from_schedule(
        schedule: Schedule, computed: tuple[Floats, Floats], dense: Mapping[str, float], sent: Sequence[TransferCost]
    ) -> OverlappedStep:
        """Predict the step of a schedule from the seconds of (lookup, update) per rank, both [R], of the operations
        `dense`, and of all transfers."""
        lookup, update = computed
        # The rank with the largest sum of lookup and update determines both times. Each transfer ends with its slowest
        # rank.
        both_s, lookup_s = float((lookup + update).max()), float(lookup.max())
        seconds = {"lookup": lookup_s, "table_update": both_s - lookup_s, **dense}
        link_s: dict[str, float] = {}
        for one in sent:
            first = MERGED_TRANSFERS.get(one.name, one.name)
            link_s[first] = link_s.get(first, 0.0) + float(one.link_s.max())
            packing = PACKING_PREFIX + first
            seconds[packing] = seconds.get(packing, 0.0) + float(one.packing_s.max())
        seconds |= link_s
        waits = schedule.wait_seconds(seconds)
        hidden_s = []
        for one in sent:
            first = MERGED_TRANSFERS.get(one.name, one.name)
            share = float(one.link_s.max()) / link_s[first] if link_s[first] > 0 else 0.0
            hidden_s.append(share * (link_s[first] - waits.get(first, link_s[first])))
        return OverlappedStep(schedule.step_s(seconds), tuple(hidden_s))
