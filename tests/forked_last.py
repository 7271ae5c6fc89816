"""Last import of the fork server."""

import os

from forked import collect_garbage_rarely

# `forked` has put the folder of the tests first.
_, _, path = os.environ.pop("PYTHONPATH").partition(os.pathsep)
os.environ.update({"PYTHONPATH": path} if path else {})
# A collection in a forked process would copy every page that it shares with the server.
collect_garbage_rarely()
