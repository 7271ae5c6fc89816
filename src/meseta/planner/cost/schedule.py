"""A step whose transfers travel while ranks compute: which of them are waited for, and how long that makes a step.

A rank does one thing after the other: it computes, begins a transfer, waits for one. `step_program` lists what
`meseta.pipeline` does in a step, in its order. Transfers go over the link of a rank one after the other, in the order
in which they begin; sums of what every rank has alike let those pass that are waited for at once. From step to step
this repeats itself, so a step takes as long as the longest cycle through it: its seconds over the steps that it spans
(F. Baccelli, G. Cohen, G. J. Olsder and J.-P. Quadrat, "Synchronization and Linearity", Wiley 1992, section 2.5). With
`embeddings` and `ids`, of one host:

    rank   lookup | before | score | back of score | back of before | update | lookup ...
    link     answers, counts | ids ................| gradients .....|..dense ........

A cycle is the sum of what lies on it, so that a step is the largest of many sums of durations:
`Schedule.longest_cycle`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import permutations
from typing import Literal, NamedTuple

import numpy as np

from meseta.planner.cost.reuse import Floats
from meseta.spec.stages import Overlap
from meseta.spec.transfer import GRADIENT_TRANSFERS, INTRA_HOST_SUFFIX

ComputeOp = Literal["lookup", "table_update", "dense_only", "score", "back of score", "dense_only backward"]
"""What a rank computes in a step: `forward_dense` needs dense inputs alone."""
COMPUTE_OPS: tuple[ComputeOp, ...] = (
    "lookup",
    "table_update",
    "dense_only",
    "score",
    "back of score",
    "dense_only backward",
)
EMBEDDINGS, HOST_POOLED_BAGS = "embeddings", "embeddings inter-host"
ALL_REDUCES = ("replicas", "dense")
"""Transfers of the lane of sums, which let others pass."""
PACKING_PREFIX = "packing of "
"""Begins the name of what a rank does itself for a transfer: half before it begins, half when it is there."""
MERGED_TRANSFERS = {"weights": "ids", "weights" + INTRA_HOST_SUFFIX: "ids" + INTRA_HOST_SUFFIX}
"""Transfers that begin and are waited for together with another."""
BATCH_NORM_TRANSFERS = ("batch norm", GRADIENT_TRANSFERS["batch norm"])
"""Transfers inside the forward and the backward pass of the dense part, waited for at once."""
FSDP_TRANSFERS = ("parameters", "gradients of parameters", "gradients of hosts", "norms")
"""Transfers of parameters that are cut over a host: each has a group of its own, and a rank stands still for it; for
gradients of hosts less than is predicted, since those of a module cross while the pass goes on to the next."""
_RANK, _LAST_ROW_TRANSFER, _LAST_ALL_REDUCE = ("main", 0), ("last of rows", 0), ("last of sums", 0)


ScheduleEvent = tuple[str, int]
"""A moment: when a transfer, by its name and part, has ended; or where a rank is."""


class Action(NamedTuple):
    """One thing that a rank does."""

    kind: Literal["compute", "begin", "wait"]
    name: str
    """A transfer; where a rank computes, a piece of that, or a transfer of FSDP_TRANSFERS."""
    instance: int = 0
    """Which of the transfers of this name in a step."""
    time_share: float = 1.0
    """Of the seconds that all of this name take in a step."""

    @property
    def end_event(self) -> ScheduleEvent:
        """The moment when it ends."""
        return self.name, self.instance


@dataclass
class _ProgramBuilder:
    """Writes a program down."""

    overlapped: frozenset[Overlap]
    num_micro_batches: int
    is_hierarchical: bool
    """Whether ids go by hosts."""
    reduces_across_hosts: bool
    """Whether bags do."""
    transfers: frozenset[str]
    actions: list[Action] = field(default_factory=list)

    @property
    def micro_batch_share(self) -> float:
        """Of a micro-batch."""
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
        """`Pipeline._train_step`."""
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
            if part == 0 and "dense" in self.overlapped:
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
        """Ids that travel ahead: those that the first lookup waits for, and all others."""
        yield 0, self.micro_batch_share
        if self.num_micro_batches > 1:
            yield 1, 1.0 - self.micro_batch_share

    def lookup(self, part: int) -> None:
        """`Pipeline._lookup`."""
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
        """`Pipeline.synchronize`."""
        self.wait("dense")
        self.compute("norms")

    def score(self, part: int) -> None:
        """`Pipeline._score`."""
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
        """`Pipeline._backward`."""
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
        if "gradients" not in self.overlapped:
            self.finish_gradient_dist([part])
            if is_last:
                self.update()
        self.compute("dense_only backward", self.micro_batch_share)
        if is_last:
            self.start("dense")
            if "dense" not in self.overlapped:
                self.synchronize()
        if is_last and "gradients" in self.overlapped:
            self.finish_gradient_dist(range(self.num_micro_batches))
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
        self.compute("table_update")
        self.start_and_wait("row statistics")
        self.wait("replicas")


def step_program(hidden: Collection[Overlap], num_parts: int, transfers: Collection[str]) -> tuple[Action, ...]:
    """What a rank does in a step that hides `hidden`, in `num_parts` micro-batches, and has `transfers` of these names;
    of those that go together, as ids and their weights, the first stands for all."""
    names = frozenset(transfers)
    writer = _ProgramBuilder(
        frozenset(hidden), num_parts, "ids" + INTRA_HOST_SUFFIX in names, HOST_POOLED_BAGS in names, names
    )
    writer.build()
    # A wait may come before what it waits for is begun, by the step before.
    halves = {(PACKING_PREFIX + op.name, op.instance): op.time_share / 2 for op in writer.actions if op.kind == "begin"}
    return tuple(op._replace(time_share=halves.get(op.end_event, op.time_share)) for op in writer.actions)


@dataclass(frozen=True)
class Schedule:
    """A program that every step repeats."""

    actions: tuple[Action, ...]

    @cached_property
    def timed_names(self) -> tuple[str, ...]:
        """Of all that takes time."""
        return tuple(dict.fromkeys(op.name for op in self.actions if op.kind != "wait"))

    def longest_cycle(self, seconds: Floats) -> tuple[Floats, Floats]:
        """The longest cycle, for N cases whose parts take `seconds` [N, names]: its seconds per step [N], and how often
        it meets each part in a step [N, names]. Whatever the parts take, no step is shorter than any of these."""
        moments, between = (
            self._boundary_events,
            [self._longest_paths_from(source, seconds) for source in self._boundary_events],
        )
        best = _no_path(*seconds.shape)
        for length in range(1, len(moments) + 1):
            for cycle in permutations(range(len(moments)), length):
                if cycle[0] == min(cycle):  # others are the same, begun elsewhere
                    legs = [between[a][b] for a, b in zip(cycle, (*cycle[1:], cycle[0]), strict=True)]
                    best = _max_path(best, _LongestPath(np.sum([leg.seconds for leg in legs], axis=0) / length,
                                               np.sum([leg.visit_counts for leg in legs],
                                               axis=0) / length))  # fmt: skip
        return best.seconds, best.visit_counts

    def duration_array(self, seconds: Mapping[str, float]) -> Floats:
        """[1, names]: for `longest`; what is not named takes nothing."""
        return np.array([[float(seconds.get(name, 0.0)) for name in self.timed_names]])

    def step_s(self, seconds: Mapping[str, float]) -> float:
        """Of a step whose parts take so long."""
        return float(self.longest_cycle(self.duration_array(seconds))[0][0])

    def wait_seconds(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """By transfer: seconds that a rank stands still for it in a step. With all that it computes they add up to
        the step."""
        durations, moments = self.duration_array(seconds), self._boundary_events
        step_s = self.longest_cycle(durations)[0][0]
        after = (
            np.array([[leg.seconds[0] for leg in self._longest_paths_from(one, durations)] for one in moments]) - step_s
        )
        for middle in range(len(moments)):
            after = np.maximum(after, after[:, middle, None] + after[None, middle, :])
        start = int(np.diag(after).argmax())  # lies on the longest cycle, which all else follows
        state = dict(zip(moments, after[start].tolist(), strict=True))
        found: dict[str, float] = {}
        for op, comes_s, goes_on_s in self._simulate_step(
            state, dict(zip(self.timed_names, durations[0].tolist(), strict=True))
        ):
            if op.kind == "wait":
                found[op.name] = found.get(op.name, 0.0) + goes_on_s - comes_s
        return found

    @cached_property
    def _overtaking(self) -> dict[ScheduleEvent, tuple[Action, ...]]:
        """Transfers that are waited for at once, none of which waits for a sum; and of each sum those that it lets
        pass."""
        pairs = zip(self.actions, (*self.actions[1:], self.actions[0]), strict=True)
        at_once = {
            op.end_event for op, following in pairs if (following.kind, following.end_event) == ("wait", op.end_event)
        }
        found: dict[ScheduleEvent, tuple[Action, ...]] = dict.fromkeys(at_once, ())
        for index, op in enumerate(self.actions):
            if op.kind == "begin" and op.name in ALL_REDUCES:
                order = [*self.actions[index + 1 :], *self.actions[:index]]
                stop = next(
                    i for i, one in enumerate(order) if one.end_event == op.end_event or one.name in ALL_REDUCES
                )
                found[op.end_event] = tuple(
                    one
                    for one in order[:stop]
                    if one.kind == "begin" and one.end_event in at_once and one.name not in ALL_REDUCES
                )
        return found

    def _predecessors(self, op: Action) -> tuple[ScheduleEvent, ...]:
        """What a transfer follows on the link."""
        return (
            (_LAST_ROW_TRANSFER,)
            if op.end_event in self._overtaking and op.name not in ALL_REDUCES
            else (_LAST_ROW_TRANSFER, _LAST_ALL_REDUCE)
        )

    def _link_usage(self, op: Action) -> list[tuple[str, float]]:
        """(name, share) of what keeps a transfer on the link: itself, and those that it lets pass."""
        return [(one.name, one.time_share) for one in (op, *self._overtaking.get(op.end_event, ()))]

    @cached_property
    def _boundary_events(self) -> tuple[ScheduleEvent, ...]:
        """Moments of a step that the next one looks back to."""
        begun, found = set[ScheduleEvent](), [_RANK]
        for op in self.actions:
            if op.kind == "begin":
                begun.add(op.end_event)
            elif op.kind == "wait" and op.end_event not in begun and op.end_event not in found:
                found.append(op.end_event)
        return tuple(found)

    @cached_property
    def _last_transfers(self) -> dict[ScheduleEvent, ScheduleEvent]:
        """The last transfer of each lane in a step, where the next step has to wait for it."""
        begun = [op.end_event for op in self.actions if op.kind == "begin"]
        rows, sums = ([node for node in begun if (node[0] in ALL_REDUCES) is is_sum] for is_sum in (False, True))
        return {
            lane: nodes[-1]
            for lane, nodes in ((_LAST_ROW_TRANSFER, rows), (_LAST_ALL_REDUCE, sums))
            if nodes and nodes[-1] in self._boundary_events
        }

    def _longest_paths_from(self, source: ScheduleEvent, seconds: Floats) -> list[_LongestPath]:
        """The longest paths from a moment to all moments of the next step."""
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
        """One step from the moments before it: (what a rank does, when it comes to it, when it goes on)."""
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
    """The longest way to a moment, in N cases."""

    seconds: Floats
    """[N]; -inf where there is none."""
    visit_counts: Floats
    """[N, names]: how often it meets each part."""


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
    """That of `step_program`, made once."""
    return Schedule(step_program(hidden, num_parts, transfers))
