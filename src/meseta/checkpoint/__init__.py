"""Checkpoints: a directory of Arrow files and a JSON manifest, readable with pyarrow alone, loadable under any plan."""

from meseta.checkpoint.compacting import compact
from meseta.checkpoint.difference import Difference, compare
from meseta.checkpoint.exporting import export
from meseta.checkpoint.failures import DamagedCheckpoint
from meseta.checkpoint.files.rate import WriteRate
from meseta.checkpoint.listing import Summary, find_checkpoint, list_checkpoints, summarize
from meseta.checkpoint.loading import Loaded, load, verify
from meseta.checkpoint.older import offer_older
from meseta.checkpoint.options import SaveOptions
from meseta.checkpoint.saving import save
from meseta.checkpoint.store.mirror import Mirror, fetch
from meseta.checkpoint.store.store import latest, newest, prune

__all__ = [
    "DamagedCheckpoint",
    "Difference",
    "Loaded",
    "Mirror",
    "SaveOptions",
    "Summary",
    "WriteRate",
    "compact",
    "compare",
    "export",
    "fetch",
    "find_checkpoint",
    "latest",
    "list_checkpoints",
    "load",
    "newest",
    "offer_older",
    "prune",
    "save",
    "summarize",
    "verify",
]
