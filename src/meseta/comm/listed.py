"""Whether the list of transfers, which plans are priced by, knows a collective."""

from __future__ import annotations

from meseta.spec import MesetaError
from meseta.spec.transfer import BETWEEN_STEPS, OF_STEPS


class Unlisted:
    """Collectives of this process that are in no list: no plan's costs know them. A model of one's own may have such.

    Tests set `is_error`, and then they are refused.
    """

    count: int = 0
    is_error: bool = False


def check_listed(name: str) -> None:
    """Count a collective whose name is none of a transfer."""
    if name not in OF_STEPS and name not in BETWEEN_STEPS:
        Unlisted.count += 1
        if Unlisted.is_error:
            raise MesetaError(
                f"a collective is called {name!r}, which meseta.spec.transfer does not list; name it there"
            )
