"""Hook that Python runs at startup if this folder is on PYTHONPATH. It redirects file reads to the other host."""

import builtins
import io

from remote_files import RemoteFile, open_remote

io.FileIO = RemoteFile  # type: ignore[misc,assignment]
builtins.open = open_remote
