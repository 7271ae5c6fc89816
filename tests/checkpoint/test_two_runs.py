"""Tests of two runs that save to one URL: exactly one continues, and every checkpoint is one of its saves."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import fsspec
import pytest

from checkpoint.object_store import s3_server
from checkpoint.simulated import pieces, plain_plan, random_tables
from meseta.checkpoint import SaveOptions, list_checkpoints, prune, save, saving, verify
from meseta.checkpoint.files import layout
from meseta.checkpoint.files.paths import checkpoint_path
from meseta.checkpoint.manifest import RUN_ID, read_manifest
from meseta.checkpoint.store import objects
from meseta.checkpoint.store.store import make_store
from meseta.comm import World
from meseta.spec import MesetaError, OptimizerSpec, TableSpec
from meseta.system.remote import RemotePath, to_location
from sampling import sample

SPECS = [TableSpec(name="user", num_embeddings=64, embedding_dim=4, optimizer=OptimizerSpec(name="sgd"))]
PLAN = plain_plan(SPECS, 1, "table_wise")
STEPS = {"same": ([2, 3], [2, 3]), "other": ([2, 4], [3, 5])}
"""Steps at which two runs save."""


class Inline(Executor):
    """Executor that runs everything in the calling thread."""

    def __init__(self, max_workers: int) -> None:
        """Accept the arguments of the standard executor."""

    def submit(self, action: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(action(*args, **options))
        except Exception as error:
            done.set_exception(error)
        return done


class Turns:
    """Scheduler that runs one of two threads at a time, and switches after given numbers of requests."""

    def __init__(self, switches: list[int]) -> None:
        self._left = switches
        self._turn = 0
        self._over = [False, False]
        self._changed = threading.Condition()
        self.number = threading.local()
        self.num_requests = 0

    def request(self) -> None:
        """Wait for the turn of this thread, and count one of its requests."""
        me = getattr(self.number, "value", None)
        if me is None:  # the test reads
            return
        with self._changed:
            while self._turn != me and not self._over[1 - me]:
                self._changed.wait(20)
            self.num_requests += 1
            if self._left and not self._over[1 - me]:
                self._left[0] -= 1
                if self._left[0] < 0:
                    self._left.pop(0)
                    self._yield(me)

    def _yield(self, me: int) -> None:
        self._turn = 1 - me
        self._changed.notify_all()
        while self._turn != me and not self._over[1 - me]:
            self._changed.wait(20)

    def sleep(self, _: float) -> None:
        """Let the other thread run meanwhile."""
        with self._changed:
            if not self._over[1 - self.number.value]:
                self._yield(self.number.value)

    def end(self) -> None:
        with self._changed:
            self._over[self.number.value] = True
            self._changed.notify_all()


def save_step(store: Any, run: int, step: int) -> None:
    """Save a step of a run whose tables and id follow from its number. All runs have the same shapes."""
    shards = pieces(SPECS, PLAN, 0, random_tables(SPECS, 100 * run + step))
    known: dict[str, Any] = {"step": step, "plan": PLAN, "dense": {}, "state": {RUN_ID: f"{run:032x}"}}
    save(store, world=World.single(), shards=shards, options=SaveOptions(), **known)


def save_all(store: Any, run: int, steps: list[int]) -> MesetaError | None:
    """Save repeatedly as a run does. Return the error that refused it."""
    try:
        for step in steps:
            save_step(store, run, step)
            prune(store, keep_last=1)
    except MesetaError as error:
        return error
    return None


def together(url: str, steps: tuple[list[int], list[int]], turns: Turns | None) -> list[MesetaError | None]:
    """Return the error that refused each of two runs that have both started."""
    stores = [make_store(url), make_store(url)]
    for store in stores:
        store.open()
    results: list[Any] = [AssertionError("did not end"), AssertionError("did not end")]

    def run(number: int) -> None:
        try:
            if turns is not None:
                turns.number.value = number
            results[number] = save_all(stores[number], number + 1, steps[number])
        finally:
            if turns is not None:
                turns.end()

    threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


def check(url: str, results: list[MesetaError | None], steps: tuple[list[int], list[int]]) -> None:
    """Check that one run ended and the other was refused. All checkpoints are complete, and the newest belongs to the
    run that ended."""
    assert all(error is None or isinstance(error, MesetaError) for error in results)
    [refused] = [error for error in results if error is not None]
    assert "was written by another run; stop that run, or choose another checkpoint.dir" in str(refused)
    winner = results.index(None)
    checkpoints = list_checkpoints(url)
    assert [listed.problem for listed in checkpoints] == [""] * len(checkpoints)
    newest = checkpoint_path(to_location(url), steps[winner][-1])
    for listed in checkpoints:
        verify(listed.path)
    assert read_manifest(newest)["state"][RUN_ID] == f"{winner + 1:032x}"


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(layout, "BLOCK_BYTES", 512)
    monkeypatch.setattr(saving, "ThreadPoolExecutor", Inline)
    yield "memory://bucket/run"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[int]], Turns]:
    request = RemotePath._request

    def take(switches: list[int]) -> Turns:
        made = Turns(switches)

        def in_turn(self: RemotePath, verb: str, send: Callable[[Any, str], Any]) -> Any:
            made.request()
            return request(self, verb, send)

        monkeypatch.setattr(RemotePath, "_request", in_turn)
        monkeypatch.setattr(objects.time, "sleep", made.sleep)
        return made

    return take


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("case", sample(range(400), 5, seed=0))
def test_interleaved_requests(memory: str, turns: Callable[[list[int]], Turns], steps: str, case: int) -> None:
    """Each run is interrupted at some requests, up to four times."""
    draw = random.Random(case)
    switches = [case // 4] if case % 4 == 0 else [draw.randrange(90) for _ in range(1 + case % 4)]
    check(memory, together(memory, STEPS[steps], turns(switches)), STEPS[steps])


@pytest.mark.parametrize("seed", sample(range(40), 1, seed=2))
def test_at_the_same_time(monkeypatch: pytest.MonkeyPatch, s3: Any, seed: int) -> None:
    """Both save to an S3 server, at the same steps or others."""
    monkeypatch.setattr(layout, "BLOCK_BYTES", 512)
    s3.create_bucket(Bucket=f"bucket-{seed}")
    steps = STEPS["same" if seed % 2 else "other"]
    url = f"s3://bucket-{seed}/run"
    check(url, together(url, steps, None), steps)


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    with s3_server() as (_, client):
        yield client


@pytest.mark.parametrize("steps", STEPS)
def test_in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: str) -> None:
    """The first run to save continues."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    url = f"file://{tmp_path}/run"
    stores = [make_store(url), make_store(url)]
    for store in stores:
        store.open()
    save_step(stores[1], 2, STEPS[steps][1][0])
    with pytest.raises(MesetaError, match="was written by another run"):
        save_step(stores[0], 1, STEPS[steps][0][0])
    save_step(stores[1], 2, STEPS[steps][1][1])
    check(url, [MesetaError("was written by another run; stop that run, or choose another "
                            "checkpoint.dir"), None], STEPS[steps])  # fmt: skip
