"""Exposed time of transfers, and duration of a step with overlap."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meseta.planner.cost.reuse import Floats
from meseta.planner.cost.schedule import MERGED_TRANSFERS, PACKING_PREFIX, Schedule, make_schedule
from meseta.spec import Workload

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
