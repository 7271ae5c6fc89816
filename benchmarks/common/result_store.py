"""Results of long benchmarks, which continue after an interruption."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from record import ROOT

from meseta.system.environment import git_commit, hardware_summary
from meseta.system.files import write_atomic


class ResultStore:
    """Results by name, in a file that is rewritten after each new one."""

    FOLDER = ROOT / "benchmarks" / "stored_results"
    """Folder of results that the repository has."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def __contains__(self, name: str) -> bool:
        return name in self._results

    def get(self, name: str, make: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        if name not in self._results:
            self._results[name] = {**make(), "commit": git_commit(), "processor": hardware_summary()}
            self._save()
        return self._results[name]

    def get_and_print(self, name: str, make: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return a result as `get` does, and print its numbers."""
        result = self.get(name, make)
        numbers = ", ".join(f"{key} {value:.4g}" for key, value in result.items() if isinstance(value, int | float))
        print(f"{name.replace('/', ' ')}: {numbers}", file=sys.stderr, flush=True)
        return result

    def find(self, name: str) -> Mapping[str, Any] | None:
        return self._results.get(name)

    def discard_of_other_commits(self, *endings: str) -> None:
        """Remove the results whose names end in one of `endings`, except those of the current commit."""
        commit = git_commit()
        self._results = {
            name: result
            for name, result in self._results.items()
            if not name.endswith(endings) or result["commit"] == commit
        }
        self._save()

    def _save(self) -> None:
        # A line for each, since they are looked at as changes of this file.
        lines = (f"{json.dumps(key)}: {json.dumps(result)}" for key, result in sorted(self._results.items()))
        write_atomic(self._path, "{\n" + ",\n".join(lines) + "\n}\n")
