"""Python runs this first, where its folder is on PYTHONPATH: files of the process are far ones."""

import builtins
import io

from far_files import FarFile, open_far

io.FileIO = FarFile  # type: ignore[misc,assignment]
builtins.open = open_far
