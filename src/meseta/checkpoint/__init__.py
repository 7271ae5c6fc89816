"""Checkpoints: folders of Arrow files with a JSON manifest, readable with pyarrow and loadable under any plan."""

from meseta.checkpoint.compacting import compact
from meseta.checkpoint.difference import CheckpointDifference, compare
from meseta.checkpoint.exporting import export
from meseta.checkpoint.failures import DamagedCheckpoint
from meseta.checkpoint.fallback import fallback_checkpoint_error
from meseta.checkpoint.files.direct_io import WriteRateLimiter
from meseta.checkpoint.listing import CheckpointSummary, find_checkpoint, list_checkpoints, summarize
from meseta.checkpoint.loading import LoadedCheckpoint, load, verify
from meseta.checkpoint.saving import SaveOptions, save
from meseta.checkpoint.store.mirror import Mirror, fetch
from meseta.checkpoint.store.store import latest_complete, newest, prune

__all__ = [
    "CheckpointDifference",
    "CheckpointSummary",
    "DamagedCheckpoint",
    "LoadedCheckpoint",
    "Mirror",
    "SaveOptions",
    "WriteRateLimiter",
    "compact",
    "compare",
    "export",
    "fallback_checkpoint_error",
    "fetch",
    "find_checkpoint",
    "latest_complete",
    "list_checkpoints",
    "load",
    "newest",
    "prune",
    "save",
    "summarize",
    "verify",
]
