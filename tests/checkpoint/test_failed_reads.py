"""Tests that a failed read causes no deletion, quarantine or choice of a checkpoint.

Every read of a run that saves, prunes, mirrors, compacts and resumes fails once, with each of three errors. The kept
checkpoints are compared with the bits of the run at each step.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import pytest

from checkpoint.running import SPECS, Run, holds, loads
from checkpoint.simulated import flip_middle, plain_plan
from failing_reads import ERRORS, Read, failing_reads, once
from meseta.checkpoint import compact, failures, fallback_checkpoint_error, newest, verify
from meseta.checkpoint.failures import DamagedCheckpoint
from meseta.checkpoint.files import layout
from meseta.checkpoint.files.paths import QUARANTINE_MARKER
from meseta.checkpoint.store.store import list_candidates, make_store
from meseta.spec import MesetaError
from meseta.system import remote
from meseta.system.remote import RemotePath, to_location
from sampling import product, sample

PLAN = plain_plan(SPECS, 1, "table_wise")
STRIDE = {"directory": 200, "url": 25}
"""Stride of the failing reads of one case, from the read that the case names."""
NUM_SEEDED = 200
MANIFEST_SHARE = 0.3
"""Share of manifest reads that fail in a seeded run."""


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A store sends each failed request once, so that the error is visible."""
    monkeypatch.setattr(layout, "BLOCK_BYTES", 16_384)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(remote, "RETRY_DELAYS_S", ())
    yield
    fsspec.filesystem("failing").store.clear()


@dataclass
class Scene:
    """A run, its checkpoint folder, a mirror, a folder of compacted checkpoints, and the printed lines."""

    run: Run
    folder: Any
    mirror: str
    made: Path
    lines: list[str] = field(default_factory=list)

    @property
    def roots(self) -> tuple[str, ...]:
        return (str(self.folder), self.mirror, str(self.made))

    def save(self, step: int) -> None:
        """Save a step, prune and mirror. A failed save adds a line."""
        self.run.train(step)
        errors = [error for error in self.run.save(step) if error is not None]
        assert all(isinstance(error, MesetaError) for error in errors), errors
        self.lines += map(str, errors)
        self.lines += self.run.savers[0].pop_warnings()

    def attempt(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except MesetaError as error:
            self.lines.append(str(error))
        return None


def scene(place: Path, where: str, *, saves: int = 0, **settings: Any) -> Scene:
    """Return a run at a directory with a mirror at a URL, or at a URL, with the saved steps."""
    folder: Any = place / "run" if where == "directory" else to_location(f"failing://bucket{place}/run")
    mirror = f"failing://bucket{place}/mirror" if where == "directory" else ""
    keys = {"deltas": "consecutive", "max_chain": 8, "keep_last": 1, **settings}
    run = Run(folder, PLAN, **keys, **({"mirror": mirror} if mirror else {}))
    made = Scene(run, folder, mirror or str(folder), place / "made")
    for step in range(1, saves + 1):
        made.save(step)
    assert made.lines == []
    return made


def check_kept(scene: Scene, *, spoiled: str = "") -> None:
    """Check that every checkpoint, mirrored or compacted ones included, verifies and has the bits of its step."""
    places = [scene.folder, *([scene.mirror] if scene.mirror else []), scene.made]
    for place in places:
        for path in list_candidates(to_location(str(place)) if "://" in str(place) else place):
            if path.name != spoiled:
                assert holds(loads(path, PLAN), scene.run.history) == int(path.name[-9:]), path
                verify(path)


# Actions during which reads fail. Each starts from its state in `START` and returns nothing.


def saving(scene: Scene) -> None:
    """Save a delta, which prunes the one before. The mirror follows."""
    scene.save(4)


def compacting(scene: Scene) -> None:
    scene.attempt(lambda: compact(scene.folder / "step-000000003", scene.made))


def resuming(scene: Scene) -> None:
    """Resume from the newest checkpoint in another process. A command that fails because of a read runs again."""

    def start() -> None:
        path = newest(scene.folder)
        assert path is not None and path.name == "step-000000003"
        scene.run.resume(path)

    scene.attempt(start)
    if scene.lines:
        start()


def fetching(scene: Scene) -> None:
    """Start from the mirror on a machine without checkpoints. A command that fails because of a read runs again."""
    if isinstance(scene.folder, RemotePath):
        return
    scene.folder = scene.folder.with_name("elsewhere")
    history = scene.run.history

    def start() -> None:
        scene.run = Run(scene.folder, PLAN, **scene.run.settings)
        scene.run.history = history
        scene.run.savers[0].fetch_from_mirror()
        path = newest(scene.folder)
        assert path is not None and path.name == "step-000000003"
        scene.run.resume(path)

    scene.attempt(start)
    if scene.lines:
        start()


def going_back(scene: Scene) -> None:
    """Go back from a damaged newest checkpoint. A failed read is repeated, and a command that fails because of a marker
    runs again."""

    def start() -> None:
        with failures.retry_reads():
            path = newest(scene.folder)
            assert path is not None
            if path.name == "step-000000003":
                [problem] = loads(path, PLAN)
                assert isinstance(problem, DamagedCheckpoint), problem
                offer = fallback_checkpoint_error(problem, path)
                assert [path.name for path in offer.unusable] == ["step-000000003"]
                for passed in offer.unusable:
                    make_store(scene.folder).quarantine(passed, offer.problem)
                assert offer.fallback is not None
                path = offer.fallback
            assert path.name == "step-000000002"
            scene.run.resume(path)

    scene.attempt(start)
    if scene.lines:
        start()


ACTIONS: dict[str, Callable[[Scene], None]] = {
    action.__name__: action for action in (saving, compacting, resuming, fetching, going_back)
}


def spoil(scene: Scene) -> None:
    """Change one bit of the newest checkpoint."""
    path = newest(scene.folder)
    assert path is not None and path.name == "step-000000003"
    file = path / "dense.safetensors"
    if isinstance(file, Path):
        flip_middle(file)
        return
    content = bytearray(file.read(0, file.num_bytes()))
    content[-3] ^= 1
    file.delete()
    file.create(bytes(content))


def begun(place: Path, where: str, action: str) -> Scene:
    keep_last = 3 if action in ("resuming", "going_back") else 1
    made = scene(place, where, saves=3, keep_last=keep_last)
    if action == "going_back":
        made.mirror = ""
        spoil(made)
    return made


def copied(start: Scene, place: Path, where: str) -> Scene:
    """Return a copy of a scene at another place."""
    copy = scene(place, where, **{key: value for key, value in start.run.settings.items() if key != "mirror"})
    if start.folder != copy.folder and isinstance(start.folder, Path):
        shutil.copytree(start.folder, copy.folder)
    store = fsspec.filesystem("failing").store
    origin = str(start.folder if where == "url" else start.folder.parent).removeprefix("failing://bucket")
    target = str(copy.folder if where == "url" else copy.folder.parent).removeprefix("failing://bucket")
    for name in [name for name in store if name.startswith(f"/bucket{origin}/")]:
        fsspec.filesystem("failing").pipe_file(name.replace(origin, target, 1), store[name].getvalue())
    copy.run.history = dict(start.run.history)
    copy.mirror = start.mirror and copy.mirror
    resumed = start.run.savers[0].saved_step
    if not start.mirror:  # its newest is damaged
        resumed -= 1
    copy.run.resume(copy.folder / f"step-{resumed:09d}")
    return copy


CASES = [
    case
    for where, stride in STRIDE.items()
    for case in product(action=ACTIONS, where=(where,), first=range(stride))
    if where == "directory" or case["action"] != "fetching"
]


@pytest.mark.parametrize("case", sample(CASES, k=1, seed=2))
def test_each_read_fails_once(tmp_path: Path, case: dict[str, Any]) -> None:
    where, action = case["where"], ACTIONS[case["action"]]
    start = begun(tmp_path / "start", where, case["action"])
    number, count = case["first"], 1 << 62
    while number < count:
        for error in ERRORS:
            tried = copied(start, tmp_path / f"{number}-{error}", where)
            with failing_reads(*tried.roots, choose=once(number, error)) as reads:
                action(tried)
            note = f"read {number}, {os.strerror(error)}: {reads[number] if number < len(reads) else None}"
            try:
                check_lines(tried)
                check_kept(tried)
                check_next_save(tried)
            except BaseException as problem:
                problem.add_note(note)
                raise
            shutil.rmtree(tmp_path / f"{number}-{error}", ignore_errors=True)
            if number >= len(reads):
                count = len(reads)
                break
        number += STRIDE[where]


def test_a_listing_after_a_copy_fails(tmp_path: Path) -> None:
    """The mirror has the checkpoint, and the next save uses it."""
    start = begun(tmp_path / "start", "directory", "saving")
    tried = copied(start, tmp_path / "whole", "directory")
    with failing_reads(*tried.roots) as reads:
        saving(tried)
    numbers = [read.number for read in reads if read.kind == "ls" and read.path.endswith("/mirror/step-000000004")]
    assert len(numbers) > 1
    for number in numbers[-3:]:
        tried = copied(start, tmp_path / str(number), "directory")
        with failing_reads(*tried.roots, choose=once(number, errno.EIO)):
            saving(tried)
        assert len(tried.lines) == 1
        check_next_save(tried)
        check_kept(tried)


def check_next_save(scene: Scene) -> None:
    """Check that the next save prints nothing, is complete, and prunes leftovers."""
    scene.lines.clear()
    scene.save(7)
    assert scene.lines == []
    kept = list_candidates(scene.folder)
    assert len(kept) <= scene.run.settings["keep_last"] and kept[-1].name == "step-000000007"
    verify(kept[-1])


def check_lines(scene: Scene) -> None:
    """Check that each printed line is one line, and names a file of the run."""
    for line in scene.lines:
        assert line.isprintable() and any(root and root in line for root in scene.roots), line


def test_the_injector_sees_all_kinds_of_reads(tmp_path: Path) -> None:
    """The reads open, read, stat and list directories and URLs."""
    kinds = set()
    for where in ("directory", "url"):
        tried = begun(tmp_path / where, where, "resuming")
        with failing_reads(*tried.roots) as reads:
            resuming(tried)
            compacting(tried)
        kinds |= {read.kind for read in reads}
    assert kinds >= {"open", "file.read", "preadv", "stat", "lstat", "fstat", "listdir", "scandir"}
    assert kinds >= {"ls", "info", "cat_file"}


@pytest.mark.parametrize("seed", sample(range(NUM_SEEDED), k=1, seed=3))
def test_many_manifest_reads_fail(tmp_path: Path, seed: int) -> None:
    """30 % of all reads of manifests fail in a run of six saves that is resumed once."""
    draw = random.Random(f"manifests {seed}")
    policy = draw.choice(("consecutive", "consecutive", "one_shot", "rolling", "intermittent"))
    settings = {"deltas": policy, "max_chain": draw.choice([3, 8]), "keep_last": draw.choice([1, 1, 2])}
    tried = scene(tmp_path, draw.choice(("directory", "url")), **settings)

    def choose(read: Read) -> int | None:
        fails = read.path.endswith("/manifest.json") and draw.random() < MANIFEST_SHARE
        return draw.choice(ERRORS) if fails else None

    for step in range(1, 7):
        with failing_reads(*tried.roots, choose=choose):
            tried.save(step)
        check_lines(tried)
        check_kept(tried)
        if step == 4:
            with (
                failures.retry_reads() if draw.random() < 0.5 else nullcontext(),
                failing_reads(*tried.roots, choose=choose),
            ):
                path = tried.attempt(lambda: newest(tried.folder))
                if path is not None:
                    tried.attempt(lambda path=path: tried.run.resume(path))  # type: ignore[misc]
            check_kept(tried)
            path = newest(tried.folder)
            assert path is not None
            tried.run.resume(path)
    check_next_save(tried)
    check_kept(tried)


@pytest.mark.parametrize("error", sample(ERRORS, k=1, seed=1))
def test_pruning_keeps_what_the_newest_needs(tmp_path: Path, error: int) -> None:
    """The newest checkpoint ends a chain of 8. Its manifest is read twice during pruning, and the second read fails."""
    tried = scene(tmp_path, "directory", saves=7)
    manifest, opened = f"{tried.folder}/step-000000008/manifest.json", [0]

    def choose(read: Read) -> int | None:
        if read.path != manifest or read.kind != "open":
            return None
        opened[0] += 1
        return error if opened[0] == 2 else None

    with failing_reads(tried.folder, choose=choose):
        tried.save(8)
    assert opened[0] >= 2
    [line] = tried.lines
    assert line == (
        f"checkpoint file '{manifest}' cannot be read ({os.strerror(error)}); run the command again when it can "
        "be read; no checkpoint is deleted for now, and the next save tries again"
    )
    assert [path.name[-1] for path in list_candidates(tried.folder)] == ["7", "8"]
    check_kept(tried)
    tried.save(9)
    assert [path.name[-1] for path in list_candidates(tried.folder)] == ["9"]


def test_a_read_that_keeps_failing_ends_going_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error appears after the timeout, and names the file and the manual remedy."""
    monkeypatch.setattr(failures, "READ_RETRY_WINDOW_S", 0.3)
    tried = begun(tmp_path, "directory", "going_back")
    manifest = f"{tried.folder}/step-000000002/manifest.json"

    def choose(read: Read) -> int | None:
        return errno.EIO if read.path == manifest and read.kind == "open" else None

    with failing_reads(tried.folder, choose=choose) as reads, failures.retry_reads():
        [problem] = loads(tried.folder / "step-000000003", PLAN)
        assert isinstance(problem, DamagedCheckpoint)
        with pytest.raises(MesetaError) as raised:
            fallback_checkpoint_error(problem, tried.folder / "step-000000003")
    assert len([read for read in reads if read.path == manifest and read.kind == "open"]) >= 3
    aside = f"{tried.folder}/step-000000002"
    assert str(raised.value) == (
        f"{problem}; search for an older one failed: checkpoint file '{manifest}' cannot be read (Input/output "
        f"error); run the command again when it can be read (tried for 0.3 s), or set the "
        f"checkpoint aside with `mv {aside} {aside}.unread`, "
        "to resume from an older one"
    )
    assert not list(tried.folder.rglob(QUARANTINE_MARKER))
    os.rename(aside, f"{aside}.unread")
    offer = fallback_checkpoint_error(problem, tried.folder / "step-000000003")
    assert offer.fallback is not None and offer.fallback.name == "step-000000001"
