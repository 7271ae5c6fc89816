"""A step whose transfers travel while ranks compute: which of them are waited for, and how long that makes a step.

A rank does one thing after the other: it computes, begins a transfer, waits for one. `step_program` lists what
`meseta.pipeline` does in a step, in its order. Transfers go over the link of a rank one after the other, in the order
in which they begin; sums of what every rank has alike let those pass that are waited for at once. From step to step
this repeats itself, so a step takes as long as the longest cycle through it: its seconds over the steps that it spans
(F. Baccelli, G. Cohen, G. J. Olsder and J.-P. Quadrat, "Synchronization and Linearity", Wiley 1992, section 2.5). With
`answers` and `ids`, of one host:

    rank   lookup | before | score | back of score | back of before | update | lookup ...
    link     answers, counts | ids ................| gradients .....|..dense ........

A cycle is the sum of what lies on it, so that a step is the largest of many sums of durations: `Schedule.longest`.
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
from meseta.spec.transfer import GRADIENTS_OF, INSIDE

Piece = Literal["lookup", "update", "before", "score", "back of score", "back of before"]
"""What a rank computes in a step: `before` needs dense inputs alone."""
PIECES: tuple[Piece, ...] = ("lookup", "update", "before", "score", "back of score", "back of before")
ANSWERS, WHOLE = "answers", "whole bags"
SUMS = ("replicas", "dense")
"""Transfers of the lane of sums, which let others pass."""
PACKING = "packing of "
"""Begins the name of what a rank does itself for a transfer: half before it begins, half when it is there."""
WITH_IDS = {"weights": "ids", "weights" + INSIDE: "ids" + INSIDE}
"""Transfers that begin and are waited for together with another."""
NORMS = ("batch norm", GRADIENTS_OF["batch norm"])
"""Transfers inside the forward and the backward pass of the dense part, waited for at once."""
OF_CUT = ("parameters", "gradients of parameters", "gradients of hosts", "norms")
"""Transfers of parameters that are cut over a host: each has a group of its own, and a rank stands still for it; for
gradients of hosts less than is predicted, since those of a module cross while the pass goes on to the next."""
_MAIN, _ROWS, _SUMS = ("main", 0), ("last of rows", 0), ("last of sums", 0)


Node = tuple[str, int]
"""A moment: when a transfer, by its name and part, has ended; or where a rank is."""


class Action(NamedTuple):
    """One thing that a rank does."""

    kind: Literal["compute", "begin", "wait"]
    name: str
    """A transfer; where a rank computes, a piece of that, or a transfer of OF_CUT."""
    part: int = 0
    """Which of the transfers of this name in a step."""
    share: float = 1.0
    """Of the seconds that all of this name take in a step."""

    @property
    def node(self) -> Node:
        """The moment when it ends."""
        return self.name, self.part


@dataclass
class _ProgramWriter:
    """Writes a program down."""

    hidden: frozenset[Overlap]
    num_parts: int
    two_level: bool
    """Whether ids go by hosts."""
    by_twins: bool
    """Whether bags do."""
    transfers: frozenset[str]
    actions: list[Action] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Of a micro-batch."""
        return 1.0 / self.num_parts

    def compute(self, name: str, share: float = 1.0) -> None:
        if name not in OF_CUT or name in self.transfers:
            self.actions.append(Action("compute", name, 0, share))

    def begin(self, name: str, part: int = 0, share: float = 1.0) -> None:
        if name in self.transfers:
            self.actions += [Action("compute", PACKING + name, part), Action("begin", name, part, share)]

    def wait(self, name: str, part: int = 0) -> None:
        if name in self.transfers:
            self.actions += [Action("wait", name, part), Action("compute", PACKING + name, part)]

    def at_once(self, name: str, part: int = 0, share: float = 1.0) -> None:
        self.begin(name, part, share)
        self.wait(name, part)

    def step(self) -> None:
        """`Pipeline._train`."""
        if "ids" not in self.hidden:
            self.begin("label weights")
            for part in range(self.num_parts):
                self.begin("counts", part, self.share)
        for part in range(self.num_parts):
            if part == 0 or "answers" not in self.hidden:
                self.look_up(part)
            if part == 0 and "ids" in self.hidden:
                self.begin("label weights")
                self.begin("counts")
            if "answers" in self.hidden and self.by_twins:
                self.hand_on(part)
            if part == 0 and "dense" in self.hidden:
                self.settle()
            self.score(part)
            if part == 0 and "ids" in self.hidden and self.two_level:
                for number, share in self.parts_of_ids():
                    self.wait("ids", number)
                    self.begin("ids" + INSIDE, number, share)
            if part == self.num_parts - 1:
                self.begin("agree")
                if "agree" not in self.hidden:
                    self.wait("agree")
            self.backward(part)

    def parts_of_ids(self) -> Iterator[tuple[int, float]]:
        """Ids that travel ahead: those that the first lookup waits for, and all others."""
        yield 0, self.share
        if self.num_parts > 1:
            yield 1, 1.0 - self.share

    def look_up(self, part: int) -> None:
        """`Pipeline._look_up`."""
        levels = ("ids", "ids" + INSIDE) if self.two_level else ("ids",)
        if "ids" not in self.hidden:
            self.wait("counts", part)
            if self.two_level:
                self.at_once("counts" + INSIDE, part, self.share)
            for name in levels:
                self.at_once(name, part, self.share)
        elif part < 2:
            self.wait(levels[-1], part)
        self.compute("lookup", self.share)
        self.begin(ANSWERS, part, self.share)

    def hand_on(self, part: int) -> None:
        self.wait(ANSWERS, part)
        self.begin(WHOLE, part, self.share)

    def settle(self) -> None:
        """`Pipeline.settle`."""
        self.wait("dense")
        self.compute("norms")

    def score(self, part: int) -> None:
        """`Pipeline._score`."""
        if "answers" in self.hidden:
            self.compute("before", self.share)
        elif self.by_twins:
            self.hand_on(part)
        self.wait(WHOLE if self.by_twins else ANSWERS, part)
        if part == 0 and "ids" in self.hidden:
            self.wait("counts")
            if self.two_level:
                self.at_once("counts" + INSIDE)
            for number, share in self.parts_of_ids():
                self.begin("ids", number, share)
        if "answers" in self.hidden and part + 1 < self.num_parts:
            self.look_up(part + 1)
        if "answers" not in self.hidden:
            self.compute("before", self.share)
        if part == 0:
            self.wait("label weights")
        self.compute("score", self.share)
        self.compute("parameters", self.share / 2)
        self.at_once(NORMS[0], part, self.share)
        self.at_once("logits", part, self.share)

    def backward(self, part: int) -> None:
        """`Pipeline._backward`."""
        is_last = part == self.num_parts - 1
        self.compute("back of score", self.share)
        self.at_once(NORMS[1], part, self.share)
        self.compute("parameters", self.share / 2)
        for name in OF_CUT[1:3]:
            self.compute(name, self.share)
        self.begin(GRADIENTS_OF[WHOLE if self.by_twins else ANSWERS], part, self.share)
        if is_last:
            self.begin("replicas")
        if "gradients" not in self.hidden:
            self.take_gradients([part])
            if is_last:
                self.update()
        self.compute("back of before", self.share)
        if is_last:
            self.begin("dense")
            if "dense" not in self.hidden:
                self.settle()
        if is_last and "gradients" in self.hidden:
            self.take_gradients(range(self.num_parts))
            self.update()

    def take_gradients(self, parts: Iterable[int]) -> None:
        for part in parts:
            if self.by_twins:
                self.wait(GRADIENTS_OF[WHOLE], part)
                self.begin(GRADIENTS_OF[ANSWERS], part, self.share)
            self.wait(GRADIENTS_OF[ANSWERS], part)

    def update(self) -> None:
        if "agree" in self.hidden:
            self.wait("agree")
        self.compute("update")
        self.at_once("row statistics")
        self.wait("replicas")


def step_program(hidden: Collection[Overlap], num_parts: int, transfers: Collection[str]) -> tuple[Action, ...]:
    """What a rank does in a step that hides `hidden`, in `num_parts` micro-batches, and has `transfers` of these names;
    of those that go together, as ids and their weights, the first stands for all."""
    names = frozenset(transfers)
    writer = _ProgramWriter(frozenset(hidden), num_parts, "ids" + INSIDE in names, WHOLE in names, names)
    writer.step()
    # A wait may come before what it waits for is begun, by the step before.
    halves = {(PACKING + op.name, op.part): op.share / 2 for op in writer.actions if op.kind == "begin"}
    return tuple(op._replace(share=halves.get(op.node, op.share)) for op in writer.actions)


@dataclass(frozen=True)
class Schedule:
    """A program that every step repeats."""

    actions: tuple[Action, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of all that takes time."""
        return tuple(dict.fromkeys(op.name for op in self.actions if op.kind != "wait"))

    def longest(self, seconds: Floats) -> tuple[Floats, Floats]:
        """The longest cycle, for N cases whose parts take `seconds` [N, names]: its seconds per step [N], and how often
        it meets each part in a step [N, names]. Whatever the parts take, no step is shorter than any of these."""
        moments, between = self._moments, [self._paths_from(source, seconds) for source in self._moments]
        best = _nowhere(*seconds.shape)
        for length in range(1, len(moments) + 1):
            for cycle in permutations(range(len(moments)), length):
                if cycle[0] == min(cycle):  # others are the same, begun elsewhere
                    legs = [between[a][b] for a, b in zip(cycle, (*cycle[1:], cycle[0]), strict=True)]
                    best = _longer(best, _Path(np.sum([leg.seconds for leg in legs], axis=0) / length,
                                               np.sum([leg.parts for leg in legs], axis=0) / length))  # fmt: skip
        return best.seconds, best.parts

    def durations(self, seconds: Mapping[str, float]) -> Floats:
        """[1, names]: for `longest`; what is not named takes nothing."""
        return np.array([[float(seconds.get(name, 0.0)) for name in self.names]])

    def step_s(self, seconds: Mapping[str, float]) -> float:
        """Of a step whose parts take so long."""
        return float(self.longest(self.durations(seconds))[0][0])

    def waits(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """By transfer: seconds that a rank stands still for it in a step. With all that it computes they add up to
        the step."""
        durations, moments = self.durations(seconds), self._moments
        step_s = self.longest(durations)[0][0]
        after = np.array([[leg.seconds[0] for leg in self._paths_from(one, durations)] for one in moments]) - step_s
        for middle in range(len(moments)):
            after = np.maximum(after, after[:, middle, None] + after[None, middle, :])
        start = int(np.diag(after).argmax())  # lies on the longest cycle, which all else follows
        state = dict(zip(moments, after[start].tolist(), strict=True))
        found: dict[str, float] = {}
        for op, comes_s, goes_on_s in self._times(state, dict(zip(self.names, durations[0].tolist(), strict=True))):
            if op.kind == "wait":
                found[op.name] = found.get(op.name, 0.0) + goes_on_s - comes_s
        return found

    @cached_property
    def _passing(self) -> dict[Node, tuple[Action, ...]]:
        """Transfers that are waited for at once, none of which waits for a sum; and of each sum those that it lets
        pass."""
        pairs = zip(self.actions, (*self.actions[1:], self.actions[0]), strict=True)
        at_once = {op.node for op, following in pairs if (following.kind, following.node) == ("wait", op.node)}
        found: dict[Node, tuple[Action, ...]] = dict.fromkeys(at_once, ())
        for index, op in enumerate(self.actions):
            if op.kind == "begin" and op.name in SUMS:
                order = [*self.actions[index + 1 :], *self.actions[:index]]
                stop = next(i for i, one in enumerate(order) if one.node == op.node or one.name in SUMS)
                found[op.node] = tuple(
                    one for one in order[:stop] if one.kind == "begin" and one.node in at_once and one.name not in SUMS
                )
        return found

    def _preceding(self, op: Action) -> tuple[Node, ...]:
        """What a transfer follows on the link."""
        return (_ROWS,) if op.node in self._passing and op.name not in SUMS else (_ROWS, _SUMS)

    def _taken(self, op: Action) -> list[tuple[str, float]]:
        """(name, share) of what keeps a transfer on the link: itself, and those that it lets pass."""
        return [(one.name, one.share) for one in (op, *self._passing.get(op.node, ()))]

    @cached_property
    def _moments(self) -> tuple[Node, ...]:
        """Moments of a step that the next one looks back to."""
        begun, found = set[Node](), [_MAIN]
        for op in self.actions:
            if op.kind == "begin":
                begun.add(op.node)
            elif op.kind == "wait" and op.node not in begun and op.node not in found:
                found.append(op.node)
        return tuple(found)

    @cached_property
    def _last(self) -> dict[Node, Node]:
        """The last transfer of each lane in a step, where the next step has to wait for it."""
        begun = [op.node for op in self.actions if op.kind == "begin"]
        rows, sums = ([node for node in begun if (node[0] in SUMS) is is_sum] for is_sum in (False, True))
        return {
            lane: nodes[-1] for lane, nodes in ((_ROWS, rows), (_SUMS, sums)) if nodes and nodes[-1] in self._moments
        }

    def _paths_from(self, source: Node, seconds: Floats) -> list[_Path]:
        """The longest paths from a moment to all moments of the next step."""
        num_cases, num_names = seconds.shape
        nowhere, column = _nowhere(num_cases, num_names), {name: number for number, name in enumerate(self.names)}

        def along(path: _Path, parts: Iterable[tuple[str, float]]) -> _Path:
            row = np.zeros(num_names)
            for name, share in parts:
                row[column[name]] += share
            return _Path(path.seconds + seconds @ row, path.parts + row)

        to: dict[Node, _Path] = dict.fromkeys((*self._moments, _ROWS, _SUMS), nowhere)
        to[source] = _Path(np.zeros(num_cases), np.zeros((num_cases, num_names)))
        to |= {lane: to[node] for lane, node in self._last.items()}
        for op in self.actions:
            if op.kind == "compute":
                to[_MAIN] = along(to[_MAIN], [(op.name, op.share)])
            elif op.kind == "wait":
                to[_MAIN] = _longer(to[_MAIN], to[op.node])
            else:
                begun = to[_MAIN]
                for node in self._preceding(op):
                    begun = _longer(begun, to[node])
                to[op.node] = to[_SUMS if op.name in SUMS else _ROWS] = along(begun, self._taken(op))
        return [to[node] for node in self._moments]

    def _times(
        self, state: Mapping[Node, float], seconds: Mapping[str, float]
    ) -> Iterator[tuple[Action, float, float]]:
        """One step from the moments before it: (what a rank does, when it comes to it, when it goes on)."""
        at = {_ROWS: -np.inf, _SUMS: -np.inf, **state}
        at |= {lane: at[node] for lane, node in self._last.items()}
        for op in self.actions:
            before = at[_MAIN]
            if op.kind == "compute":
                at[_MAIN] = before + op.share * seconds[op.name]
            elif op.kind == "wait":
                at[_MAIN] = max(before, at[op.node])
            else:
                taken_s = sum(share * seconds[name] for name, share in self._taken(op))
                at[op.node] = max(before, *(at[node] for node in self._preceding(op))) + taken_s
                at[_SUMS if op.name in SUMS else _ROWS] = at[op.node]
            yield op, before, at[_MAIN]


class _Path(NamedTuple):
    """The longest way to a moment, in N cases."""

    seconds: Floats
    """[N]; -inf where there is none."""
    parts: Floats
    """[N, names]: how often it meets each part."""


def _nowhere(num_cases: int, num_names: int) -> _Path:
    return _Path(np.full(num_cases, -np.inf), np.zeros((num_cases, num_names)))


def _longer(one: _Path, other: _Path) -> _Path:
    is_other = other.seconds > one.seconds
    if not is_other.any():
        return one
    parts = np.where(is_other[:, None], other.parts, one.parts)
    return _Path(np.maximum(one.seconds, other.seconds), parts)


@lru_cache(maxsize=64)
def make_schedule(hidden: frozenset[Overlap], num_parts: int, transfers: frozenset[str]) -> Schedule:
    """That of `step_program`, made once."""
    return Schedule(step_program(hidden, num_parts, transfers))
