"""Worlds: the laws that clicks of a synthetic log follow, one file each, and their structure for whoever fits them."""

from meseta.data.synth.worlds.registry import WORLDS, find_world
from meseta.data.synth.worlds.world import PlantedProduct, SynthWorld, planted_sum

__all__ = ["WORLDS", "PlantedProduct", "SynthWorld", "find_world", "planted_sum"]
