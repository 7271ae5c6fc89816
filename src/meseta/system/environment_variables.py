"""Access to environment variables. No other module reads `os.environ`."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

environ: MutableMapping[str, str] = os.environ
"""Environment variables of this process and of children that it starts."""
