"""Whether the list of transfers, which plans are priced by, knows a collective."""

from __future__ import annotations

from meseta.spec import MesetaError
from meseta.spec.transfer import NON_STEP_TRANSFERS, STEP_TRANSFERS


class UnknownCollectives:
    """Collectives of this process that are in no list: no plan's costs know them. A model of one's own may have such.

    Tests set `is_fatal`, and then they are refused.
    """

    count: int = 0
    is_fatal: bool = False


def check_known_collective(name: str) -> None:
    """Count a collective whose name is none of a transfer."""
    if name not in STEP_TRANSFERS and name not in NON_STEP_TRANSFERS:
        UnknownCollectives.count += 1
        if UnknownCollectives.is_fatal:
            raise MesetaError(
                f"a collective is called {name!r}, which meseta.spec.transfer does not list; name it there"
            )
