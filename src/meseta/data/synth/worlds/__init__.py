"""Worlds of synthetic logs: the distributions that clicks follow. Each is defined in its own module."""

from meseta.data.synth.worlds.registry import WORLDS, find_world
from meseta.data.synth.worlds.world import PlantedProduct, SynthWorld, planted_sum

__all__ = ["WORLDS", "PlantedProduct", "SynthWorld", "find_world", "planted_sum"]
