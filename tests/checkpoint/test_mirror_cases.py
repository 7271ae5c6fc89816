"""Tests of a mirror in any state: after the next save all its checkpoints verify, or the run was refused."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoint.object_store import keys_of, s3_server
from checkpoint.running import SPECS, Run
from checkpoint.simulated import random_plan
from meseta.checkpoint import Mirror, fetch, list_checkpoints, summarize, verify
from meseta.checkpoint.files import layout
from meseta.checkpoint.manifest import RUN_ID, file_entries, read_manifest
from meseta.checkpoint.store import contents
from meseta.checkpoint.store.contents import checkpoints_without_links
from meseta.checkpoint.store.store import make_store
from meseta.spec import MesetaError
from sampling import product, sample

POLICIES = ("none", "one_shot", "consecutive", "intermittent", "rolling")
REFUSED = ("another_run_same_seed", "another_run_other_seed", "another_run_later", "another_run_older_version")
STATES = (
    "empty",
    "same",
    "older",
    "newer",
    "half_deleted",
    "manifests_deleted",
    "truncated",
    "manifests_truncated",
    "older_version",
    *REFUSED,
)


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "BLOCK_BYTES", 65_536)
    monkeypatch.setattr(os, "fsync", lambda _: None)


class Place:
    """Folder, or bucket of an S3 server, as a map from names to contents."""

    def __init__(self, url: str, client: Any = None) -> None:
        self.url, self._client = url, client
        self._bucket = url.removeprefix("s3://").partition("/")[0]
        self._root = Path(url.removeprefix("file://"))

    def read(self) -> dict[str, bytes]:
        if self._client is None:
            return {p.relative_to(self._root).as_posix(): p.read_bytes() for p in self._root.rglob("*") if p.is_file()}
        keys = sorted(keys_of(self._client, self._bucket))
        return {key[4:]: self._client.get_object(Bucket=self._bucket, Key=key)["Body"].read() for key in keys}

    def write(self, files: dict[str, bytes]) -> None:
        """Replace all files by these."""
        if self._client is None:
            shutil.rmtree(self._root, ignore_errors=True)
            for name, content in files.items():
                (self._root / name).parent.mkdir(parents=True, exist_ok=True)
                (self._root / name).write_bytes(content)
            return
        for key in keys_of(self._client, self._bucket):
            self._client.delete_object(Bucket=self._bucket, Key=key)
        for name, content in files.items():
            self._client.put_object(Bucket=self._bucket, Key=f"run/{name}", Body=content)


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    with s3_server() as (_, client):
        os.environ["AWS_ENDPOINT_URL"] = client.meta.endpoint_url  # direct access to the server, without faults
        yield client


@pytest.fixture
def place_of(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Place]:
    def make(kind: str) -> Place:
        if kind == "file":
            return Place(f"file://{tmp_path}/there")
        client = request.getfixturevalue("s3")
        name = f"bucket-{abs(hash(request.node.nodeid)):x}"
        client.create_bucket(Bucket=name)
        return Place(f"s3://{name}/run", client)

    return make


def begin(folder: Path, place: Place, policy: str, seed: int) -> Run:
    plan = random_plan(SPECS, 1, seed)
    return Run(folder / "checkpoints", plan, seed, deltas=policy, max_chain=3, keep_last=2, mirror=place.url)


def save(run: Run, steps: range) -> None:
    for step in steps:
        run.train(step)
        assert run.save(step) == [None]


def resume(run: Run, step: int) -> None:
    """Resume the run in another process."""
    run.resume(run.folder / f"step-{step:09d}")
    run.savers[0].resume_from(resumed(run, step))


def resumed(run: Run, step: int) -> dict[str, Any]:
    """Return part of the result of `restore` for a checkpoint."""
    state = read_manifest(run.folder / f"step-{step:09d}")["state"]
    return {"step": step, "restores": 0, RUN_ID: state[RUN_ID]}


def bring_about(state: str, run: Run, place: Place, tmp_path: Path, policy: str, seed: int) -> None:
    """Run to step 5, and bring the mirror into a state."""
    draw = random.Random(f"{state} {policy} {seed}")
    save(run, range(1, 4))
    before = place.read()
    if state == "newer":
        shutil.copytree(run.folder, tmp_path / "older")
    save(run, range(4, 6))
    assert run.savers[0].pop_warnings() == []
    files = place.read()
    if state == "empty":
        place.write({})
    elif state == "older":
        place.write(before)
    elif state == "newer":
        shutil.rmtree(run.folder)
        (tmp_path / "older").rename(run.folder)
        resume(run, 3)
    elif state == "half_deleted":
        place.write({name: files[name] for name in draw.sample(sorted(files), len(files) // 2)})
    elif state == "truncated":
        for name in draw.sample(sorted(files), len(files) // 2):
            files[name] = files[name][: draw.randrange(len(files[name]))]
        place.write(files)
    elif state == "manifests_deleted":
        place.write({name: content for name, content in files.items() if not name.endswith(".json")})
    elif state == "manifests_truncated":
        place.write({name: content[:99] if name.endswith(".json") else content for name, content in files.items()})
    elif state in REFUSED:
        place.write({})
        other = begin(tmp_path / "other", place, policy, seed + (state == "another_run_other_seed"))
        save(other, range(1, 9 if state == "another_run_later" else 6))
        if state == "another_run_older_version":
            other.train(77)
            save(other, range(6, 7))


def check_whole(place: Place, run: Run, step: int) -> None:
    """Check that every mirrored checkpoint verifies, and that the newest is that of the run and can be fetched."""
    paths = list(checkpoints_without_links(make_store(place.url)))
    assert paths and paths[-1].name == f"step-{step:09d}"
    for path in paths:
        assert verify(path) == verify(run.folder / path.name)
    assert [listed.problem for listed in list_checkpoints(place.url)] == [""] * len(paths)
    back = fetch(place.url, run.folder.parent / "back")
    assert verify(back) == verify(run.folder / paths[-1].name)


AT_FILE, AT_S3 = (product(state=STATES, policy=POLICIES, kind=[kind], seed=range(2)) for kind in ("file", "s3"))


@pytest.mark.parametrize("case", [*sample(AT_FILE, 4, seed=3), *sample(AT_S3, 1, seed=5)])
def test_after_the_next_save(
    tmp_path: Path, place_of: Callable[[str], Place], monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]
) -> None:
    state, policy, seed = case["state"], case["policy"], case["seed"]
    place = place_of(case["kind"])
    run = begin(tmp_path, place, policy, seed)
    bring_about(state, run, place, tmp_path, policy, seed)
    if "older_version" in state:
        monkeypatch.setattr(contents, "get_run_id", lambda manifest: None)
    before = place.read()
    step = 4 if state == "newer" else 6
    save(run, range(step, step + 1))
    saver = run.savers[0]
    if state in REFUSED:
        newest = {"another_run_later": 8, "another_run_older_version": 6}.get(state, 5)
        refusal = (
            rf"checkpoint.mirror '{place.url}' holds checkpoints of another run: the newest there is step {newest} "
        )
        refusal += r"of (run [0-9a-f]{32}|a run without an id), and this is run [0-9a-f]{32} at step 6; choose another"
        assert place.read() == before
        with pytest.raises(MesetaError, match=refusal):
            saver.sync_mirror()
        with pytest.raises(MesetaError, match=refusal):
            saver.resume_from(resumed(run, 6))
        assert place.read() == before
        return
    saver.sync_mirror()
    check_whole(place, run, step)


def test_blocks_of_equal_size_are_distinguished(tmp_path: Path) -> None:
    """The base of another run, or a changed base, does not count as base of a delta."""
    place = Place(f"file://{tmp_path}/there")
    run = begin(tmp_path, place, "consecutive", 1)
    save(run, range(1, 2))
    base = place.read()
    place.write({})
    other = begin(tmp_path / "other", place, "consecutive", 2)
    save(other, range(1, 2))
    of_other = place.read()
    assert {name: len(content) for name, content in of_other.items() if name.endswith(".arrow")} == {
        name: len(content) for name, content in base.items() if name.endswith(".arrow")
    }
    save(run, range(2, 3))
    mirror = Mirror(place.url)
    mirror.put(run.folder / "step-000000002")
    assert verify(Path(f"{tmp_path}/there/step-000000002")) == verify(run.folder / "step-000000002")


def flipped(content: bytes) -> bytes:
    return content[: len(content) // 2] + bytes([content[len(content) // 2] ^ 1]) + content[len(content) // 2 + 1 :]


CHANGED_AT_FILE, CHANGED_AT_S3 = (product(policy=POLICIES, kind=[kind], seed=range(4)) for kind in ("file", "s3"))


@pytest.mark.parametrize("case", [*sample(CHANGED_AT_FILE, 1, seed=1), *sample(CHANGED_AT_S3, 0, seed=1)])
def test_a_changed_byte_is_found(tmp_path: Path, place_of: Callable[[str], Place], case: dict[str, Any]) -> None:
    """The change is detected within the number of saves in docs/checkpoints.md, even if the run is resumed
    meanwhile."""
    place, draw = place_of(case["kind"]), random.Random(str(case))
    run = begin(tmp_path, place, case["policy"], case["seed"])
    step = draw.randrange(3, 8)
    save(run, range(1, step))
    for _ in range(3):
        files = {name: content for name, content in place.read().items() if not name.endswith(".json")}
        name = draw.choice(sorted(files))
        files_then = place.read()
        place.write({**files_then, name: flipped(files_then[name])})
        total_bytes, least_bytes, num_saves = sum(map(len, files.values())), 1 << 60, 0
        while True:
            save(run, range(step, step + 1))
            path = run.folder / f"step-{step:09d}"
            least_bytes = min(least_bytes, summarize(path).own_bytes)
            step, num_saves = step + 1, num_saves + 1
            there = place.read()
            if name not in there or there[name] == files_then[name]:
                break
            assert num_saves < -(-total_bytes // least_bytes), (name, num_saves)
            if draw.random() < 0.5:
                resume(run, step - 1)
        for path in checkpoints_without_links(make_store(place.url)):
            verify(path)


def test_damage_of_both_copies_is_reported(tmp_path: Path) -> None:
    """A copy that has changed is left alone if the original has changed too."""
    place = Place(f"file://{tmp_path}/there")
    run = begin(tmp_path, place, "one_shot", 1)
    save(run, range(1, 3))
    entries = file_entries(read_manifest(run.folder / "step-000000002"))
    name = next(entry["path"].removeprefix("../") for entry in entries if entry["path"].startswith("../"))
    here, there = run.folder / name, tmp_path / "there" / name
    here.write_bytes(flipped(here.read_bytes()))
    there.write_bytes(there.read_bytes()[:-1] + b"?")
    before, notes = there.read_bytes(), list[str]()
    for step in range(3, 12):
        save(run, range(step, step + 1))
        notes += run.savers[0].pop_warnings()
        if notes:
            break
    assert len(notes) == 1 and f"{str(here)!r} must have the checksum" in notes[0]
    assert there.read_bytes() == before


def test_a_damaged_original_is_not_sent(tmp_path: Path) -> None:
    """The other checkpoints are sent, and none is deleted."""
    place = Place(f"file://{tmp_path}/there")
    run = begin(tmp_path, place, "none", 1)
    save(run, range(1, 3))
    place.write({})
    here = next((run.folder / "step-000000002").rglob("*.arrow"))
    here.write_bytes(flipped(here.read_bytes()))
    save(run, range(3, 4))
    with pytest.raises(MesetaError, match=f"{here}' must have the checksum"):
        run.savers[0].sync_mirror()
    assert Mirror(place.url).names() == ["step-000000003"]
    save(run, range(4, 5))
    run.savers[0].sync_mirror()
    check_whole(place, run, 4)
