"""`python tools/quality SUITE --out DIR`: see docs/quality.md."""

import os
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
# Python adds the folder of this file, but the package is imported as tools.quality. Processes that are started inherit
# the variable, and import custom models by it.
sys.path[0] = ROOT
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))

if __name__ == "__main__":
    from tools.quality.command import main

    sys.exit(main(sys.argv[1:]))
