"""Variables of this process's environment; nothing else reads them."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

environ: MutableMapping[str, str] = os.environ
"""As they are now: a change is one of the process."""
