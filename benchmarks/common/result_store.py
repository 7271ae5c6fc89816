"""Results of long benchmarks, which continue after an interruption."""

from __future__ import annotations

import json
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
            # A line for each, since they are looked at as changes of this file.
            lines = (f"{json.dumps(key)}: {json.dumps(result)}" for key, result in sorted(self._results.items()))
            write_atomic(self._path, "{\n" + ",\n".join(lines) + "\n}\n")
        return self._results[name]
