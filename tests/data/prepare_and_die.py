"""`python prepare_and_die.py FOLDER OPTIONS.json COUNT SEED`: run prepare, kill it COUNT times at random moments, then
complete it.

Each run is a fork of this process, and kills itself at a random call with which Python opens, renames, truncates or
removes a file. Blocks, windows and parts are small, and each write is committed immediately.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

from meseta.data import PrepareOptions
from meseta.data.formats import parquet
from meseta.data.formats import text as text_format
from meseta.data.prepare import first_pass, recipe_preparation, staging, write
from meseta.data.prepare import prepare as run

EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.mkdir"}


def make_small() -> None:
    text_format.BLOCK_BYTES, parquet.BLOCK_ROWS = 3000, 40
    write.WINDOW_SAMPLES = 64
    write.NUM_PART_WINDOWS = 1
    recipe_preparation.WINDOW_SAMPLES, recipe_preparation.ROW_GROUP_ROWS = 64, 32
    staging.COMMIT_INTERVAL_S = 0.0
    first_pass._VOCABULARY_BUDGET_BYTES = 10_000


def forked(options: PrepareOptions, die_at: int | None, count_file: Path) -> int:
    """Return the exit status of a fork that prepares. A completed one writes its number of events to `count_file`."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    count = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        if event in EVENTS:
            count += 1
            if count == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)

    code = 1
    try:
        sys.addaudithook(hook)
        run(options)
        count_file.write_text(str(count))
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def main(folder: Path, document: dict, num_kills: int, seed: int) -> None:
    draw = random.Random(seed)
    make_small()
    count_file = folder / "count"
    assert forked(PrepareOptions(**document, out=folder / "whole"), None, count_file) == 0
    num_events = int(count_file.read_text())
    out = folder / "out"
    kills = 0
    while kills < num_kills and not out.exists():
        status = forked(PrepareOptions(**document, out=out), draw.randint(1, num_events), count_file)
        if status == 0:  # so little was left that the moment did not come
            break
        assert status == signal.SIGKILL, status
        kills += 1
    if not out.exists():
        assert forked(PrepareOptions(**document, out=out), None, count_file) == 0
    count_file.unlink()
    print(kills)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), int(sys.argv[3]), int(sys.argv[4]))
