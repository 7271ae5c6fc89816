"""Checkpoints: a directory of Arrow files and a JSON manifest, readable with pyarrow alone, loadable under any plan."""

from meseta.checkpoint.directory import latest, prune
from meseta.checkpoint.loading import Loaded, load, verify
from meseta.checkpoint.saving import save

__all__ = ["Loaded", "latest", "load", "prune", "save", "verify"]
