"""Of the transfers of a step, what ranks stand still for: all of it where nothing is hidden, else what a schedule
leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meseta.planner.cost.reuse import Floats
from meseta.planner.cost.schedule import MERGED_TRANSFERS, PACKING_PREFIX, Schedule, make_schedule
from meseta.spec import Workload

FORWARD_SHARE = 1 / 3
"""Of the products of a layer: forwards, and as much each for the gradients of its inputs and of its weights."""


def schedule_for(workload: Workload, names: Iterable[str]) -> Schedule | None:
    """Of a step with transfers of these names; None where none of them is hidden."""
    transfers = frozenset(MERGED_TRANSFERS.get(name, name) for name in names)
    if not workload.overlap or not transfers:
        return None
    return make_schedule(frozenset(workload.overlap), workload.dense_exchange.num_micro_batches, transfers)


def dense_op_seconds(workload: Workload, dense_s: float) -> dict[str, float]:
    """By piece: seconds of the dense part, of which `forward_dense` reads dense inputs alone."""
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
    """One transfer of a step."""

    name: str
    seconds: Floats
    """[R]: of each rank."""
    link_s: Floats
    """[R]: of these, on its link; in all others the rank packs, writes and reads."""

    @property
    def packing_s(self) -> Floats:
        """[R]: seconds that each rank spends on it itself."""
        return self.seconds - self.link_s

    def exposed_s(self, hidden_s: float) -> Floats:
        """[R]: what is left where `hidden_s` of the slowest link's seconds are hidden."""
        return self.seconds if hidden_s == 0.0 else self.seconds - np.minimum(self.link_s, hidden_s)


@dataclass(frozen=True)
class OverlappedStep:
    """A step whose transfers are partly hidden."""

    step_s: float
    """Of a step."""
    hidden_s: tuple[float, ...]
    """Of each transfer: seconds of its link in which ranks compute. Negative where it waits for another on the link."""

    @staticmethod
    def from_schedule(
        schedule: Schedule, computed: tuple[Floats, Floats], dense: Mapping[str, float], sent: Sequence[TransferCost]
    ) -> OverlappedStep:
        """From lookup and update of each rank ([R], [R]), the pieces of the dense part, and all transfers.

        The rank with most lookup and update together sets the pace of both, and each transfer ends with its slowest
        rank.
        """
        lookup, update = computed
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
