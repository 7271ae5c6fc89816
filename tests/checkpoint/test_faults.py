"""Tests of seeded faults in a run with deltas, on one and several ranks. Loading gives the right bits, or all ranks
name the bad file in one line."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoint.running import FUSE, SPECS, Run, dense_of, holds, loads
from checkpoint.simulated import pieces, plain_plan, random_plan, random_tables
from meseta.checkpoint import DamagedCheckpoint, fallback_checkpoint_error, latest_complete, save, verify
from meseta.checkpoint.fallback import FallbackCheckpointError
from meseta.checkpoint.files import layout
from meseta.checkpoint.files.paths import QUARANTINE_MARKER
from meseta.checkpoint.store.store import list_candidates, make_store
from meseta.comm import World
from meseta.spec import MesetaError
from sampling import sample
from small_disk import small_disk

NUM_FAULTS, GROUP = 1000, 8
POLICIES = ("one_shot", "consecutive", "intermittent", "rolling", "none")


@pytest.fixture(autouse=True)
def many_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(os, "fsync", lambda _: None)


def started(folder: Path, draw: random.Random) -> Run:
    """Return a run without checkpoints."""
    size = draw.choice([1, 1, 2, 2, 4])
    settings = {
        "deltas": draw.choice(POLICIES),
        "max_chain": draw.choice([2, 3, 5]),
        "keep_last": draw.choice([1, 2, 3, 9]),
    }
    return Run(folder, random_plan(SPECS, size, draw.randrange(1 << 30)), draw.randrange(1 << 30), **settings)


def saved(run: Run, draw: random.Random, step: int) -> None:
    """Train, and save that step."""
    run.train(draw.randrange(1 << 30))
    results = run.save(step)
    assert not any(results), results


def check_message(results: list[object], *names: str) -> str:
    """Check that all ranks report the same line with one of the names. Return the line."""
    assert all(isinstance(result, MesetaError) for result in results), results
    [text] = {str(result) for result in results}
    assert text.isprintable() and any(name in text for name in names), (text, names)
    return text


def change_and_save_on(run: Run, draw: random.Random, step: int, *, is_harmed: bool = False) -> None:
    """Save two more steps, and check that no partial file is left. Every checkpoint except those harmed before is
    complete and has the bits of its step."""
    for later in (step, step + 1):
        saved(run, draw, later)
    assert not list(run.folder.glob(".*"))
    left = list_candidates(run.folder)
    assert left[-1].name == f"step-{step + 1:09d}"
    for path in left:
        results = loads(path, plain_plan(SPECS, 1, "table_wise"))
        if is_harmed and int(path.name[-9:]) < step and isinstance(results[0], MesetaError):
            continue
        assert holds(results, run.history) == int(path.name[-9:])
        verify(path)


# Changed files.


def truncated(files: list[Path], draw: random.Random) -> list[Path]:
    file = draw.choice(files)
    os.truncate(file, draw.randrange(file.stat().st_size))
    return [file]


def flipped(files: list[Path], draw: random.Random) -> list[Path]:
    file = draw.choice(files)
    content = bytearray(file.read_bytes())
    for _ in range(draw.choice([1, 1, 1, 7])):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)
    return [file]


def exchanged(files: list[Path], draw: random.Random) -> list[Path]:
    """Exchange files of steps, blocks or tables, or two manifests."""
    one = draw.choice(files)
    alike = [file for file in files if file.suffix == one.suffix and file != one] or files
    other = draw.choice([file for file in alike if file.name == one.name] or alike)
    contents = one.read_bytes(), other.read_bytes()
    one.write_bytes(contents[1])
    other.write_bytes(contents[0])
    return [one, other]


def missing(files: list[Path], draw: random.Random) -> list[Path]:
    file = draw.choice(files)
    file.unlink()
    return [file]


def replaced(files: list[Path], draw: random.Random) -> list[Path]:
    """Replace a file by zeros, by a longer one, or by something that is no regular file."""
    file = draw.choice(files)
    how = draw.randrange(3)
    if how == 0:
        file.write_bytes(bytes(file.stat().st_size))
    elif how == 1:
        with file.open("ab") as end:
            end.write(b"x")
    else:
        file.unlink()
        draw.choice([Path.mkdir, os.mkfifo])(file)  # type: ignore[operator]
    return [file]


HARMS: tuple[Callable[[list[Path], random.Random], list[Path]], ...] = (
    truncated,
    flipped,
    exchanged,
    missing,
    replaced,
)


def damage(folder: Path, draw: random.Random) -> None:
    """Damage a file that the newest checkpoint needs. All checkpoints that do not need it are unchanged, the error
    offers the newest of them, and a run resumes from it."""
    run = started(folder, draw)
    for step in range(1, draw.randrange(3, 7)):
        saved(run, draw, step)
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    harmed = draw.choice(HARMS)(files, draw)
    newest, names = list_candidates(folder)[-1], [str(file.relative_to(folder)) for file in harmed]
    plan = random_plan(SPECS, draw.choice([1, 2, 3]), draw.randrange(1 << 30))
    results = loads(newest, plan)
    if not any(isinstance(result, Exception) for result in results):
        assert holds(results, run.history) == int(newest.name[-9:])
        change_and_save_on(run, draw, 10, is_harmed=True)
        return
    check_message(results, *names, "manifest.json: ")
    [problem, *_] = results
    assert isinstance(problem, DamagedCheckpoint)
    offer = fallback_checkpoint_error(problem, newest)
    whole = []
    for path in list_candidates(folder)[:-1]:
        try:
            step = holds(loads(path, plan), run.history)
        except MesetaError:
            continue
        assert step == int(path.name[-9:])
        whole.append(path)
    assert offer.fallback == (whole[-1] if whole else None)
    if offer.fallback is not None:
        gone_back(run, draw, offer)


def gone_back(run: Run, draw: random.Random, offer: FallbackCheckpointError) -> None:
    """Resume from the offer. Quarantined checkpoints are never used again, and no other one is deleted for them."""
    assert offer.fallback is not None
    for path in offer.unusable:
        make_store(run.folder).quarantine(path, "damaged")
    assert latest_complete(run.folder) == offer.fallback
    run.resume(offer.fallback, random_plan(SPECS, draw.choice([1, 2]), draw.randrange(1 << 30)))
    first, last = (int(path.name[-9:]) for path in (offer.fallback, offer.unusable[0]))
    for step in range(first + 1, last + draw.choice([0, 2])):
        if draw.random() < 0.7:
            saved(run, draw, step)
            assert list_candidates(run.folder)[-1].name == f"step-{step:09d}"
    change_and_save_on(run, draw, 10, is_harmed=True)
    for path in offer.unusable:  # each is unchanged, or replaced and perhaps pruned
        assert (path / QUARANTINE_MARKER).exists() or int(path.name[-9:]) in run.history


# Refused writes.


def full_disk(folder: Path, draw: random.Random) -> None:
    """All saves on a full disk end in one line on all ranks. With more space, the next save has the content of each
    rank."""
    folder.mkdir()
    with small_disk(folder / "disk", draw.randrange(40_000, 1_500_000)):
        run = started(folder / "disk/checkpoints", draw)
        good: list[int] = []
        for step in range(1, 9):
            run.train(draw.randrange(1 << 30))
            results = run.save(step)
            if any(results):
                check_message(results, "No space left on device", "os error 28")
            else:
                good.append(step)
            newest = latest_complete(run.folder) if run.folder.exists() else None
            assert (newest is None) == (not good), (newest, good)
            if newest is not None:
                assert holds(loads(newest, run.plan), run.history) >= good[-1]
        os.system(f"mount -o remount,size=32M {folder / 'disk'}")
        change_and_save_on(run, draw, 10)


def refused_change(folder: Path, draw: random.Random) -> None:
    """Refuse one or all changes of the file system during a save. The next save has the content of both, in the same
    run or in another one."""
    run = started(folder, draw)
    first = draw.randrange(1, 4)
    for step in range(1, first + 1):
        saved(run, draw, step)
    for step in (first + 1, first + 2):
        run.train(draw.randrange(1 << 30))
        number = draw.choice([errno.ENOSPC, errno.EIO, errno.EDQUOT])
        with FUSE.lit(draw.randrange(60), lambda n=number: OSError(n, os.strerror(n)), draw.choice([1, 1, 1 << 62])):  # type: ignore[misc]
            results = run.save(step)
        if any(results):
            check_message(results, os.strerror(number))
    newest = latest_complete(folder)
    assert newest is not None
    step = holds(loads(newest, run.plan), run.history)
    assert step >= first
    if draw.random() < 0.3:
        run.resume(newest)
    change_and_save_on(run, draw, 10)


def two_writers(folder: Path, draw: random.Random) -> None:
    """Each writer saves, or reports the other. Every checkpoint is complete and written by one of them."""
    plan = plain_plan(SPECS, 1, "table_wise")
    held = [random_tables(SPECS, seed) for seed in (1, 2)]
    steps = [draw.choice([1, 2]), draw.choice([1, 2])]
    results: list[object] = [None, None]
    gate = threading.Barrier(2)

    def write(number: int) -> None:
        shards = pieces(SPECS, plan, 0, held[number])
        known = {"world": World.single(), "plan": plan, "shards": shards, "state": {"writer": number}}
        gate.wait()
        try:
            results[number] = save(folder, step=steps[number], dense=dense_of(number), **known)  # type: ignore[arg-type]
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=write, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    refused = [result for result in results if not isinstance(result, Path)]
    assert len(refused) < 2
    for result in refused:
        check_message([result], "another process is writing a checkpoint to it")
    for path in list_candidates(folder):
        writers = [number for number in (0, 1) if results[number] == path]
        [(_, shards)] = loads(path, plan)  # type: ignore[misc]
        assert any(
            torch.equal(shard.weight.view(torch.uint8), held[number][shard.spec.name]["row"].view(torch.uint8))
            for number in writers
            for shard in shards[:1]
        )
        verify(path)
    assert not list(folder.glob(".*"))


def fault_of(number: int) -> Callable[[Path, random.Random], None]:
    """Return the fault of a number. Every group has some of each kind."""
    kinds = (damage, refused_change, damage, full_disk, damage, refused_change, damage, two_writers)
    return kinds[(number + number // 8) % len(kinds)]


@pytest.mark.parametrize("group", sample(range(NUM_FAULTS // GROUP), k=1, seed=0))
def test_faults(tmp_path: Path, group: int) -> None:
    for number in range(GROUP * group, GROUP * (group + 1)):
        draw, fault = random.Random(f"fault {number}"), fault_of(number)
        try:
            fault(tmp_path / str(number), draw)
        except BaseException as error:
            error.add_note(f"fault {number}: {fault.__name__}")
            raise
        shutil.rmtree(tmp_path / str(number))
