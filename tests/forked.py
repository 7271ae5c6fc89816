"""Processes forked by a server that has imported torch and the package."""

import gc
import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import NoReturn

AT_IMPORT = ("OMP_", "GOMP_", "KMP_", "MKL_", "ATEN_", "ONEDNN_", "TRITON_", "CUDA_", "LD_", "MESETA_ISA")
"""Prefixes of variables that are read when torch or the core is imported."""

PROGRAMS = {"meseta": "meseta.cli.main", "torchrun": "torch.distributed.run", "python": ""}
"""Module of each program. `python` runs the script among its arguments."""


def forking() -> ForkServerContext:
    """Return the context for `forking().Process(...)`. A session has one server, which imports these modules when it
    starts."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "checkpoint.saver",
            "meseta.cli.main",
            "meseta.data.prepare",
            "meseta.cli.preload",
            "small_run",
            "torch._dynamo",
            "pytest",
            "forked_last",
        ]
    )
    _start_server()
    return context


@cache
def _start_server() -> None:
    path = os.environ.get("PYTHONPATH")
    # The server of Python 3.11 ignores `sys.path`, so that it would find no module of tests/.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([path] if path else [])])
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        os.environ.update({"PYTHONPATH": path} if path else {})


def collect_garbage_rarely() -> None:
    """Exclude existing objects from garbage collections, and collect rarely."""
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)


def killed_while_saving(
    save: Callable[..., None], arguments: Sequence[object], delay_s: float, saved: int, *, wait_for_one: bool = True
) -> int:
    """Start `save(*arguments, pipe)`, which sends a number for each save, and kill it `delay_s` after the first save,
    or after its start. Return the last number sent, or `saved` if none was."""
    context = forking()
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=save, args=(*arguments, there))
    process.start()
    there.close()
    if wait_for_one:
        assert here.poll(60), "the first checkpoint took longer than 60 s"
    time.sleep(delay_s)
    process.kill()
    process.join()
    with suppress(EOFError):
        while True:
            saved = here.recv()
    return saved


def become_command(
    arguments: Sequence[str],
    folder: Path | str,
    environment: Mapping[str, str],
    files: Sequence[int],
    launcher: Sequence[str] = (),
    program: str = "meseta",
) -> NoReturn:
    """Turn this process into `PROGRAM ARGUMENTS`, one of `PROGRAMS`, with `files` as its standard streams.

    The program replaces the process by exec if a variable differs that torch reads at import, or with a `launcher`,
    which are options of Python. Otherwise it runs in this process.
    """
    code = 1
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.chdir(folder)
        arguments = [word for word in arguments if program != "python" or word != "-u"]
        if launcher or _read_at_import(environment) != _read_at_import(os.environ):
            module = PROGRAMS[program]
            words = [sys.executable, *(launcher or ["-P"]), "-m", module] if module else [sys.executable]
            os.execve(sys.executable, [*words, *arguments], dict(environment))
        os.environ.clear()
        os.environ.update(environment)
        _be(program, arguments)
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _be(program: str, arguments: Sequence[str]) -> None:
    """Run the program in this process."""
    if program == "python":
        sys.argv = [*arguments]
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")
        return
    sys.argv = [program, *arguments]
    import_module(PROGRAMS[program]).main()


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(AT_IMPORT)}
