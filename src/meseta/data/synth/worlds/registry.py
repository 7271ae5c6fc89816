"""Registry of worlds."""

from __future__ import annotations

from meseta.data.synth.worlds.orders import HigherOrderWorld
from meseta.data.synth.worlds.pairs import PairWorld
from meseta.data.synth.worlds.world import SynthWorld
from meseta.errors import check_choice

# Worlds by name. To add one, add a module to this folder, a line here, and its formula to docs/data_synth.md.
WORLDS: dict[str, SynthWorld] = {world.name: world for world in (PairWorld(), HigherOrderWorld())}


def find_world(name: str) -> SynthWorld:
    """Return the world called `name`. Raises MesetaError if there is none, and suggests the closest name."""
    check_choice("data synth", "world", name, WORLDS)
    return WORLDS[name]
