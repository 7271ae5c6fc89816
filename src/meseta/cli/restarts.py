"""`--max-restarts N --min-nproc M`: a training that loses a rank goes on from its last checkpoint by itself."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meseta.cli.launch import LaunchResult, StopSignals, run_attempt
from meseta.errors import MesetaError

if TYPE_CHECKING:
    from meseta.config import RunConfig

FORCE = "--force"


@dataclass(frozen=True)
class RestartPolicy:
    """How often a run may be started again, and on how few ranks."""

    max_restarts: int
    min_ranks: int

    @staticmethod
    def from_options(most: int, least_ranks: int | None, num_ranks: int, settings: RunConfig) -> RestartPolicy:
        """As the command line says it of a run on `num_ranks`; `least_ranks` None: no fewer. Raises MesetaError where
        the run could not be taken up, or not on so few ranks."""
        if most < 0:
            raise MesetaError(f"--max-restarts must be 0 or more, got {most}")
        if least_ranks is not None and not 1 <= least_ranks <= num_ranks:
            raise MesetaError(f"--min-nproc must be in 1..{num_ranks}, the ranks of --nproc, got {least_ranks}")
        if least_ranks is not None and not most:
            raise MesetaError(f"--min-nproc {least_ranks} is for a run that is started again; give --max-restarts too")
        if most and settings.checkpoint.resume == "never":
            raise MesetaError(
                "--max-restarts: checkpoint.resume is 'never', so that no run is taken up; set it to auto"
            )
        restarts = RestartPolicy(most, num_ranks if least_ranks is None else least_ranks)
        for fewer in range(restarts.min_ranks, num_ranks):
            if refused := _refusal_reason(settings, fewer):
                raise MesetaError(
                    f"--min-nproc {restarts.min_ranks}: {refused}, so that the run cannot go on on {fewer} "
                    f"rank{'s' * (fewer > 1)}; set --min-nproc {num_ranks}, or let the file leave that open"
                )
        return restarts

    def next_ranks(self, num_ranks: int, ended: LaunchResult) -> int:
        """On how many ranks a run goes on: those that were killed are gone. Where all were, or none, it may be that
        none is."""
        num_left = num_ranks - len(ended.killed_ranks)
        return max(num_left, self.min_ranks) if num_left else num_ranks


def run_with_restarts(arguments: Sequence[str], num_ranks: int, restarts: RestartPolicy, settings: RunConfig) -> int:
    """Run `meseta ARGUMENTS` on ranks of this machine, again each time that ranks are lost; returns the exit code of
    the last time.

    A rank is lost where a signal kills it, where its connection to the others breaks off, and where it does not run any
    more or does not come to what the others wait for. What a rank says itself, as a wrong input or a loss that is not
    finite, would come again: it ends the run, and so does SIGTERM or Ctrl-C.
    """
    signals = StopSignals()
    signals.install()
    # With --force a run begins anew, once: what was there before is none of its checkpoints.
    former = set(_checkpoint_steps(settings)) if FORCE in arguments else set()
    for number in range(1, restarts.max_restarts + 1):
        ended = run_attempt(arguments, num_ranks, signals, settings.comm.time_limits, settings.run_dir)
        if not ended.loss_reason or signals.first_signal is not None:
            return ended.report_failure()
        num_ranks, place = restarts.next_ranks(num_ranks, ended), "the first step"
        if steps := [step for known, step in _checkpoint_steps(settings).items() if known not in former]:
            place, arguments = f"step {max(steps)}", [word for word in arguments if word != FORCE]
        print(f"note: {ended.loss_reason}; restart {number} of {restarts.max_restarts}, on {num_ranks} "
              f"rank{'s' * (num_ranks > 1)}, "
              f"from {place}", file=sys.stderr, flush=True)  # fmt: skip
    ended = run_attempt(arguments, num_ranks, signals, settings.comm.time_limits, settings.run_dir)
    return ended.report_failure(" after the last restart")


def _checkpoint_steps(settings: RunConfig) -> dict[tuple[str, float], int]:
    """Steps of the checkpoints of a run, each by what tells it from a former one of the same step."""
    from meseta.checkpoint.manifest import MANIFEST_PATH
    from meseta.checkpoint.store.names import parse_step
    from meseta.checkpoint.store.store import list_candidates
    from meseta.machine.remote import location_exists, modification_time_s

    manifests = [path / MANIFEST_PATH for path in list_candidates(settings.checkpoint_location)]
    return {(str(m), modification_time_s(m)): parse_step(m.parent) for m in manifests if location_exists(m)}


def _refusal_reason(settings: RunConfig, num_ranks: int) -> str | None:
    """What of the files of a run keeps it from `num_ranks` ranks; None where nothing does."""
    from meseta.spec.constraints import Constraints
    from meseta.spec.documents import load_document
    from meseta.spec.plan_document import rank_mismatch_reason

    plan, planner = settings.plan, settings.planner
    if plan != "auto":
        document: Mapping[Any, Any] = plan if isinstance(plan, dict) else load_document("plan", plan, dict)
        why = rank_mismatch_reason(document, num_ranks)
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
