"""The machine under a run: its files, locks, processes, processors and memory. Imports no torch."""

from meseta.system.environment import git_version, hardware_summary
from meseta.system.environment_variables import set_wait_policy
from meseta.system.files import write_atomic
from meseta.system.locks import FolderLock
from meseta.system.processors import read_processor

__all__ = ["FolderLock", "git_version", "hardware_summary", "read_processor", "set_wait_policy", "write_atomic"]
