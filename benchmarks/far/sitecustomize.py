"""Hook that Python runs at startup if this folder is on PYTHONPATH. It redirects file reads to the other host."""

import builtins
import io

from far_files import FarFile, open_far

io.FileIO = FarFile  # type: ignore[misc,assignment]
builtins.open = open_far
