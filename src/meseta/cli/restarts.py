"""`--max-restarts N --min-nproc M`: restarts of a training run that has lost a rank, from its last checkpoint."""

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
    """Maximum number of restarts of a run, and the minimum number of ranks."""

    max_restarts: int
    min_ranks: int

    @staticmethod
    def from_options(most: int, least_ranks: int | None, num_ranks: int, settings: RunConfig) -> RestartPolicy:
        """Create a policy from the options of a command on `num_ranks` ranks.

        If `least_ranks` is `None`, restarts use `num_ranks` ranks. Raises MesetaError if the run cannot be resumed, or
        not on so few ranks.
        """
        if most < 0:
            raise MesetaError(f"--max-restarts must be 0 or more, got {most}")
        if least_ranks is not None and not 1 <= least_ranks <= num_ranks:
            raise MesetaError(f"--min-nproc must be in 1..{num_ranks}, the ranks of --nproc, got {least_ranks}")
        if least_ranks is not None and not most:
            raise MesetaError(f"--min-nproc {least_ranks} needs --max-restarts; set both")
        if most and settings.checkpoint.resume == "never":
            raise MesetaError("--max-restarts: checkpoint.resume is 'never', so no run can be resumed; set it to auto")
        restarts = RestartPolicy(most, num_ranks if least_ranks is None else least_ranks)
        for fewer in range(restarts.min_ranks, num_ranks):
            if refused := _refusal_reason(settings, fewer):
                raise MesetaError(
                    f"--min-nproc {restarts.min_ranks}: {refused}, so the run cannot resume on {fewer} "
                    f"rank{'s' * (fewer > 1)}; set --min-nproc {num_ranks}, or use a file without a number of ranks"
                )
        return restarts

    def next_ranks(self, num_ranks: int, ended: LaunchResult) -> int:
        """Return the number of ranks for the next attempt: those that remain, but at least `min_ranks`.

        If all ranks or none were killed, possibly none of them is unavailable. The number of ranks is then unchanged.
        """
        num_left = num_ranks - len(ended.killed_ranks)
        return max(num_left, self.min_ranks) if num_left else num_ranks


def run_with_restarts(arguments: Sequence[str], num_ranks: int, restarts: RestartPolicy, settings: RunConfig) -> int:
    """Run `meseta ARGUMENTS` on ranks of this machine, and restart it when ranks are lost.

    A rank is lost if a signal kills it, if its connection to the other ranks fails, or if it stops or keeps the others
    waiting. Errors that a rank reports itself, such as invalid input or a non-finite loss, would occur again and end
    the run. SIGTERM and Ctrl-C also end it. Returns the exit code of the last attempt.
    """
    signals = StopSignals()
    signals.install()
    # --force deletes an existing run, but only in the first attempt. Checkpoints from before are not those of this run.
    former = set(_checkpoint_steps(settings)) if FORCE in arguments else set()
    for number in range(1, restarts.max_restarts + 1):
        ended = run_attempt(arguments, num_ranks, signals, settings.comm.time_limits, settings.run_dir)
        if not ended.loss_reason or signals.first_signal is not None:
            return ended.report_failure()
        num_ranks, place = restarts.next_ranks(num_ranks, ended), "the first step"
        # Without a new checkpoint, the next attempt keeps --force and starts from the first step.
        if steps := [step for known, step in _checkpoint_steps(settings).items() if known not in former]:
            place, arguments = f"step {max(steps)}", [word for word in arguments if word != FORCE]
        print(f"note: {ended.loss_reason}; restart {number} of {restarts.max_restarts}, on {num_ranks} "
              f"rank{'s' * (num_ranks > 1)}, "
              f"from {place}", file=sys.stderr, flush=True)  # fmt: skip
    ended = run_attempt(arguments, num_ranks, signals, settings.comm.time_limits, settings.run_dir)
    return ended.report_failure(" after the last restart")


def _checkpoint_steps(settings: RunConfig) -> dict[tuple[str, float], int]:
    """Return checkpoint steps by (manifest path, modification time), which distinguishes checkpoints of one step."""
    from meseta.checkpoint.files.paths import parse_step
    from meseta.checkpoint.manifest import MANIFEST_PATH
    from meseta.checkpoint.store.store import list_candidates
    from meseta.system.remote import location_exists, modification_time_s

    manifests = [path / MANIFEST_PATH for path in list_candidates(settings.checkpoint_location)]
    return {(str(m), modification_time_s(m)): parse_step(m.parent) for m in manifests if location_exists(m)}


def _refusal_reason(settings: RunConfig, num_ranks: int) -> str | None:
    """Return why the files of a run do not allow `num_ranks` ranks, or `None` if they do."""
    from meseta.spec.constraints import Constraints
    from meseta.spec.documents import load_document
    from meseta.spec.plan import rank_mismatch_reason

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
            return f"topology file {str(planner.topology)!r} has {num_devices} devices"
    if plan == "auto" and planner.constraints is not None:
        rules = Constraints.load(planner.constraints).tables.values()
        if named := sorted({rank for rule in rules for rank in rule.ranks or () if rank >= num_ranks}):
            return f"constraints file {str(planner.constraints)!r} names rank {named[0]}"
    return None
