"""`--restarts N --min-nproc M`: a training that loses a rank goes on from its last checkpoint by itself."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meseta.cli.launch import Ended, StopSignals, run_attempt
from meseta.errors import MesetaError

if TYPE_CHECKING:
    from meseta.config import RunConfig

FORCE = "--force"


@dataclass(frozen=True)
class Restarts:
    """How often a run may be started again, and on how few ranks."""

    most: int
    least_ranks: int

    @staticmethod
    def of(most: int, least_ranks: int | None, num_ranks: int, settings: RunConfig) -> Restarts:
        """As the command line says it of a run on `num_ranks`; `least_ranks` None: no fewer. Raises MesetaError where
        the run could not be taken up, or not on so few ranks."""
        if most < 0:
            raise MesetaError(f"--restarts must be 0 or more, got {most}")
        if least_ranks is not None and not 1 <= least_ranks <= num_ranks:
            raise MesetaError(f"--min-nproc must be in 1..{num_ranks}, the ranks of --nproc, got {least_ranks}")
        if least_ranks is not None and not most:
            raise MesetaError(f"--min-nproc {least_ranks} is for a run that is started again; give --restarts too")
        if most and settings.checkpoint.resume == "never":
            raise MesetaError("--restarts: checkpoint.resume is 'never', so that no run is taken up; set it to auto")
        restarts = Restarts(most, num_ranks if least_ranks is None else least_ranks)
        for fewer in range(restarts.least_ranks, num_ranks):
            if refused := _refuses(settings, fewer):
                raise MesetaError(
                    f"--min-nproc {restarts.least_ranks}: {refused}, so that the run cannot go on on {fewer} "
                    f"rank{'s' * (fewer > 1)}; set --min-nproc {num_ranks}, or let the file leave that open"
                )
        return restarts

    def next_ranks(self, num_ranks: int, ended: Ended) -> int:
        """On how many ranks a run goes on: those that were killed are gone. Where all were, or none, it may be that
        none is."""
        num_left = num_ranks - len(ended.killed)
        return max(num_left, self.least_ranks) if num_left else num_ranks


def run_with_restarts(arguments: Sequence[str], num_ranks: int, restarts: Restarts, settings: RunConfig) -> int:
    """Run `meseta ARGUMENTS` on ranks of this machine, again each time that ranks are lost; returns the exit code of
    the last time.

    A rank is lost where a signal kills it, where its connection to the others breaks off, and where it does not run any
    more or does not come to what the others wait for. What a rank says itself, as a wrong input or a loss that is not
    finite, would come again: it ends the run, and so does SIGTERM or Ctrl-C.
    """
    signals = StopSignals()
    signals.install()
    # With --force a run begins anew, once: what was there before is none of its checkpoints.
    former = set(_checkpoints(settings)) if FORCE in arguments else set()
    for number in range(1, restarts.most + 1):
        ended = run_attempt(arguments, num_ranks, signals, settings.comm.time_limits, settings.run_dir)
        if not ended.loss or signals.number is not None:
            return ended.tell()
        num_ranks, place = restarts.next_ranks(num_ranks, ended), "the first step"
        if steps := [step for known, step in _checkpoints(settings).items() if known not in former]:
            place, arguments = f"step {max(steps)}", [word for word in arguments if word != FORCE]
        print(f"note: {ended.loss}; restart {number} of {restarts.most}, on {num_ranks} rank{'s' * (num_ranks > 1)}, "
              f"from {place}", file=sys.stderr, flush=True)  # fmt: skip
    ended = run_attempt(arguments, num_ranks, signals, settings.comm.time_limits, settings.run_dir)
    return ended.tell(" after the last restart")


def _checkpoints(settings: RunConfig) -> dict[tuple[str, float], int]:
    """Steps of the checkpoints of a run, each by what tells it from a former one of the same step."""
    from meseta.checkpoint.manifest import MANIFEST_PATH
    from meseta.checkpoint.store.names import named_step
    from meseta.checkpoint.store.store import named
    from meseta.machine.remote import changed_s, location_exists

    manifests = [path / MANIFEST_PATH for path in named(settings.checkpoints)]
    return {(str(m), changed_s(m)): named_step(m.parent) for m in manifests if location_exists(m)}


def _refuses(settings: RunConfig, num_ranks: int) -> str | None:
    """What of the files of a run keeps it from `num_ranks` ranks; None where nothing does."""
    from meseta.spec.constraints import Constraints
    from meseta.spec.documents import load_document
    from meseta.spec.plan_document import why_not_on

    plan, planner = settings.plan, settings.planner
    if plan != "auto":
        document: Mapping[Any, Any] = plan if isinstance(plan, dict) else load_document("plan", plan, dict)
        why = why_not_on(document, num_ranks)
        if why is not None:
            return f"the plan of the config {why}" if isinstance(plan, dict) else f"plan file {str(plan)!r} {why}"
    if planner.topology is not None:
        from meseta.spec import Topology

        num_devices = Topology.load(planner.topology).num_ranks
        if num_devices != num_ranks:
            return f"topology file {str(planner.topology)!r} is of {num_devices} devices"
    if plan == "auto" and planner.constraints is not None:
        rules = Constraints.load(planner.constraints).tables.values()
        if named := sorted({rank for rule in rules for rank in rule.ranks or () if rank >= num_ranks}):
            return f"constraints file {str(planner.constraints)!r} names rank {named[0]}"
    return None
