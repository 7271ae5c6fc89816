"""Calls without the token, and mutated ones with it: none changes a row, ends a training, or costs much."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyarrow import flight

from cli.processes import Command, fact_of
from cli.test_listening import listening_inodes, open_inodes
from data.service.attackers import BEAT, Attack, Outcome, attack
from data.service.test_refusals import ticket_of
from data.service.tier import Tier, digest, running
from data.test_reader import make_dataset
from forked import forking
from meseta.data import Dataset, Reader, ReaderOptions
from meseta.data.read.decode import SplitFiles
from meseta.data.service.client.reader import ServedReader
from meseta.system.remote import is_loopback, parse_address
from small_run import final_checksum, settings, train, write_config

OPTIONS = ReaderOptions(batch_size=50, shuffle=True, window_rows=100)
MAX_PROCESSOR_S = 2.0 if os.environ.get("MESETA_SOAK") else 0.5
"""Processor time of a request. `make soak` also checks the types of every call, which takes several times as long."""
NUMS = [25, pytest.param(1000, marks=pytest.mark.soak)]
ATTACKERS = [
    pytest.param(
        True, id="nobody", marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
    ),
    pytest.param(False, id="same_user_without_token"),
]
UNAUTHENTICATED = {"FlightUnauthenticatedError"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("untrusted") / "data", multi_valued=True)


@pytest.fixture
def tier(data: Dataset) -> Iterator[Tier]:
    with running({"click": data.dir}, 1) as tier:
        yield tier


def attack_of(tier: Tier, **changes: Any) -> Attack:
    urls = {"dispatcher": tier.dispatcher.url, "reader": tier.readers[0].url, "pids": (os.getpid(),)}
    return Attack(**{"beat": BEAT, "ticket": ticket_of(tier), "seed": 0, "is_nobody": False, **urls, **changes})


def outcome_of(spec: Attack) -> Outcome:
    """Run an attack in a separate process."""
    context = forking()
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=attack, args=(spec, there))
    process.start()
    there.close()
    outcome: Outcome = here.recv()
    process.join()
    return outcome


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num", NUMS)
@pytest.mark.parametrize("is_nobody", ATTACKERS)
def test_calls_without_the_token(tier: Tier, is_nobody: bool, num: int) -> None:
    before = tier.leases.readers()
    outcome = outcome_of(attack_of(tier, num=num, is_nobody=is_nobody))
    assert set(outcome.errors) == UNAUTHENTICATED and outcome.errors.total() == 4 * num
    assert outcome.max_processor_s < MAX_PROCESSOR_S, outcome.costliest
    assert [reader.reader for reader in tier.leases.readers()] == [reader.reader for reader in before]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num", NUMS)
def test_mutated_calls_with_the_token(tier: Tier, num: int) -> None:
    """They are answered, or refused in one line; readers that are no addresses of this machine do not get in."""
    token = tier.dispatcher.credentials.current_token().decode()
    outcome = outcome_of(attack_of(tier, num=num, token=token))
    assert set(outcome.errors) <= {"answered", "FlightServerError"}, outcome
    assert all(text.isprintable() and "Traceback" not in text for text in outcome.texts), outcome.texts
    assert outcome.max_processor_s < MAX_PROCESSOR_S, outcome.costliest
    assert all(is_loopback(parse_address(reader.reader)[0]) for reader in tier.leases.readers())


@pytest.mark.parametrize("is_nobody", ATTACKERS)
def test_rows_under_attack(tier: Tier, data: Dataset, is_nobody: bool) -> None:
    expected = list(map(digest, Reader(data, "train", OPTIONS).epochs(2)))
    with ThreadPoolExecutor(1) as pool:
        attacked = pool.submit(outcome_of, attack_of(tier, num=10, is_nobody=is_nobody))
        was_ended = False
        while not was_ended:
            was_ended = attacked.done()
            assert list(map(digest, ServedReader(tier.service, "train", OPTIONS).epochs(2))) == expected
        assert set(attacked.result().errors) == UNAUTHENTICATED


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("is_nobody", ATTACKERS)
def test_a_training_under_attack(tier: Tier, tiny: Path, tmp_path: Path, is_nobody: bool) -> None:
    """The training ends with the weights of one that is not attacked, and its output has no secrets."""
    common = {"train__epochs": 300, "checkpoint__every_steps": 2000}
    config = write_config(tmp_path / "c.yaml", settings(tiny, tmp_path / "run", **common))
    command = Command(tmp_path / "log", "train", config, "--readers", 2)
    command.until(lambda: "step 8/" in command.err.read_text(), "step 8")
    dispatcher, reader = urls_of(command)
    pids = tuple(command.readers())
    seen = [fact_of(pid, name) for pid in (*pids, command.pid) for name in ("cmdline", "environ")]
    assert all(seen) and not any("Bearer" in text or "token=" in text for text in seen)
    urls = {"dispatcher": dispatcher, "reader": reader, "pids": ()}
    seed = 0
    while command.process.exitcode is None or seed < 4:  # calls after its end are not answered
        outcome = outcome_of(attack_of(tier, num=250, seed=seed, is_nobody=is_nobody, **urls))
        # A call that is open when the server ends is cancelled.
        allowed = {*UNAUTHENTICATED, "FlightUnavailableError", "FlightCancelledError"}
        assert set(outcome.errors) <= allowed, outcome.errors
        assert seed or outcome.errors["FlightUnauthenticatedError"]
        seed += 1
    command.succeed()
    train(settings(tiny, tmp_path / "local", **common))
    assert final_checksum(tmp_path / "run") == final_checksum(tmp_path / "local")


def urls_of(command: Command) -> tuple[str, str]:
    """Addresses of the dispatcher and of a reader of `meseta train --readers N`."""
    heard = listening_inodes()
    for pid in command.readers():
        words = fact_of(pid, "cmdline").split("\0")
        if "--dispatcher" in words:
            [port] = [heard[inode].split()[-1] for inode in open_inodes(pid) if inode in heard]
            return words[words.index("--dispatcher") + 1], f"grpc://127.0.0.1:{port}"
    raise AssertionError("there is no reader")


def test_work_ends_with_its_caller(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline that passes ends decoding and counting after the row groups in hand."""
    read, num_read = SplitFiles._read_columns, []

    def slowly(*arguments: Any) -> Any:
        num_read.append(arguments)
        time.sleep(0.1)
        return read(*arguments)

    header = tier.dispatcher.credentials.header_value().encode()
    options = flight.FlightCallOptions(timeout=0.25, headers=[(b"authorization", header)])
    ticket, windows = ticket_of(tier), tier.readers[0]._reader.windows
    ticket["session"]["rows"]["window_rows"] = 10_000
    monkeypatch.setattr(SplitFiles, "_read_columns", slowly)
    with flight.connect(tier.readers[0].url) as client, pytest.raises(flight.FlightTimedOutError):
        list(client.do_get(flight.Ticket(json.dumps(ticket).encode()), options))
    rows = ticket["session"]["rows"] | {"filter": "d0 > 0"}
    with flight.connect(tier.dispatcher.url) as client, pytest.raises(flight.FlightTimedOutError):
        list(client.do_action(flight.Action("count", json.dumps({"rows": rows}).encode()), options))
    time.sleep(0.3)
    num = len(num_read)
    time.sleep(0.4)
    assert len(num_read) == num and windows.num_decoded == windows.num_buffered == 0
