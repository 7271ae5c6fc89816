"""Saving of runs: triggers, failures, saves in the background, mirrors and signals."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from checkpoint.simulated import assert_holds, blank, many_files, pieces, plain_plan, random_tables, some_specs
from meseta.checkpoint import Mirror, WriteRateLimiter, latest_complete, load, verify
from meseta.checkpoint.background import BackgroundSaver
from meseta.checkpoint.files.paths import checkpoint_path
from meseta.checkpoint.manifest import read_manifest
from meseta.checkpoint.store import directory
from meseta.checkpoint.store.directory import DirectoryStore
from meseta.comm import World
from meseta.config import CheckpointConfig
from meseta.spec import MesetaError
from meseta.system.interruption import SignalListener
from meseta.train import saving as train_saving
from meseta.train.saving import CheckpointManager
from small_run import final_checksum, settings, train


def saved_steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").iterdir())


def test_saves_by_minutes(tiny: Path, tmp_path: Path) -> None:
    """With few minutes every step is due, with many none is."""
    for name, minutes, expected in (("few", 1e-9, [1, 2, 3, 4, 5]), ("many", 60, [5])):
        changes = {"train__max_steps": 5, "checkpoint__every_minutes": minutes, "checkpoint__keep_last": 9}
        train(settings(tiny, tmp_path / name, **changes))
        assert saved_steps(tmp_path / name) == expected


def test_steps_minutes_signals_and_the_best(tmp_path: Path) -> None:
    config = CheckpointConfig(every_steps=4, keep_best=True)
    saver = CheckpointManager(config, tmp_path, World.single())
    assert [step for step in range(1, 10) if saver.is_due(step, is_best=step == 7)] == [4, 7, 8]
    assert saver.flags() == (0, 0, 0)
    for votes, due, stopping in (
        ((0.0, 2.0, 0.0), True, False),
        ((1.0, 0.0, 0.0), True, True),
        ((0.0, 0.0, 0.0), False, False),
    ):
        saver.apply_flag_sums(votes)
        assert (saver.is_due(3, is_best=False), saver.is_stopping) == (due, stopping)


def test_the_clock_of_rank_0_counts(tmp_path: Path) -> None:
    config = CheckpointConfig(every_minutes=1e-9)
    worlds = [World(rank=rank, size=2, device=World.single().device) for rank in (0, 1)]
    assert [CheckpointManager(config, tmp_path, world).flags() for world in worlds] == [(0, 1, 0), (0, 0, 0)]


def test_in_the_background_or_not_the_same_checkpoints(tiny: Path, tmp_path: Path) -> None:
    for background in ("always", "never"):
        changes = {"train__max_steps": 6, "checkpoint__every_steps": 1, "checkpoint__keep_last": 9}
        train(settings(tiny, tmp_path / background, checkpoint__background=background, **changes))
    folders = [tmp_path / background / "checkpoints" for background in ("always", "never")]
    assert saved_steps(tmp_path / "always") == saved_steps(tmp_path / "never") == [1, 2, 3, 4, 5, 6]
    for step in (1, 4, 6):
        sums = {verify(checkpoint_path(folder, step)) for folder in folders}
        assert len(sums) == 1


def fill_disk_at(steps: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk be full at the checkpoints of these steps."""
    original = DirectoryStore.commit

    def commit(self: DirectoryStore, growing: Path, manifest: dict, rate: WriteRateLimiter | None) -> Path:
        if int(growing.name.rpartition("-")[2]) in steps:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(self, growing, manifest, rate)

    monkeypatch.setattr(DirectoryStore, "commit", commit)


@pytest.fixture(scope="module")
def twelve_steps(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the checksum of a run that saves only at its end."""
    run_dir = tmp_path_factory.mktemp("roomy")
    train(settings(tiny, run_dir, train__max_steps=12))
    return final_checksum(run_dir)


@pytest.mark.parametrize("background", ["always", "never"])
def test_a_run_continues_after_a_failed_checkpoint(
    tiny: Path,
    twelve_steps: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    background: str,
) -> None:
    """The run reports failures, ends with the bits of a run with enough space, and leaves no partial checkpoint."""
    fill_disk_at({4, 6}, monkeypatch)
    changes = {"train__max_steps": 12, "checkpoint__every_steps": 2, "checkpoint__keep_last": 9}
    changes |= {"checkpoint__background": background, "checkpoint__on_failure": "continue"}
    capsys.readouterr()
    train(settings(tiny, tmp_path / "full", **changes))
    err = capsys.readouterr().err
    assert err.count("No space left on device") == 2 and "training continues (checkpoint.on_failure)" in err
    assert [path.name[-2:] for path in sorted((tmp_path / "full" / "checkpoints").iterdir())] == [
        "02",
        "08",
        "10",
        "12",
    ]
    assert final_checksum(tmp_path / "full") == twelve_steps


def test_the_last_checkpoint_ends_a_run_that_has_no_room_for_it(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk_at({6}, monkeypatch)
    changes = {"train__max_steps": 6, "checkpoint__every_steps": 4, "checkpoint__on_failure": "continue"}
    with pytest.raises(MesetaError, match="No space left on device"):
        train(settings(tiny, tmp_path, **changes))
    monkeypatch.undo()
    train(settings(tiny, tmp_path, **changes))
    assert saved_steps(tmp_path) == [4, 6]


def test_a_failed_save_in_the_background_ends_the_run(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The previous checkpoint stays."""
    fill_disk_at({4}, monkeypatch)
    changes = {"train__max_steps": 60, "checkpoint__every_steps": 2, "checkpoint__background": "always"}
    with pytest.raises(MesetaError, match="No space left on device"):
        train(settings(tiny, tmp_path, **changes))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000002"]


def test_training_continues_while_the_copy_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows change while the disk stalls. The checkpoint contains the rows of the call, and the next save waits for
    it."""
    specs = some_specs()
    plan, tables = plain_plan(specs, 1, "table_wise"), random_tables(specs, seed=4)
    shards, gate, order = pieces(specs, plan, 0, tables), threading.Event(), list[str]()
    original = directory.write_manifest

    def slow(root: Path, manifest: dict, rate: WriteRateLimiter | None) -> None:
        assert gate.wait(30)
        original(root, manifest, rate)

    monkeypatch.setattr(directory, "write_manifest", slow)
    background, dense = BackgroundSaver(World.single()), {"bias": torch.ones(3)}

    def start(step: int) -> None:
        background.start(
            tmp_path,
            step=step,
            plan=plan,
            shards=shards,
            dense=dense,
            state={},
            on_saved=lambda _: order.append(f"{step}"),
        )

    start(1)
    for piece in shards:
        piece.weight.zero_()
    dense["bias"].zero_()
    assert latest_complete(tmp_path) is None and not order
    gate.set()
    start(2)
    assert order[0] == "1"
    background.wait()
    assert order == ["1", "2"]
    back = blank(specs, plan, 0)
    assert load(tmp_path / "step-000000001", world=World.single(), shards=back).dense["bias"].tolist() == [1, 1, 1]
    assert_holds(back, tables)
    load(tmp_path / "step-000000002", world=World.single(), shards=back)
    assert all(not piece.weight.any() for piece in back)


def test_training_waits_for_saves_if_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = some_specs()
    plan = plain_plan(specs, 1, "table_wise")
    shards = pieces(specs, plan, 0, random_tables(specs, seed=4))
    needed = 2 * sum(shard.num_bytes() for shard in shards)
    for free, background, expected in ((needed, "auto", True), (needed - 1, "auto", False), (0, "always", True)):
        monkeypatch.setattr(train_saving, "_available_host_bytes", lambda free=free: float(free))
        saver = CheckpointManager(CheckpointConfig(background=background), tmp_path, World.single())
        assert saver._should_save_in_background(shards) == expected
        few = [torch.arange(0, piece.shard.num_rows, 2) for piece in shards]
        assert saver._should_save_in_background(shards, few) == (free >= needed // 2 or background == "always")


def test_a_run_continues_from_its_mirror(tiny: Path, tmp_path: Path) -> None:
    """The mirror holds the checkpoints of run_dir. An empty run_dir continues from it, with the bits of an
    uninterrupted run."""
    mirror = f"file://{tmp_path}/mirror"
    changes = {"checkpoint__every_steps": 2, "checkpoint__mirror": mirror}
    train(settings(tiny, tmp_path / "first", train__max_steps=5, **changes))
    assert [path.name for path in sorted((tmp_path / "mirror").iterdir())] == ["step-000000004", "step-000000005"]
    train(settings(tiny, tmp_path / "second", train__max_steps=8, **changes))
    train(settings(tiny, tmp_path / "whole", train__max_steps=8))
    assert final_checksum(tmp_path / "second") == final_checksum(tmp_path / "whole")
    assert {path.name for path in Mirror(mirror).checkpoints()} == {"step-000000006", "step-000000008"}
    assert run_id(tmp_path / "second", 8) == run_id(tmp_path / "first", 5) != run_id(tmp_path / "whole", 8)
    with pytest.raises(MesetaError, match=r"has checkpoints, but checkpoint\.resume is 'never'"):
        train(settings(tiny, tmp_path / "third", checkpoint__resume="never", **changes))


def test_a_mirror_of_another_run_is_refused_before_the_first_step(tiny: Path, tmp_path: Path) -> None:
    """The other run has the same data, config and seed."""
    mirror = {"checkpoint__mirror": f"file://{tmp_path}/mirror"}
    train(settings(tiny, tmp_path / "first", train__max_steps=5, **mirror))
    train(settings(tiny, tmp_path / "second", train__max_steps=4))
    ids = run_id(tmp_path / "first", 5), run_id(tmp_path / "second", 4)
    before = many_files(tmp_path)
    message = rf"{mirror['checkpoint__mirror']}' .* step 5 of run {ids[0]}, and this is run {ids[1]} at step 4; choose"
    with pytest.raises(MesetaError, match=message):
        train(settings(tiny, tmp_path / "second", train__max_steps=6, **mirror))
    assert many_files(tmp_path) == before


def run_id(run_dir: Path, step: int) -> str:
    return str(read_manifest(checkpoint_path(run_dir / "checkpoints", step))["state"]["run_id"])


def test_a_mirror_that_fails_once(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training continues with a note. The next checkpoint includes the files that the mirror lacks."""
    update, refused = Mirror.update, []

    def refuse_once(mirror: Mirror, folder: Path, names: list[str], run_id: str) -> list[str]:
        if not refused:
            refused.extend(names)
            raise MesetaError("checkpoint 'file://there' cannot be used (timeout); check the network")
        return update(mirror, folder, names, run_id)

    monkeypatch.setattr(Mirror, "update", refuse_once)
    mirror = f"file://{tmp_path}/mirror"
    train(settings(tiny, tmp_path / "run", train__max_steps=6, checkpoint__every_steps=2, checkpoint__mirror=mirror))
    assert refused == ["step-000000002"]
    err = capsys.readouterr().err
    assert err.count("(timeout)") == 1 and "training continues, and the next checkpoint tries again" in err
    assert {path.name for path in Mirror(mirror).checkpoints()} == {"step-000000004", "step-000000006"}


def test_a_mirror_that_keeps_failing_ends_the_run(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(mirror: Mirror, *args: object) -> None:
        raise MesetaError("checkpoint 'file://there' cannot be used (timeout); check the network")

    mirror = f"file://{tmp_path}/mirror"
    document = settings(tiny, tmp_path / "run", train__max_steps=6, checkpoint__mirror=mirror)
    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "update", refuse)
        with pytest.raises(MesetaError, match="timeout"):
            train(document)
    assert (tmp_path / "run/report.html").exists()
    train(document)
    assert {path.name for path in Mirror(mirror).checkpoints()} == {"step-000000006"}


def test_a_signal_is_noted_and_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with SignalListener() as interruption:
        for _ in range(2):  # the second signal follows so closely that it counts as the same
            os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 10
        while interruption.signal_number is None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert interruption.signal_number == signal.SIGTERM
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_signal_is_noted_before_the_next_step_however_late_its_thread_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def listen_late(self: SignalListener, reader: int) -> None:
        while os.read(reader, 1) != b"\0":
            pass
        os.close(reader)

    monkeypatch.setattr(SignalListener, "_listen", listen_late)
    with SignalListener() as interruption:
        signal.raise_signal(signal.SIGINT)
        assert interruption.signal_number == signal.SIGINT


def test_ignored_signals_stay_ignored_and_other_threads_set_no_handler() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with SignalListener():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    handlers = []

    def elsewhere() -> None:
        with SignalListener():
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGTERM)]
