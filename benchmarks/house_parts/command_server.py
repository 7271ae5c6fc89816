"""Commands of the checkout whose interpreter runs this, each in a process forked from one that has imported torch: an
import takes seconds, and hundreds of commands are compared.

A line of standard input is a command, `[arguments, folder, file of its output, file of its errors]` as JSON. Two lines
answer: its process, which leads a session of its own, and, when it has ended, its exit code.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys

SHARED = ("sympy", "torch._dynamo", "pyarrow.parquet", "meseta.train.trainer", "meseta.train.trained_model",
          "meseta.train.predictions", "meseta.data.prepare")  # fmt: skip
"""What commands import, where a checkout has it."""


def become(arguments: list[str], folder: str, files: tuple[str, str]) -> None:
    """Be `meseta ARGUMENTS`; never returns."""
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        for number, path in enumerate((os.devnull, *files)):
            file = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(file, number)
            os.close(file)
        sys.argv = ["meseta", *arguments]
        importlib.import_module("meseta.cli.main").main()
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    for name in ("meseta.cli.main", *SHARED):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        arguments, folder, *files = json.loads(line)
        process = os.fork()
        if process == 0:
            become(arguments, folder, (files[0], files[1]))
        print(process, flush=True)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
            print(code, flush=True)


if __name__ == "__main__":
    main()
