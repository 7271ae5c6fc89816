"""Records of the operators, copies and waits of one training step, and differences between two steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Kind = Literal[
    "kernel",
    "view",
    "allocation",
    "copy to device",
    "copy to host",
    "synchronization",
    "event wait",
    "timed event",
    "pinned allocation",
    "graph replay",
    "wrapper",
    "host",
]
"""An operator of this package that launches kernels is a `wrapper`. An operator on host tensors is of kind `host`."""
DISPATCHED: frozenset[Kind] = frozenset(("kernel", "allocation", "copy to device", "copy to host", "wrapper", "host"))
"""Kinds of records that may be calls of the dispatcher, without views."""
ON_DEVICE: frozenset[Kind] = frozenset(("kernel", "view", "copy to device", "copy to host"))
"""Kinds of records that a CUDA graph captures, or that determine the memory which it captures."""


@dataclass(frozen=True)
class TensorRecord:
    """Tensor argument or result of an operator."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    """Index of the first element in the storage."""
    memory: str
    """Number of the storage if the step allocated it on the device, else its address. Pageable host memory is `host`,
    with the value of a scalar."""


@dataclass(frozen=True)
class Record:
    """Operator, kernel launch or call of the device's driver."""

    kind: Kind
    name: str
    scalars: tuple[tuple[str, Any], ...] = ()
    """Names and values of all arguments that are not tensors."""
    tensors: tuple[TensorRecord, ...] = ()
    """Tensor arguments, then results."""
    source: str = ""
    """Innermost line of the package that led here, as file:line."""
    stage: str = ""
    """Stage of the step, empty between stages."""
    is_dispatched: bool = False
    """Whether the record is a call of torch's dispatcher."""
    region: str = ""
    """Region of the program that is open, see `EmulatedGpu.region`."""
    operators: tuple[Record, ...] = ()
    """Operators of a replayed CUDA graph."""

    def __str__(self) -> str:
        shapes = " ".join(f"{tensor.dtype}{list(tensor.shape)}" for tensor in self.tensors)
        scalars = " ".join(f"{name}={value}" for name, value in self.scalars)
        return f"{self.kind:17} {self.stage:14} {self.source:40} {self.name} {shapes} {scalars}".rstrip()


@dataclass(frozen=True)
class StepRecording:
    """Records of one training step."""

    records: tuple[Record, ...]
    num_python_calls: int
    """Number of calls of Python functions in the training thread."""

    def select(self, kind: Kind) -> list[Record]:
        """Return the records of a kind."""
        return [record for record in self.records if record.kind == kind]

    def in_region(self, name: str) -> StepRecording:
        """Return a recording that has the records of a region only, such as to compare the region in two steps."""
        return replace(self, records=tuple(record for record in self.records if record.region == name))

    def counts(self) -> dict[str, int]:
        """Return the number of each kind of record that a benchmark reports, by title of its column.

        The operators of a replayed graph are not counted.
        """
        by_kind = Counter(record.kind for record in self.records)
        return {
            "kernels": by_kind["kernel"],
            "copies to device": by_kind["copy to device"],
            "copies to host": by_kind["copy to host"],
            "synchronizations": by_kind["synchronization"],
            "event waits": by_kind["event wait"],
            "pinned allocations": by_kind["pinned allocation"],
            "timed events": by_kind["timed event"],
            "graph replays": by_kind["graph replay"],
            "dispatcher calls": sum(record.is_dispatched and record.kind != "view" for record in self.records),
            "views": by_kind["view"],
            "Python calls": self.num_python_calls,
        }

    def groups(self, kind: Kind = "kernel") -> list[tuple[tuple[str, str], Counter[str]]]:
        """Return ((stage, source line), number of records by name) for a kind, the largest groups first."""
        groups: dict[tuple[str, str], Counter[str]] = {}
        for record in self.select(kind):
            groups.setdefault((record.stage, record.source), Counter())[record.name] += 1
        return sorted(groups.items(), key=lambda group: -group[1].total())


@dataclass(frozen=True)
class Difference:
    """One difference between two steps."""

    aspect: Literal["operator", "scalar", "shape", "address"]
    record: Record
    """Record of the first step."""
    detail: str

    def __str__(self) -> str:
        return f"{self.aspect:8} {self.record.stage:14} {self.record.source:40} {self.record.name}: {self.detail}"


def compare_steps(first: StepRecording, second: StepRecording) -> list[Difference]:
    """Return all differences between the operators and copies of two steps on the device.

    A replayed CUDA graph repeats operators, scalars, shapes and addresses. Each difference would be a captured
    constant. Memory that a step allocates is identified by the order of allocations.
    """
    pairs = [[record for record in step.records if record.kind in ON_DEVICE] for step in (first, second)]
    differences = []
    for one, other in zip(*pairs, strict=False):
        if one.name != other.name or len(one.tensors) != len(other.tensors):
            # Later records belong to different operators.
            return [*differences, Difference("operator", one, f"{one.name} at {one.source}, then {other.name}")]
        differences += _compare_records(one, other)
    if len(pairs[0]) != len(pairs[1]):
        longer = max(pairs, key=len)
        last = longer[min(map(len, pairs))]
        differences.append(Difference("operator", last, f"{len(pairs[0])} operators, then {len(pairs[1])}"))
    return differences


def _compare_records(one: Record, other: Record) -> Iterator[Difference]:
    changed = [
        f"{name} {value!r}, then {dict(other.scalars).get(name)!r}"
        for name, value in one.scalars
        if dict(other.scalars).get(name) != value
    ]
    if changed:
        yield Difference("scalar", one, "; ".join(changed))
    pairs = list(zip(one.tensors, other.tensors, strict=True))
    shapes = [
        f"{a.dtype}{list(a.shape)}, then {b.dtype}{list(b.shape)}"
        for a, b in pairs
        if (a.dtype, a.shape, a.strides) != (b.dtype, b.shape, b.strides)
    ]
    if shapes:
        yield Difference("shape", one, "; ".join(shapes))
    moved = [
        f"{a.memory} + {a.offset}, then {b.memory} + {b.offset}"
        for a, b in pairs
        if (a.memory, a.offset) != (b.memory, b.offset)
    ]
    if moved:
        yield Difference("address", one, "; ".join(moved))


def num_different(differences: Sequence[Difference], *aspects: str) -> int:
    """Return the number of operators with a difference in one of `aspects`."""
    return len({id(difference.record) for difference in differences if difference.aspect in aspects})
