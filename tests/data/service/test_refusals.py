"""Tests of requests that dispatchers, readers and trainers refuse in one line. Untrusted input is checked first."""

from __future__ import annotations

import json
import os
import random
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import flight

from cli.processes import Command
from data.service.attackers import ADDRESSES_ELSEWHERE, BEAT, ODD_ADDRESSES
from data.service.spoiled import spoiled
from data.service.tier import Tier, running
from data.test_reader import NUM_ROWS, make_dataset
from meseta.data import Dataset, Reader, ReaderOptions
from meseta.data.read.rows import Rows
from meseta.data.service.client.reader import ReaderServiceAddress, RunAttempt, ServedReader
from meseta.data.service.connection import UnreachableError, to_flight_error
from meseta.data.service.dispatcher_client import DispatcherClient
from meseta.data.service.messages import (
    MAX_REPLY_BYTES,
    DatasetDescription,
    ErrorStatus,
    Heartbeat,
    RowOrder,
    Session,
    WindowTicket,
)
from meseta.data.service.record_batches import ReceivedRows, record_batch_schema, to_record_batch
from meseta.data.service.server.endpoint_server import Endpoint
from meseta.errors import StorageError
from meseta.spec import MesetaError
from meseta.system.remote import parse_address, validate_address
from sampling import sample

OPTIONS = ReaderOptions(batch_size=50, shuffle=True, window_rows=100)
NUM_MALFORMED, GROUP = 100_000, 1000


@pytest.fixture(scope="module")
def jagged(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("refusals") / "data", multi_valued=True)


@pytest.fixture(scope="module")
def tier(jagged: Dataset) -> Iterator[Tier]:
    with running({"click": jagged.dir, "again": jagged.dir}, 1) as tier:
        yield tier


@pytest.mark.parametrize(
    ("listen", "why"),
    [
        ("0.0.0.0:7077", "must be 127.0.0.1"),
        ("192.168.1.7:7077", "must be 127.0.0.1"),
        ("example.org:1", "must be 127.0.0.1"),
        ("127.0.0.1", "HOST:PORT"),
        ("127.0.0.1:70777", "HOST:PORT"),
        ("127.0.0.1:-1", "HOST:PORT"),
        ("", "HOST:PORT"),
    ],
)
def test_nothing_but_this_machine_is_listened_on(listen: str, why: str) -> None:
    with pytest.raises(MesetaError, match=why):
        Endpoint.from_options(listen)
    assert Endpoint.from_options("localhost:80") == Endpoint(port=80)
    with pytest.raises(MesetaError, match=r"without keys an address must be on this machine"):
        Endpoint.from_options("127.0.0.1:7077", "host7")


@pytest.mark.parametrize(
    "url", ["127.0.0.1:1", "grpc://host", "http://a:1", "grpc://a:x", "grpc://a..b:1", "grpc://-a:1", *ODD_ADDRESSES]
)
def test_addresses(url: str) -> None:
    with pytest.raises(MesetaError, match="grpc://HOST:PORT") as refused:
        validate_address(url)
    assert str(refused.value).isprintable()


@given(st.text(max_size=40) | st.from_regex(r"grpc(\+tls)?://[^/]{1,30}:[0-9]{1,5}\s?", fullmatch=True))
def test_an_address_has_no_control_characters(url: str) -> None:
    try:
        host, port = parse_address(url)
    except MesetaError:
        return
    assert url.isascii() and url.isprintable() and " " not in url and 0 < port < 65536
    scheme, _, rest = url.partition("://")
    assert scheme in ("grpc", "grpc+tls")
    assert rest.rpartition(":")[0] in (host, f"[{host}]") and int(rest.rpartition(":")[2]) == port


@pytest.mark.parametrize("url", ADDRESSES_ELSEWHERE)
def test_without_keys_readers_are_on_this_machine(tier: Tier, url: str) -> None:
    before = tier.leases.readers()
    with pytest.raises(MesetaError, match=re.escape(f"readers: {url!r}: ")):
        DispatcherClient(tier.dispatcher.url).send_heartbeat(Heartbeat(**BEAT | {"reader": url}))
    assert [reader.reader for reader in tier.leases.readers()] == [reader.reader for reader in before]


def test_the_remedy_of_an_error_crosses_the_network(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older version sends the text alone. Storage that fails is another kind of error: another reader may do
    better."""
    text = "it is damaged; 'ü' is odd"
    older = flight.FlightServerError(text, extra_info=text.encode())
    cases: list[tuple[Exception, type[MesetaError], str, str | None]] = [
        (MesetaError(text, remedy="fetch it; or leave it out"), MesetaError, text, "fetch it; or leave it out"),
        (MesetaError(text), MesetaError, text, None),
        (ValueError(text), MesetaError, text, None),
        (older, MesetaError, text, None),
        (MesetaError("€" * 5000, remedy="ü" * 5000), MesetaError, "€" * 1023 + "...", "ü" * 510 + "..."),
        (StorageError(text, remedy="try again"), UnreachableError, f"failed: {text}; try again", None),
    ]
    monkeypatch.setattr(
        "meseta.data.service.server.dispatch_server.to_flight_error", lambda e: e if e is older else to_flight_error(e)
    )
    for error, kind, reason, remedy in cases:

        def refuse(*_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(tier.dispatcher, "_handle", refuse)
        with pytest.raises(MesetaError) as caught:
            DispatcherClient(tier.dispatcher.url, tier.dispatcher.credentials).describe("click")
        received_error = caught.value
        sign = " " if kind is UnreachableError else ": "
        assert (type(received_error), received_error.remedy) == (kind, remedy), error
        assert received_error.reason == f"dispatcher {tier.dispatcher.url}{sign}{reason}", error


def test_a_dispatcher_that_is_not_there() -> None:
    began_s = time.monotonic()
    with pytest.raises(UnreachableError, match=r"dispatcher grpc://127.0.0.1:9 cannot be reached"):
        ServedReader(ReaderServiceAddress(url="grpc://127.0.0.1:9"), "train", OPTIONS)
    assert time.monotonic() - began_s < 15


def test_datasets_and_splits_that_there_are_not(tier: Tier) -> None:
    def reader(name: str | None, split: str = "train", **options: Any) -> ServedReader:
        return ServedReader(ReaderServiceAddress(url=tier.dispatcher.url, dataset=name), split, OPTIONS, **options)

    with pytest.raises(MesetaError, match=r"the dispatcher serves several datasets .click, again."):
        reader(None)
    with pytest.raises(MesetaError, match="the dispatcher has no dataset 'clik'; did you mean 'click'"):
        reader("clik")
    with pytest.raises(MesetaError, match="no split 'tset'"):
        reader("click", "tset")
    with pytest.raises(MesetaError, match="'buy' is not a label"):
        reader("click", labels=("buy",))
    with pytest.raises(MesetaError, match=r"rank must be in 0..1"):
        reader("click", rank=2, num_ranks=2)


def test_a_missing_reader_is_waited_for_until_a_timeout(
    jagged: Dataset, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meseta.data.service.client.windows.LOG_INTERVAL_S", 0.5)
    with running({"click": jagged.dir}, 0) as tier:
        service = ReaderServiceAddress(url=tier.dispatcher.url, reader_timeout_s=2.0)
        with pytest.raises(MesetaError, match=r"window 0 has not arrived for [2-9] s: no reader is available; start"):
            list(ServedReader(service, "train", OPTIONS).epoch())
        said = capsys.readouterr().err
        assert re.search(
            r"^readers: window 0 has not arrived for [0-2] s: no reader is available; waiting$", said, re.MULTILINE
        )
        # One that comes while they wait.
        batches = ServedReader(tier.service, "train", OPTIONS).epoch()
        time.sleep(0.5)
        tier.add_reader()
        assert sum(batch.batch_size for batch in batches) == sum(f.num_rows for f in jagged.splits["train"].files)


def test_who_closes_does_not_wait(jagged: Dataset) -> None:
    with running({"click": jagged.dir}, 0) as tier:
        batches = ServedReader(tier.service, "train", OPTIONS).epoch()
        time.sleep(0.3)
        began_s = time.monotonic()
        batches.close()
        assert time.monotonic() - began_s < 2


def test_ranks_of_a_former_attempt(tier: Tier) -> None:
    service = ReaderServiceAddress(url=tier.dispatcher.url, dataset="click")
    former = ServedReader(service, "train", OPTIONS, run=RunAttempt(name="mine", attempt=1)).epoch()
    next(former)
    next(ServedReader(service, "train", OPTIONS, run=RunAttempt(name="mine", attempt=2)).epoch())
    with pytest.raises(MesetaError, match="rank 0 belongs to an earlier attempt of run 'mine'"):
        list(former)


def test_a_damaged_file_ends_the_run_and_names_the_reader(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data", multi_valued=False)
    file = dataset.resolve_file(dataset.splits["train"].files[0].path)
    with running({"click": dataset.dir}, 2) as tier:
        reader = ServedReader(tier.service, "train", OPTIONS)
        content = bytearray(file.read_bytes())
        content[: len(content) // 2] = os.urandom(len(content) // 2)
        file.write_bytes(content)
        with pytest.raises(MesetaError, match=rf"reader grpc://127.0.0.1:\d+: .*{file.name}"):
            list(reader.epoch())


def test_a_file_that_storage_does_not_give_for_a_while_is_waited_for(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data", multi_valued=False)
    file = dataset.resolve_file(dataset.splits["train"].files[0].path)
    with running({"click": dataset.dir}, 2) as tier:
        epoch = ServedReader(tier.service, "train", OPTIONS).epoch()
        file.rename(file.with_suffix(".away"))
        back = threading.Timer(1.5, lambda: file.with_suffix(".away").rename(file))
        back.start()
        served = [batch.label for batch in epoch]
        back.join()
    local = [batch.label for batch in Reader(dataset, "train", OPTIONS).epoch()]
    assert [label.tolist() for label in served] == [label.tolist() for label in local]


def test_a_file_that_storage_never_gives_again_ends_the_run_and_is_named(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data", multi_valued=False)
    file = dataset.resolve_file(dataset.splits["train"].files[0].path)
    with running({"click": dataset.dir}, 1) as tier:
        reader = ServedReader(replace(tier.service, reader_timeout_s=1.2), "train", OPTIONS)
        file.unlink()
        with pytest.raises(
            MesetaError, match=rf"has not arrived for \d s: .*{file.name}.* cannot be read .*No such file"
        ):
            list(reader.epoch())


def test_data_that_were_prepared_again(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data", multi_valued=False)
    with running({"click": dataset.dir}, 1) as tier:
        reader = ServedReader(tier.service, "train", OPTIONS)
        dataset.model_copy(update={"seed": 7}).save(dataset.dir)
        with pytest.raises(MesetaError, match="differs from that of the dispatcher"):
            list(reader.epoch())


def ticket_of(tier: Tier, **changes: Any) -> dict[str, Any]:
    description = DispatcherClient(tier.dispatcher.url, tier.endpoint.credentials).describe("click")
    session = Session(
        rows=RowOrder.from_options(description, "train", ("label",), OPTIONS), run="r", attempt=0, rank=0, num_ranks=1
    )
    ticket = WindowTicket(session=session, epoch=0, window=0, first_row=0, batch_size=50, last_batch="keep")
    return {**json.loads(ticket.to_bytes()), **changes}


@pytest.mark.parametrize("seed", sample(range(NUM_MALFORMED // GROUP), 1, seed=0))
def test_malformed_tickets_and_actions(seed: int, tier: Tier) -> None:
    draw = random.Random(seed)
    ticket = ticket_of(tier)
    reader = flight.connect(tier.readers[0].url)
    dispatcher = flight.connect(tier.dispatcher.url)
    header = tier.dispatcher.credentials.header_value().encode()
    options = flight.FlightCallOptions(headers=[(b"authorization", header)])
    for _ in range(GROUP // 2):
        content = spoiled(draw, json.loads(json.dumps(ticket)))
        with OneLineErrors():
            for chunk in reader.do_get(flight.Ticket(content), options):
                assert chunk.data.num_rows <= NUM_ROWS  # a good ticket for a larger window is one, too
        with OneLineErrors():
            list(
                dispatcher.do_action(
                    flight.Action(draw.choice(["describe", "count", "lease", "heartbeat", "table", "other"]), content),
                    options,
                )
            )
    rows = sum(chunk.data.num_rows for chunk in reader.do_get(flight.Ticket(json.dumps(ticket).encode()), options))
    assert rows > 0, "and those that are as they should be are answered as before"


class OneLineErrors:
    """Context manager in which an error of a server must be one line without traceback."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None:
            return True
        assert isinstance(error, flight.FlightServerError), repr(error)
        text = str(error).split(". Detail:")[0]
        if error.extra_info:
            status = ErrorStatus.from_bytes(error.extra_info, "it")
            text = f"{status.reason}; {status.remedy}"
        assert text.isprintable() and "Traceback" not in text and len(text) < 5000, text
        return True


def test_rows_that_are_not_what_was_asked_for(jagged: Dataset) -> None:
    schema = record_batch_schema(jagged, ["other"])
    rows = Rows(
        np.zeros(2, np.float32),
        np.zeros((2, 2), np.float32),
        np.zeros((2, 2), np.int64),
        (),
    )
    plain = make_plain(jagged)
    good = to_record_batch(rows, plain, record_batch_schema(plain, ["other"]))
    assert ReceivedRows(good, plain, good.schema, "reader").num_rows == 2
    with pytest.raises(MesetaError, match="reader sent rows with other columns"):
        ReceivedRows(good, jagged, schema, "reader")
    missing = good.set_column(0, good.schema.field(0), pa.array([None, 1.0], pa.float32()))
    with pytest.raises(MesetaError, match="missing values"):
        ReceivedRows(missing, plain, good.schema, "reader")
    offsets = pa.py_buffer(np.array([0, 9, 3], np.int32))
    torn = pa.Array.from_buffers(pa.list_(pa.int32()), 2, [None, offsets], children=[pa.array([1, 2, 3], pa.int32())])
    bag_schema = pa.schema([pa.field("bag", pa.list_(pa.int32()))])
    only_bag = jagged.model_copy(update={"dense": (), "sparse": (jagged.sparse[1],), "has_labels": False})
    with pytest.raises(MesetaError, match="a damaged record batch"):
        ReceivedRows(pa.RecordBatch.from_arrays([torn], schema=bag_schema), only_bag, bag_schema, "reader")


def make_plain(jagged: Dataset) -> Dataset:
    return jagged.model_copy(update={"sparse": (jagged.sparse[0], jagged.sparse[3])})


def test_answers_have_a_limit() -> None:
    assert DatasetDescription.max_bytes == MAX_REPLY_BYTES
    with pytest.raises(MesetaError, match="at most 1,048,576 are read"):
        RowOrder.from_bytes(b" " * (RowOrder.max_bytes + 1), "peer")


def test_commands_end_in_one_line(tmp_path: Path) -> None:
    def error(*arguments: object) -> str:
        command = Command(tmp_path / "command", "readers", *arguments)
        code, text = command.wait(), command.err.read_text()
        assert code == 1 and len(text.splitlines()) == 1, text
        return text

    (tmp_path / "data").mkdir()
    assert "cannot read dataset.json" in error("dispatch", "--data", tmp_path / "data")
    assert "twice" in error("dispatch", "--data", tmp_path / "data", "--data", tmp_path / "data")
    assert "grpc://HOST:PORT" in error("work", "--dispatcher", "nowhere")
    assert "cannot be reached" in error("status", "grpc://127.0.0.1:9")
