"""Every world by its name."""

from __future__ import annotations

from meseta.data.synth.worlds.orders import HigherOrderWorld
from meseta.data.synth.worlds.pairs import PairWorld
from meseta.data.synth.worlds.world import SynthWorld
from meseta.errors import check_choice

WORLDS: dict[str, SynthWorld] = {world.name: world for world in (PairWorld(), HigherOrderWorld())}
"""A world is a file of this folder, a line here, and its formula in docs/data_synth.md."""


def find_world(name: str) -> SynthWorld:
    """The world of that name; raises MesetaError, with the nearest name, where there is none."""
    check_choice("data synth", "world", name, WORLDS)
    return WORLDS[name]
