"""Check that collectives are listed in `meseta.spec.transfer`, from which the planner predicts times."""

from __future__ import annotations

from meseta.spec import MesetaError
from meseta.spec.transfer import NON_STEP_TRANSFERS, STEP_TRANSFERS


class UnknownCollectives:
    """Counter of collectives in this process whose names are not listed, such as those of a custom model.

    Predictions of the planner do not include them. Tests set `is_fatal` to raise an error instead.
    """

    count: int = 0
    is_fatal: bool = False


def check_known_collective(name: str) -> None:
    """Count a collective whose name is not listed. Raises MesetaError if `UnknownCollectives.is_fatal` is set."""
    if name not in STEP_TRANSFERS and name not in NON_STEP_TRANSFERS:
        UnknownCollectives.count += 1
        if UnknownCollectives.is_fatal:
            raise MesetaError(
                f"collective {name!r} is not listed in meseta.spec.transfer; add a transfer with this name"
            )
