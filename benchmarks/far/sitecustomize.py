"""Python runs this first, where its folder is on PYTHONPATH: files of the process are far ones."""

import io

from far_files import FarFile

io.FileIO = FarFile  # type: ignore[misc,assignment]
