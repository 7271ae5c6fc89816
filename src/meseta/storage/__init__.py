"""Where rows live. One tier so far: the memory of the rank's device."""

from meseta.storage.resident import TableShard

__all__ = ["TableShard"]
