"""Tests that a process without the keys is refused everywhere, with a one-line error."""

from __future__ import annotations

import json
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from pyarrow import flight

from bad_input.commands import run_here
from cli.processes import fact_of
from cli.test_listening import is_loopback, listening_inodes, open_inodes
from data.service.spoiled import spoiled
from data.service.test_refusals import OneLineErrors, ticket_of
from data.service.tier import Tier, digest, running
from data.test_reader import make_dataset
from meseta.data import Dataset, Reader, ReaderOptions
from meseta.data.service.client.reader import ReaderServiceAddress, ServedReader
from meseta.data.service.connection import Connection, UnreachableError
from meseta.data.service.credentials import credentials_for, new_token
from meseta.data.service.dispatcher_client import DispatcherClient
from meseta.data.service.keys import CERTIFICATE_FILE, CLIENT_FILE, KEY_FILE, TOKEN_FILE, TlsKeys, TlsServerKeys
from meseta.data.service.server import endpoint_server, key_folder
from meseta.data.service.server.catalog import Catalog
from meseta.data.service.server.dispatch_server import DispatchServer
from meseta.data.service.server.endpoint_server import Endpoint
from meseta.data.service.server.key_folder import make_keys
from meseta.data.service.server.lease_table import LeaseTable
from meseta.spec import MesetaError

OPTIONS = ReaderOptions(batch_size=50, shuffle=True, window_rows=100)
HOSTS = ["localhost", "127.0.0.1"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("closed") / "data", multi_valued=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys of the tier."""
    folder = tmp_path_factory.mktemp("keys") / "keys"
    make_keys(folder, HOSTS, days=9)
    return folder


@pytest.fixture(scope="module")
def other_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys of another tier."""
    folder = tmp_path_factory.mktemp("keys") / "others"
    make_keys(folder, HOSTS, days=9)
    return folder


@pytest.fixture(scope="module")
def tier(data: Dataset, folder: Path) -> Iterator[Tier]:
    with running({"click": data.dir}, 1, TlsServerKeys.load(folder)) as tier:
        yield tier


@pytest.fixture
def key_copy(folder: Path, tmp_path: Path) -> Path:
    """A copy of the keys that a test may damage."""
    return Path(shutil.copytree(folder, tmp_path / "keys"))


def token_of(folder: Path) -> str:
    return (folder / TOKEN_FILE).read_text().strip()


# The folder


def test_a_folder_of_keys(folder: Path) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {CERTIFICATE_FILE: 0o644, KEY_FILE: 0o600, CLIENT_FILE: 0o600, TOKEN_FILE: 0o600}
    certificate = x509.load_pem_x509_certificate((folder / CERTIFICATE_FILE).read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == HOSTS
    certificate.verify_directly_issued_by(certificate)
    now = datetime.now(UTC)
    assert certificate.not_valid_before_utc < now < certificate.not_valid_after_utc < now + timedelta(days=10)
    assert len(token_of(folder)) == 43 and b"PRIVATE" not in (folder / CERTIFICATE_FILE).read_bytes()


def test_keys_are_new_each_time_and_not_written_over(folder: Path, other_keys: Path) -> None:
    for name in (CERTIFICATE_FILE, KEY_FILE, CLIENT_FILE, TOKEN_FILE):
        assert (folder / name).read_bytes() != (other_keys / name).read_bytes()
    with pytest.raises(MesetaError, match="already exists"):
        make_keys(folder, HOSTS, days=9)


@pytest.mark.parametrize("host", ["", "a b", "-a", "*", "*.b", "a.*.b", "grpc://a", "a:80", "x" * 300, "a\n"])
def test_names_that_no_host_has(host: str, tmp_path: Path) -> None:
    with pytest.raises(MesetaError, match="--host must be a host name or an IP address"):
        make_keys(tmp_path / "keys", [host], days=9)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_no_half_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = key_folder.write_secret

    def fill(path: Path, *content: Any) -> None:
        if path.name == TOKEN_FILE:
            raise OSError(28, "No space left on device")
        write(path, *content)

    monkeypatch.setattr(key_folder, "write_secret", fill)
    with pytest.raises(MesetaError, match="No space left on device"):
        make_keys(tmp_path / "keys", HOSTS, days=9)
    assert not list(tmp_path.iterdir())


def chmod(folder: Path, name: str) -> None:
    (folder / name).chmod(0o640)


def remove(folder: Path, name: str) -> None:
    (folder / name).unlink()


def damage(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:100] + b"!" * 60 + content[160:])


def empty(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"")


@pytest.mark.parametrize(
    ("spoil", "name", "why"),
    [
        *((remove, name, "cannot be read .No such file or directory.; copy it from the folder")
          for name in (CERTIFICATE_FILE, KEY_FILE, CLIENT_FILE, TOKEN_FILE)),
        *((damage, name, "is damaged or not a key file; copy it again")
          for name in (CERTIFICATE_FILE, KEY_FILE, CLIENT_FILE)),
        *((empty, name, "is damaged or not a key file; copy it again")
          for name in (CERTIFICATE_FILE, KEY_FILE, CLIENT_FILE)),
        *((chmod, name, "is a secret, but others may read it; chmod 600 ")
          for name in (KEY_FILE, CLIENT_FILE, TOKEN_FILE)),
        (empty, TOKEN_FILE, "must have 43 or more characters, all of them letters, digits, - and _, got 0"),
    ],
)  # fmt: skip
def test_files_that_are_no_keys(spoil: Callable[[Path, str], None], name: str, why: str, key_copy: Path) -> None:
    spoil(key_copy, name)
    with pytest.raises(MesetaError, match=rf"keys: '{key_copy / name}' {why}") as refused:
        Endpoint.from_options("127.0.0.1:0", None, key_copy)
    assert str(refused.value).isprintable()
    if name == KEY_FILE:
        TlsKeys.load(key_copy)  # who asks needs none
    else:
        with pytest.raises(MesetaError, match=why):
            TlsKeys.load(key_copy)


@pytest.mark.parametrize("token", ["x" * 42, "short", "w" * 43 + " w", "ä" * 43, "x" * 2000])
def test_tokens_that_are_none(token: str, key_copy: Path) -> None:
    (key_copy / TOKEN_FILE).write_text(token)
    with pytest.raises(MesetaError, match=r"must have 43 or more characters, all of them letters") as refused:
        TlsKeys.load(key_copy)
    assert token not in str(refused.value)


def test_a_certificate_and_the_key_of_another(key_copy: Path, other_keys: Path) -> None:
    shutil.copy(other_keys / KEY_FILE, key_copy / KEY_FILE)
    with pytest.raises(
        MesetaError, match=rf"'{key_copy / KEY_FILE}' is not the key of '{key_copy / CERTIFICATE_FILE}'"
    ):
        Endpoint.from_options("127.0.0.1:0", None, key_copy)


def aged(folder: Path) -> Path:
    """Return keys that expired half a day ago."""
    make_keys_without_checks = pytest.MonkeyPatch()
    with make_keys_without_checks.context() as patch:
        patch.setattr(TlsServerKeys, "load", lambda folder: None)
        make_keys(folder, HOSTS, days=-0.5)  # type: ignore[arg-type]
    return folder


def unchecked(folder: Path) -> TlsServerKeys:
    """Return server keys whose certificate expires while it is in use."""
    return TlsServerKeys(
        folder,
        *((folder / name).read_bytes().strip() for name in (CERTIFICATE_FILE, CLIENT_FILE, TOKEN_FILE, KEY_FILE)),
    )


def test_keys_that_have_expired(tmp_path: Path) -> None:
    with pytest.raises(MesetaError, match=r"certificate.pem': the certificate has expired on 20\d\d-.*; make new keys"):
        TlsKeys.load(aged(tmp_path / "keys"))


# Where servers listen


def test_other_hosts_are_listened_to_with_keys_alone(folder: Path) -> None:
    for listen in ("0.0.0.0:7077", "192.168.1.7:0", "example.org:1"):
        with pytest.raises(MesetaError, match=r"must be 127.0.0.1 without keys, .* `meseta readers keys DIR`"):
            Endpoint.from_options(listen)
    assert Endpoint.from_options("0.0.0.0:1", "localhost", folder).advertised_host == "localhost"
    assert Endpoint.from_options("127.0.0.1:1", None, folder).scheme == "grpc+tls"
    with pytest.raises(MesetaError, match=r"does not cover 'host7', but localhost, 127.0.0.1; .*--host host7"):
        Endpoint.from_options("0.0.0.0:1", "host7", folder)
    with pytest.raises(MesetaError, match=r"does not cover '192.168.1.7', but"):
        Endpoint.from_options("192.168.1.7:0", None, folder)


def test_every_address_is_called_by_the_name_of_the_machine(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", [socket.gethostname()], days=9)
    assert Endpoint.from_options("0.0.0.0:1", None, tmp_path / "keys").advertised_host == socket.gethostname()


# Who is let in


def test_the_same_rows(tier: Tier, data: Dataset) -> None:
    assert tier.service.url.startswith("grpc+tls://127.0.0.1:")
    digests = list(map(digest, ServedReader(tier.service, "train", OPTIONS).epochs(2)))
    assert digests == list(map(digest, Reader(data, "train", OPTIONS).epochs(2))) and len(digests) > 8


def refusal(call: Callable[[], object], *secrets: Path) -> str:
    """Return the one-line error of a call, which must fail quickly, permanently and without secrets."""
    began_s = time.monotonic()
    with pytest.raises(MesetaError) as refused:
        call()
    assert not isinstance(refused.value, UnreachableError), refused.value
    assert time.monotonic() - began_s < 5
    text = str(refused.value)
    assert text.isprintable() and "Flight" not in text and "SSL" not in text, text
    assert not [secret for secret in secrets if token_of(secret) in text]
    return text


def ask(url: str, keys: Path | None) -> Callable[[], object]:
    return lambda: ServedReader(ReaderServiceAddress(url=url, keys=keys, reader_timeout_s=300), "train", OPTIONS)


@pytest.fixture
def strange(data: Dataset) -> Iterator[Callable[[TlsServerKeys | None], str]]:
    """Function that starts a dispatcher with or without keys and returns its URL."""
    started = []

    def start(keys: TlsServerKeys | None) -> str:
        started.append(DispatchServer(Endpoint(credentials=keys), Catalog({"click": data.dir}), LeaseTable()))
        return started[-1].url

    yield start
    for server in started:
        server.stop()


def test_a_token_of_others(tier: Tier, key_copy: Path, other_keys: Path) -> None:
    shutil.copy(other_keys / TOKEN_FILE, key_copy)
    said = refusal(ask(tier.service.url, key_copy), key_copy, other_keys)
    assert said.startswith(
        f"dispatcher {tier.service.url} expects another token than that in '{key_copy / TOKEN_FILE}'; use the"
    )
    whole = token_of(other_keys) * 2
    (key_copy / TOKEN_FILE).write_text(whole[:50])  # as the right one would be, were it longer and cut
    assert "expects another token" in refusal(ask(tier.service.url, key_copy))


def test_a_certificate_of_others(tier: Tier, key_copy: Path, other_keys: Path) -> None:
    said = refusal(ask(tier.service.url, other_keys), other_keys)
    assert (
        f"has another certificate than '{other_keys / CERTIFICATE_FILE}'; "
        "use the folder of keys with which it was started" in said
    )
    shutil.copy(other_keys / CLIENT_FILE, key_copy)
    assert f"does not know the certificate of '{key_copy / CLIENT_FILE}'" in refusal(ask(tier.service.url, key_copy))


def test_encryption_on_one_side(tier: Tier, folder: Path, strange: Callable[..., str]) -> None:
    plain = strange(None)
    said = refusal(ask(tier.service.url.replace("+tls", ""), None))
    assert "accepts only clients with keys; name their folder with --keys DIR or data.service.keys=DIR" in said
    said = refusal(ask(plain.replace("grpc", "grpc+tls"), folder))
    assert "does not use encryption; start it with --keys, or remove the keys" in said
    assert "with keys an address must be grpc+tls://HOST:PORT" in refusal(ask(plain, folder))
    assert "an encrypted address needs keys; set their folder" in refusal(ask(tier.service.url, None))


def test_a_certificate_that_expires_under_a_server(tmp_path: Path, strange: Callable[..., str]) -> None:
    keys = unchecked(aged(tmp_path / "keys"))
    said = refusal(DispatcherClient(url := strange(keys), keys).status)
    assert said.startswith(f"dispatcher {url}: the certificate has expired; make new keys with `meseta readers keys`")


def test_a_host_that_is_not_covered(tmp_path: Path, strange: Callable[..., str]) -> None:
    make_keys(tmp_path / "keys", ["host7", "*.rack1.lan"], days=9)
    url = strange(TlsServerKeys.load(tmp_path / "keys"))
    said = refusal(ask(url, tmp_path / "keys"))
    assert said.startswith(
        f"dispatcher {url}: its certificate does not cover '127.0.0.1', but host7, *.rack1.lan; make new"
    )
    TlsServerKeys.load(tmp_path / "keys").check_host("host3.rack1.lan")


def test_who_is_not_there(folder: Path) -> None:
    for url in ("grpc+tls://127.0.0.1:9", "grpc+tls://nowhere.invalid:9"):
        with pytest.raises(
            UnreachableError, match=r"cannot be reached: (nothing listens on its port|its host has no address)$"
        ):
            ask(url, folder)()


def test_a_fault_is_looked_for_and_not_made_up(tier: Tier, strange: Callable[..., str]) -> None:
    """A call that failed once may succeed when it is repeated."""
    plain = strange(None)
    for url, credentials in ((tier.dispatcher.url, tier.endpoint.credentials), (plain, credentials_for(plain))):
        connection = Connection("dispatcher", url, credentials)
        with pytest.raises(UnreachableError, match=r"it has not answered, or broke off$"), connection.wrap_errors():
            raise flight.FlightUnavailableError("Socket closed")


def test_who_listens_and_says_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meseta.data.service.dispatcher_client.CALL_TIMEOUT_S", 0.5)
    monkeypatch.setattr("meseta.data.service.connection.PROBE_TIMEOUT_S", 0.5)
    silent = socket.create_server(("127.0.0.1", 0))
    with silent, pytest.raises(UnreachableError, match=r"cannot be reached: nothing answers there$"):
        DispatcherClient(f"grpc+tls://127.0.0.1:{silent.getsockname()[1]}", TlsKeys.load(folder)).status()


def every_call(client: flight.FlightClient, options: flight.FlightCallOptions) -> Iterator[Callable[[], object]]:
    described = flight.FlightDescriptor.for_path("train")
    yield lambda: list(client.do_action(flight.Action("describe", b"{}"), options))
    yield lambda: list(client.do_action(flight.Action("status", b""), options))
    yield lambda: list(client.list_actions(options))
    yield lambda: list(client.list_flights(options=options))
    yield lambda: client.get_flight_info(described, options)
    yield lambda: client.get_schema(described, options)
    yield lambda: list(client.do_get(flight.Ticket(b"{}"), options))
    yield lambda: list(client.do_exchange(described, options)[1])


@pytest.mark.parametrize("which", ["dispatcher", "reader"])
@pytest.mark.parametrize(
    "header", [None, "Bearer", "Bearer wrong", "Basic TOKEN", "TOKEN", "Bearer TOKENx", "Bearer TOKE"]
)
def test_no_call_comes_through_without_the_token(
    tier: Tier, folder: Path, which: str, header: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    compare = endpoint_server.hmac.compare_digest
    monkeypatch.setattr(endpoint_server.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or compare(a, b))
    keys, token = TlsKeys.load(folder), token_of(folder)
    url = tier.dispatcher.url if which == "dispatcher" else tier.readers[0].url
    client = flight.connect(url, tls_root_certs=keys.certificate, cert_chain=keys.client, private_key=keys.client)
    sent = (header or "").replace("TOKEN", token).replace("TOKE", token[:-1])
    headers = [] if header is None else [(b"authorization", sent.encode())]
    calls = list(every_call(client, flight.FlightCallOptions(timeout=5, headers=headers)))
    for call in calls:
        with pytest.raises((flight.FlightError, OSError), match=r"header authorization: .*Unauthenticated") as refused:
            call()
        assert token[:-1] not in str(refused.value)
    # Each token was compared in constant time, as were those of the reader's heartbeats.
    assert compared.count((sent.encode(), f"Bearer {token}".encode())) == len(calls)


@pytest.mark.parametrize("which", ["dispatcher", "reader"])
def test_no_call_comes_through_without_keys_and_token(data: Dataset, which: str) -> None:
    with running({"click": data.dir}, 1) as plain:
        server = plain.dispatcher if which == "dispatcher" else plain.readers[0]
        for header in (None, "Bearer ", f"Bearer {new_token().decode()}"):
            headers = [] if header is None else [(b"authorization", header.encode())]
            options = flight.FlightCallOptions(timeout=5, headers=headers)
            client = flight.connect(server.url)
            handshake = partial(client.authenticate_basic_token, "user", "password", options)
            for call in (*every_call(client, options), handshake):
                with pytest.raises((flight.FlightError, OSError), match=r"header authorization: .*Unauthenticated"):
                    call()


def test_no_call_comes_through_without_a_certificate(tier: Tier, folder: Path, other_keys: Path) -> None:
    keys, strange = TlsKeys.load(folder), TlsKeys.load(other_keys)
    options = flight.FlightCallOptions(timeout=5, headers=[(b"authorization", keys.header_value().encode())])
    for shown in ({}, {"cert_chain": strange.client, "private_key": strange.client}):
        client = flight.connect(tier.dispatcher.url, tls_root_certs=keys.certificate, **shown)
        for call in every_call(client, options):
            with pytest.raises((flight.FlightError, OSError), match=r"Socket closed|Connection reset"):
                call()


def test_malformed_tickets_of_those_who_are_let_in(tier: Tier, folder: Path) -> None:
    draw, keys, ticket = random.Random(0), TlsKeys.load(folder), ticket_of(tier)
    client = flight.connect(
        tier.readers[0].url, tls_root_certs=keys.certificate, cert_chain=keys.client, private_key=keys.client
    )
    options = flight.FlightCallOptions(headers=[(b"authorization", keys.header_value().encode())])
    for _ in range(150):
        with OneLineErrors():
            list(client.do_get(flight.Ticket(spoiled(draw, ticket_of(tier, **ticket))), options))


def test_calls_have_a_limit(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_server, "MAX_CALLS", 0)
    with pytest.raises(UnreachableError, match=r"failed: 0 calls are in progress, the maximum of this server$"):
        DispatcherClient(tier.dispatcher.url, tier.endpoint.credentials).describe(None)
    monkeypatch.setattr(endpoint_server, "MAX_CALLS", 8)
    dispatcher = DispatcherClient(tier.dispatcher.url, tier.endpoint.credentials)
    for _ in range(20):  # each leaves
        dispatcher.describe(None)


# Refused is final


def test_refused_in_the_middle_of_an_epoch_ends_a_run_at_once(data: Dataset, folder: Path, other_keys: Path) -> None:
    """The dispatcher restarts with other keys: its clients fail without waiting for reader_timeout_s."""
    catalog = Catalog({"click": data.dir})
    with running({"click": data.dir}, 1, TlsServerKeys.load(folder)) as tier:
        batches = ServedReader(tier.service, "train", OPTIONS).epochs(1000)
        next(batches)
        port = tier.dispatcher.port
        tier.dispatcher.stop()
        again = DispatchServer(Endpoint(port=port, credentials=TlsServerKeys.load(other_keys)), catalog, LeaseTable())
        try:
            assert "has another certificate" in refusal(lambda: list(batches), folder, other_keys)
        finally:
            again.stop()


def test_a_reader_that_is_refused_does_not_start(tier: Tier, key_copy: Path, other_keys: Path) -> None:
    shutil.copy(other_keys / TOKEN_FILE, key_copy)
    ended = run_here("readers", "work", "--dispatcher", tier.service.url, "--keys", str(key_copy))
    assert ended.code == 1 and "expects another token" in ended.err and len(ended.err.splitlines()) == 1


# Secrets


def test_secrets_are_in_no_text_of_an_object(tier: Tier, folder: Path) -> None:
    keys = TlsServerKeys.load(folder)
    reader = ServedReader(tier.service, "train", OPTIONS)
    for thing in (keys, tier.service, tier.endpoint, DispatcherClient(tier.service.url, keys), reader, tier.dispatcher):
        for text in (repr(thing), str(thing), f"{thing!s}"):
            assert token_of(folder) not in text and "PRIVATE" not in text


def peak_mb(pid: int) -> int:
    [line] = [line for line in fact_of(pid, "status").splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) // 1024


def test_as_commands(data: Dataset, folder: Path, tmp_path: Path) -> None:
    """Listens on all interfaces: nothing visible contains a secret, and unauthenticated calls take no memory."""
    meseta = [sys.executable, "-m", "meseta.cli.main", "readers"]
    out, processes = tmp_path / "out", []

    def start(*arguments: object) -> str:
        with out.open("ab") as log:
            command = [*meseta, *map(str, arguments), "--keys", str(folder), "--advertise", "localhost", "--json"]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log))
        said = processes[-1].stdout.readline().decode()
        with out.open("a") as log:
            log.write(said)
        return str(json.loads(said)["url"])

    try:
        url = start("dispatch", "--data", f"click={data.dir}", "--listen", "0.0.0.0:0")
        assert url.startswith("grpc+tls://localhost:")
        start("work", "--dispatcher", url, "--listen", "127.0.0.1:0")
        pids = [process.pid for process in processes]
        heard = listening_inodes()
        addresses = [{heard[inode] for inode in open_inodes(pid) if inode in heard} for pid in pids]
        assert [len(each) for each in addresses] == [1, 1]
        assert [is_loopback(*each) for each in addresses] == [False, True]
        keys = TlsKeys.load(folder)
        service = ReaderServiceAddress(url=url, keys=folder)
        assert sum(batch.batch_size for batch in ServedReader(service, "train", OPTIONS).epoch()) > 100
        before = [peak_mb(pid) for pid in pids]
        stranger = flight.connect(url, tls_root_certs=keys.certificate)
        with pytest.raises(flight.FlightUnavailableError):
            list(stranger.do_action(flight.Action("describe", bytes(200 << 20)), flight.FlightCallOptions(timeout=20)))
        assert [peak_mb(pid) for pid in pids] <= [peak + 20 for peak in before]
        ended = run_here("readers", "status", url, "--keys", str(folder))
        assert ended.code == 0 and "reader 'grpc+tls://localhost:" in ended.out
        seen = [fact_of(pid, name) for pid in pids for name in ("cmdline", "environ")]
        assert all(seen), "they run"
        for text in (*seen, out.read_text(), ended.out, ended.err):
            assert token_of(folder) not in text and "PRIVATE" not in text
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()
