"""Tests of checkpoints at a URL despite faults of network and store, and kills: they are visible only when complete,
and one run writes them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from checkpoint.object_saver import save_for_ever, save_step
from checkpoint.object_store import Proxy, keys_of, s3_server, uploads_of
from checkpoint.saver import load_version, tables_of
from checkpoint.simulated import assert_holds, random_plan, random_tables, some_specs
from checkpoint.test_deltas import POLICIES, Run, change, whole
from forked import killed_while_saving
from meseta.checkpoint import (
    Mirror,
    compact,
    compare,
    export,
    latest_complete,
    list_checkpoints,
    newest,
    prune,
    saving,
    verify,
)
from meseta.checkpoint.files import layout
from meseta.checkpoint.files.paths import checkpoint_path, parse_step
from meseta.checkpoint.manifest import file_entries, read_manifest
from meseta.checkpoint.store.store import make_store
from meseta.spec import MesetaError
from meseta.system import remote
from meseta.system.remote import RemotePath, to_location
from sampling import sample

SPECS = some_specs()
RATE = 0.03
"""Share of requests that meet a fault."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "BLOCK_BYTES", 16_384)
    monkeypatch.setattr(remote, "UPLOAD_PART_BYTES", 4096)
    monkeypatch.setattr(remote, "RETRY_DELAYS_S", (0.05, 0.1, 0.2, 0.4))
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="module")
def s3() -> Iterator[tuple[Proxy, Any]]:
    with s3_server() as started:
        yield started


@pytest.fixture
def bucket(s3: tuple[Proxy, Any], request: pytest.FixtureRequest) -> str:
    """Empty bucket behind a network without faults."""
    proxy, client = s3
    proxy.disturb(0, 0.0)
    name = f"bucket-{abs(hash(request.node.nodeid)):x}"
    client.create_bucket(Bucket=name)
    return name


@pytest.fixture
def memory() -> Iterator[str]:
    yield "memory://bucket/run"
    fsspec.filesystem("memory").store.clear()


def check_collected(client: Any, bucket: str) -> None:
    """Check that no upload is unfinished, and that every object is a manifest or named by one."""
    assert uploads_of(client, bucket) == []
    needed = {f"{path}/manifest.json" for path in make_store(f"s3://{bucket}/run").list_candidates()}
    for path in make_store(f"s3://{bucket}/run").list_candidates():
        needed |= {f"{path}/{entry}" for entry in files_named(path)}
    assert {f"s3://{bucket}/{key}" for key in keys_of(client, bucket)} == needed


def files_named(path: RemotePath) -> set[str]:
    return {entry["path"] for entry in file_entries(read_manifest(path))}


@pytest.mark.parametrize("seed", sample(range(100), k=1, seed=4))
def test_kill_9_while_saving_to_a_faulty_store(s3: tuple[Proxy, Any], bucket: str, seed: int) -> None:
    """Visible checkpoints are complete and not older than the last reported one. The next save leaves no other
    object."""
    proxy, client = s3
    url, delay_s = f"s3://{bucket}/run", random.Random(seed).uniform(0.0, 1.5)
    proxy.disturb(seed, RATE)
    waits = seed % 4 != 0
    saved = killed_while_saving(save_for_ever, (url, dict(os.environ)), delay_s, 0, wait_for_one=waits)
    proxy.disturb(seed, 0.0)
    path = latest_complete(url)
    assert path == newest(url) and (0 if path is None else parse_step(path)) >= saved
    for listed in list_checkpoints(url) if path is not None else ():
        assert listed.problem == ""
        version, shards = load_version(listed.path)
        assert_holds(shards, tables_of(version))
    save_step(url, 1 if path is None else parse_step(path) + 1)
    check_collected(client, bucket)


def test_repeated_faults(s3: tuple[Proxy, Any], bucket: str) -> None:
    """The save is made once despite delays, 503, and connections cut before and after the request."""
    proxy, client = s3
    proxy.requests_by_fault.clear()
    proxy.disturb(1, 0.1)
    save_step(f"s3://{bucket}/run", 1)
    path = checkpoint_path(to_location(f"s3://{bucket}/run"), 1)
    version, shards = load_version(path)
    proxy.disturb(1, 0.0)
    assert version == 1 and len(proxy.requests_by_fault) > 3
    assert_holds(shards, tables_of(1))
    save_step(f"s3://{bucket}/run", 2)
    check_collected(client, bucket)


def test_a_store_that_stays_away_is_named(s3: tuple[Proxy, Any], bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy, _ = s3
    save_step(f"s3://{bucket}/run", 1)
    monkeypatch.setattr(proxy, "next_fault", lambda: "unavailable")
    with pytest.raises(MesetaError, match=rf"checkpoint 's3://{bucket}/run.*' cannot be read .*; check the URL, the"):
        save_step(f"s3://{bucket}/run", 2)
    monkeypatch.undo()
    with pytest.raises(MesetaError, match=r"'s3://no-such-bucket/run.*' cannot be written .*; check the URL"):
        save_step("s3://no-such-bucket/run", 1)


def test_a_second_run_is_refused(s3: tuple[Proxy, Any], bucket: str) -> None:
    """A later run is refused, and a concurrent one, whose manifest gets 412."""
    _, client = s3
    url = f"s3://{bucket}/run"
    save_step(url, 1)
    before = {key: client.get_object(Bucket=bucket, Key=key)["ETag"] for key in keys_of(client, bucket)}
    with pytest.raises(
        MesetaError, match=r"step-000000001' was written by another run; stop that run, or choose another"
    ):
        save_step(url, 1)
    store, path = make_store(url), checkpoint_path(to_location(url), 1)
    with pytest.raises(MesetaError, match=r"step-000000001/manifest.json' was written by another run"):
        store.commit(path, {**read_manifest(path), "reader": "another"})
    assert before == {key: client.get_object(Bucket=bucket, Key=key)["ETag"] for key in keys_of(client, bucket)}


def test_files_that_vanish_before_the_commit_are_reported(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run may have removed them as leftovers."""
    really = saving.write_tensors

    def vanish(root: RemotePath, *args: Any) -> Any:
        next(root / name for name in root.files()).delete()
        return really(root, *args)

    monkeypatch.setattr(saving, "write_tensors", vanish)
    with pytest.raises(MesetaError, match=r"block-\d+.arrow' was written by another run"):
        save_step(memory, 1)
    assert newest(memory) is None
    monkeypatch.undo()
    save_step(memory, 1)
    assert verify(f"{memory}/step-000000001")


def test_the_same_bytes_as_in_a_directory(memory: str, tmp_path: Path) -> None:
    """The tools read them at the URL."""
    for parent in (memory, str(tmp_path / "here"), f"file://{tmp_path}/there"):
        save_step(parent, 1)
    path, here = f"{memory}/step-000000001", tmp_path / "here/step-000000001"
    files = {file.relative_to(here).as_posix(): file.read_bytes() for file in here.rglob("*") if file.is_file()}
    root = to_location(path)
    assert isinstance(root, RemotePath)
    assert {name: (root / name).read(0, 1 << 30) for name in root.files()} == files
    assert verify(path) == verify(here) == verify(tmp_path / "there/step-000000001")
    assert list(compare(path, here)) == []
    assert export(path, tmp_path / "out", "numpy")
    [listed] = list_checkpoints(memory)
    assert listed.summary is not None and listed.summary.saved_at_s > 1e9
    (root / "dense.safetensors").delete()
    assert latest_complete(memory) is None and newest(memory) == root
    assert "dense.safetensors' cannot be read" in list_checkpoints(memory)[0].problem


@pytest.mark.parametrize("policy", sample(POLICIES, k=2, seed=1))
def test_deltas_at_a_url(memory: str, tmp_path: Path, policy: str) -> None:
    """Each delta holds the content of a full checkpoint. No file that it needs is deleted, at the URL or the mirror,
    and fetching it includes files of older ones."""
    run, rng = Run(memory, policy, 3), random.Random(policy)  # type: ignore[arg-type]
    tables, changed = random_tables(SPECS, 1), {}
    mirrors = [Mirror(url) for url in ("memory://bucket/mirror", f"file://{tmp_path}/mirror")]
    for step in range(1, 6):
        plan = random_plan(SPECS, rng.choice([1, 2]), rng.randrange(1 << 30))
        path = run.save(step, plan, tables, changed)
        plain = whole(tmp_path / "whole", step, plan, tables)
        assert verify(path) == verify(plain)
        prune(memory, keep_last=1)
        assert [listed.problem for listed in list_checkpoints(memory)] == [""]
        for mirror in mirrors:
            mirror.put(path)
            mirror.delete_except([path.name])
            assert mirror.names() == [path.name]
        tables, changed = change(tables, step)
    made = compact(path, tmp_path / "compact")
    assert verify(made) == verify(plain)
    for mirror in mirrors:
        back = mirror.get(tmp_path / f"back-{mirrors.index(mirror)}")
        assert verify(back) == verify(plain)
        assert [listed.problem for listed in list_checkpoints(back.parent)] == [""]
    run.save(9, random_plan(SPECS, 1, 9), tables, changed)
    assert sorted(make_store(memory).list_candidates()) == [path, checkpoint_path(to_location(memory), 9)]
