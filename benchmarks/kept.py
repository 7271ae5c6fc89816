"""What long benchmarks have done so far, so that the same command goes on where it was cut off."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meseta.system.environment import git_commit, hardware_summary
from meseta.system.files import write_atomic


class Kept:
    """Results by name, in a file that is rewritten after each."""

    def __init__(self, path: Path, *, again: str | None = None, makes: bool = True) -> None:
        """Those whose names end in `again` count as missing; without `makes` what is missing raises KeyError."""
        self._path, self._makes = path, makes
        cells: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self._cells = {name: cell for name, cell in cells.items() if again is None or not name.endswith(f"/{again}")}

    def __contains__(self, name: str) -> bool:
        return name in self._cells

    def get(self, name: str, make: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        if name not in self._cells:
            if not self._makes:
                raise KeyError(name)
            self._cells[name] = {**make(), "commit": git_commit(), "processor": hardware_summary()}
            # A line for each, since they are looked at as changes of this file.
            lines = (f"{json.dumps(key)}: {json.dumps(cell)}" for key, cell in sorted(self._cells.items()))
            write_atomic(self._path, "{\n" + ",\n".join(lines) + "\n}\n")
        return self._cells[name]
