"""Access to environment variables. No other module reads `os.environ`."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

environ: MutableMapping[str, str] = os.environ
"""Current environment variables of this process. Changes apply to the process and its children."""
