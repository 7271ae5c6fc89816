"""The recipes of docs/clusters.md: files are valid, and commands train on two hosts of the testbed.

All commands are read from the page. The tests take the part of SLURM, Kubernetes and the user: they set environment
variables, start the commands on each host, and send signals.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hosts.links import INTERFACE, address

from docs.run_page import blocks
from hosts import Hosts, why_impossible
from meseta import checkpoint
from small_run import environment, final_checksum, metrics, settings
from source_tree import ROOT

PAGE = ROOT / "docs" / "clusters.md"
SCHEMA = Path(__file__).with_name("pytorchjob.schema.json")
NAMES = (("node1", "clicks-master-0"), ("node2", "clicks-worker-0"), ("data1",), ("data2",))
"""Names of the hosts on the page."""
NODE_1, NODE_2, DATA_1, DATA_2 = range(len(NAMES))
JOB_ID, OPERATOR_PORT, STORE_PORT = "4711", "23456", 5000
NUM_STEPS = 300
PATIENCE_S = 180.0
EVENTS = ("nothing", "SIGTERM", "SIGTERM of one host", "SIGKILL of one rank")
on_hosts = pytest.mark.skipif(why_impossible() is not None, reason=f"no network namespaces: {why_impossible()}")


def code(heading: str) -> list[str]:
    """Return the texts of the blocks in a section of the page."""
    parts = re.split(r"^##+ (.*)\n", PAGE.read_text(), flags=re.MULTILINE)
    return [block.text for block in blocks(dict(zip(parts[1::2], parts[2::2], strict=True))[heading])]


def job() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(code("Kubernetes")[0])
    return document


def test_the_script_is_valid_bash() -> None:
    (script,) = code("SLURM")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert re.match(r"#!/bin/bash\n(#SBATCH --[a-z-]+(=\S+)?\n)+", script)  # options precede all commands


def test_the_job_matches_the_published_schema() -> None:
    schema = json.loads(SCHEMA.read_text())
    jsonschema.validate(job(), schema)
    wrong = job()
    container = wrong["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container["comand"] = container.pop("command")
    with pytest.raises(jsonschema.ValidationError, match="'comand' was unexpected"):
        jsonschema.validate(wrong, schema)


class Cluster:
    """Hosts of the testbed with the names and the interface of the page. Names resolve on each host."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._hosts = hosts
        self._started: list[subprocess.Popen[bytes]] = []
        lines = [f"{address(host)} {' '.join(names)}" for host, names in enumerate(NAMES)]
        self._names = folder / "hosts.txt"
        self._names.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        for host in hosts._hosts:
            host.configure("ip", [f"link set {INTERFACE} down", f"link set {INTERFACE} name eth1", "link set eth1 up"])

    def entered(self, host: int, name: str, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` on a host with one of its names."""
        enter = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
        inside = ["unshare", "--mount", "--uts", "sh", "-c", enter, "sh", name, str(self._names), *command]
        return self._hosts._hosts[host].entered(inside)

    def start(
        self, host: int, command: str | Sequence[str], folder: Path, variables: Mapping[str, str], name: str = ""
    ) -> subprocess.Popen[bytes]:
        """Start commands of a shell, or a program. They append their output to NAME.log in the folder."""
        name = name or NAMES[host][0]
        words = ["bash", "-euo", "pipefail", "-c", command] if isinstance(command, str) else command
        self._started.append(start(self.entered(host, name, words), folder, variables, name))
        return self._started[-1]

    def kill(self) -> None:
        """Kill all processes on the hosts."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while self._started:
            self._started.pop().wait()

    def processes(self, *hosts: int) -> dict[int, list[str]]:
        """Return the command line of each process on some hosts, or on all."""
        networks = {self._hosts.namespaces[1 + host] for host in hosts or range(len(NAMES))}
        holders = {host.pid for host in self._hosts._hosts}
        commands = {}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # It has ended.
                if os.readlink(process / "ns/net") in networks and int(process.name) not in holders:
                    commands[int(process.name)] = (process / "cmdline").read_text().split("\0")
        return commands


def start(command: Sequence[str], folder: Path, variables: Mapping[str, str], name: str) -> subprocess.Popen[bytes]:
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=folder,
            env={**user_environment(), **variables},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def user_environment() -> dict[str, str]:
    variables = environment()
    del variables["OMP_NUM_THREADS"]  # torchrun sets it.
    return {**variables, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{variables['PATH']}"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Hosts(len(NAMES)) as hosts:
        yield Cluster(hosts, tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with raw files, in which the commands of 'Before you start' have run."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "raw").mkdir()
    draw = random.Random(0)
    for number in range(2):
        rows = [
            f"{draw.randrange(200)},{draw.randrange(50)},{draw.lognormvariate(3, 1):.2f},{draw.randrange(2)}"
            for _ in range(700)
        ]
        (folder / f"raw/{number}.csv").write_text("\n".join(["user_id,item_id,price,clicked", *rows, ""]))
    command, config = code("Before you start")
    run_commands(command, folder)
    document = yaml.safe_load(config)
    # A small model, and a plan that does not depend on the number of hosts.
    small = settings(folder, folder, train__max_steps=NUM_STEPS, train__epochs=100)
    document |= {key: small[key] for key in ("model", "embedding", "dense", "train", "report")}
    document["plan"] = {"devices_per_host": 2, "tables": {"*": "row_wise"}}
    (folder / "run.yaml").write_text(yaml.safe_dump(document))
    return folder


def run_commands(command: str, folder: Path) -> None:
    """Run commands on this machine, to their end."""
    process = start(["bash", "-euo", "pipefail", "-c", command], folder, {}, "this-host")
    assert wait([process], folder) == [0], logs(folder)


@pytest.fixture(scope="module")
def expected(prepared: Path) -> str:
    """Checksum of the run on four ranks of one host."""
    run_commands("meseta train run.yaml run_dir=runs/one-host --nproc 4", prepared)
    return final_checksum(prepared / "runs/one-host")


@pytest.fixture
def shared(cluster: Cluster, prepared: Path, tmp_path: Path) -> Iterator[Path]:
    """Folder of the page, which all hosts see. At the end of the test all processes on the hosts are killed."""
    try:
        yield make_folder(tmp_path / "clicks", prepared)
    finally:
        cluster.kill()


def make_folder(folder: Path, prepared: Path) -> Path:
    folder.mkdir()
    (folder / "run.yaml").write_bytes((prepared / "run.yaml").read_bytes())
    (folder / "data").symlink_to(prepared / "data")
    return folder


def save_often(folder: Path) -> None:
    document = yaml.safe_load((folder / "run.yaml").read_text())
    document["checkpoint"] |= {"every_steps": 20}
    (folder / "run.yaml").write_text(yaml.safe_dump(document))


def check_run(folder: Path, expected: str) -> None:
    """Check what the page promises, and that the hosts change no bit."""
    run_dir = folder / "runs/clicks"
    assert json.loads((run_dir / "summary.json").read_text())["num_ranks"] == 4
    assert (run_dir / "report.html").exists()
    assert final_checksum(run_dir) == expected


def wait(processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> list[int]:
    """Return the exit codes of commands at their end."""
    try:
        return [process.wait(PATIENCE_S) for process in processes]
    except subprocess.TimeoutExpired as error:
        raise AssertionError(logs(folder)) from error


def wait_for(condition: Callable[[], bool], what: str, folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"no {what}\n{logs(folder)}"
        time.sleep(0.02)


def logs(folder: Path) -> str:
    return "\n".join(f"{path.name}:\n{path.read_text(errors='replace')[-4000:]}" for path in folder.glob("*.log"))


def is_torchrun(command: Sequence[str]) -> bool:
    return any(Path(word).name == "torchrun" for word in command[:2])


def is_rank(command: Sequence[str]) -> bool:
    return command[1:4] == ["-u", "-m", "meseta.cli.main"]


def disturb(cluster: Cluster, folder: Path, event: str, *, with_ranks: bool) -> None:
    """Send the signals of an event while the run trains. `with_ranks` sends SIGTERM to the ranks, too."""
    if event.startswith("SIGTERM"):
        wait_for(lambda: num_trained(folder) > 0, "steps", folder)
        commands = cluster.processes(NODE_2) if "one" in event else cluster.processes(NODE_1, NODE_2)
        chosen = [pid for pid, words in commands.items() if is_torchrun(words) or (with_ranks and is_rank(words))]
        assert len(chosen) == (3 if with_ranks else 1) * (1 if "one" in event else 2), commands
        send(chosen, signal.SIGTERM)
    else:
        wait_for(lambda: newest_step(folder) > 0, "checkpoint", folder)
        send([max(pid for pid, words in cluster.processes(NODE_2).items() if is_rank(words))], signal.SIGKILL)


def num_trained(folder: Path) -> int:
    path = folder / "runs/clicks/metrics.jsonl"
    return max((line["step"] for line in metrics(path.parent)), default=0) if path.exists() else 0


def send(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def check_interrupted(folder: Path) -> None:
    """Check that the run has saved a checkpoint before its last step."""
    assert 0 < newest_step(folder) < NUM_STEPS, logs(folder)


def newest_step(folder: Path) -> int:
    newest = checkpoint.latest_complete(folder / "runs/clicks/checkpoints")
    return 0 if newest is None else int(newest.name.rpartition("-")[2])


class Slurm:
    """`srun`, which starts a task on each node, and `scontrol`."""

    VARIABLES: Mapping[str, str] = {
        "SLURM_JOB_ID": JOB_ID,
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_CPUS_PER_TASK": "8",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
    }
    """Variables of SLURM 22.05 that torchrun, Meseta or the script might read."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._folder, self._programs = folder, folder / "slurm"
        self._programs.mkdir()
        tasks = {node: shlex.join(cluster.entered(node, NAMES[node][0], [])) for node in (NODE_1, NODE_2)}
        starts = [f'SLURM_PROCID={n} SLURM_NODEID={n} SLURM_LOCALID=0 {task} "$@" &' for n, task in tasks.items()]
        ends = ["status=0", "for task in $(jobs -p); do wait $task || status=$?; done", "exit $status"]
        self._write("srun", ["while [[ $1 == -* ]]; do shift; done", *starts, *ends])
        self._write("scontrol", ['echo "$@" >> calls.txt', 'if [ "$1" = show ]; then printf "%s\\n" node1 node2; fi'])

    def _write(self, name: str, lines: Sequence[str]) -> None:
        program = self._programs / name
        program.write_text("\n".join(["#!/bin/bash", *lines, ""]))
        program.chmod(0o755)

    def start(self, **variables: str) -> subprocess.Popen[bytes]:
        """Start the script of the page on the first node, as a batch job."""
        (self._folder / "train.sbatch").write_text(code("SLURM")[0])
        path = f"{self._programs}{os.pathsep}{user_environment()['PATH']}"
        return start(["bash", "train.sbatch"], self._folder, {**self.VARIABLES, "PATH": path, **variables}, "slurm")

    def calls(self) -> list[str]:
        """Return the calls of scontrol since the last call of this function."""
        record = self._folder / "calls.txt"
        lines = record.read_text().splitlines()
        record.unlink()
        return lines


@on_hosts
@pytest.mark.soak
@pytest.mark.parametrize("event", EVENTS)
def test_slurm(cluster: Cluster, shared: Path, expected: str, event: str) -> None:
    slurm, first_calls = Slurm(cluster, shared), ["show hostnames node[1-2]"]
    if event == "SIGKILL of one rank":
        save_often(shared)
    batch = slurm.start()
    if event != "nothing":
        disturb(cluster, shared, event, with_ranks=True)  # as SLURM does
        assert wait([batch], shared) == [0], logs(shared)
        assert slurm.calls() == [*first_calls, f"requeue {JOB_ID}"]
        check_interrupted(shared)
        batch = slurm.start(SLURM_RESTART_COUNT="1")
    assert wait([batch], shared) == [0], logs(shared)
    assert slurm.calls() == first_calls
    check_run(shared, expected)


@on_hosts
@pytest.mark.soak
def test_slurm_gives_up_after_nine_restarts(cluster: Cluster, shared: Path) -> None:
    (shared / "run.yaml").write_text("data: {dir: missing}\n")
    slurm = Slurm(cluster, shared)
    for count, requeued in (("8", [f"requeue {JOB_ID}"]), ("9", [])):
        assert wait([slurm.start(SLURM_RESTART_COUNT=count)], shared) == [0]
        assert slurm.calls()[1:] == requeued


def operator_variables(document: Mapping[str, Any], pod: int) -> dict[str, str]:
    """Return the variables that the training operator sets in a pod of a job with a master.

    They are those of setPodEnv in pkg/controller.v1/pytorch/envvar.go of kubeflow/training-operator 1.9.
    """
    spec = document["spec"]
    num_pods = sum(replicas["replicas"] for replicas in spec["pytorchReplicaSpecs"].values())
    master = {"ADDR": f"{document['metadata']['name']}-master-0", "PORT": OPERATOR_PORT}
    return {
        "PYTHONUNBUFFERED": "0",
        **{f"{prefix}MASTER_{key}": value for prefix in ("", "PET_") for key, value in master.items()},
        "WORLD_SIZE": str(num_pods * int(spec["nprocPerNode"])),
        "RANK": str(pod),
        "PET_NPROC_PER_NODE": spec["nprocPerNode"],
        "PET_NODE_RANK": str(pod),
        "PET_NNODES": str(num_pods),
    }


def start_pods(cluster: Cluster, folder: Path) -> list[subprocess.Popen[bytes]]:
    """Start the containers of the page. Their working directory is the folder."""
    document, pods = job(), []
    for pod, replicas in enumerate(document["spec"]["pytorchReplicaSpecs"].values()):
        (container,) = replicas["template"]["spec"]["containers"]
        variables = {entry["name"]: entry["value"] for entry in container["env"]} | operator_variables(document, pod)
        pods.append(cluster.start(pod, container["command"], folder, variables, NAMES[pod][1]))
    return pods


@on_hosts
@pytest.mark.soak
@pytest.mark.parametrize("event", EVENTS)
def test_kubernetes(cluster: Cluster, shared: Path, expected: str, event: str) -> None:
    if event == "SIGKILL of one rank":
        save_often(shared)
    pods = start_pods(cluster, shared)
    if event != "nothing":
        disturb(cluster, shared, event, with_ranks=False)  # kubelet sends signals to the first process
        assert 0 not in wait(pods, shared), logs(shared)  # OnFailure restarts both containers
        check_interrupted(shared)
        pods = start_pods(cluster, shared)
    assert wait(pods, shared) == [0, 0], logs(shared)
    check_run(shared, expected)


def start_on_both(
    cluster: Cluster, command: str, folders: Sequence[Path], variables: Mapping[str, str] | None = None
) -> list[subprocess.Popen[bytes]]:
    """Start the commands of the first host there, and on the second host with its rank."""
    assert command.count("--node-rank 0") == 1
    texts = (command, command.replace("--node-rank 0", "--node-rank 1"))
    return [cluster.start(host, texts[host], folders[host], variables or {}) for host in (NODE_1, NODE_2)]


@on_hosts
@pytest.mark.soak
def test_plain_hosts(cluster: Cluster, shared: Path, expected: str) -> None:
    (command,) = code("Plain hosts")
    assert wait(start_on_both(cluster, command, [shared, shared]), shared) == [0, 0], logs(shared)
    check_run(shared, expected)


PUT = """
import boto3, pathlib, sys
client = boto3.client("s3")
client.create_bucket(Bucket="clicks")
for path in pathlib.Path(sys.argv[1]).glob("*.csv"):
    client.upload_file(str(path), "clicks", f"raw/{path.name}")
"""


@on_hosts
@pytest.mark.soak
def test_object_store(cluster: Cluster, shared: Path, prepared: Path, expected: str, tmp_path: Path) -> None:
    """The first host is replaced by a new one with an empty run_dir, which resumes from the store."""
    prepare, train = code("Object store")
    variables = {
        "AWS_ENDPOINT_URL": f"http://data2:{STORE_PORT}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    cluster.start(DATA_2, ["moto_server", "-H", "0.0.0.0", "-p", str(STORE_PORT)], shared, {})
    put = ["python", "-c", PUT, str(prepared / "raw")]
    wait_for(lambda: wait([cluster.start(DATA_2, put, shared, variables)], shared) == [0], "store", shared)
    folders = [make_folder(tmp_path / name, prepared) for name in ("disk1", "disk2", "disk3")]
    for folder in folders:
        (folder / "data").unlink()
    for host, folder in zip((NODE_1, NODE_2, NODE_1), folders, strict=True):
        assert wait([cluster.start(host, prepare, folder, variables)], folder) == [0], logs(folder)
    begun = start_on_both(cluster, f"{train.rstrip()} train.max_steps=100\n", folders[:2], variables)
    assert wait(begun, folders[0]) == [0, 0], logs(folders[0])
    assert (
        not (folders[0] / "runs/clicks/checkpoints").exists() and not (folders[1] / "runs/clicks/summary.json").exists()
    )
    resumed = start_on_both(cluster, train, [folders[2], folders[1]], variables)
    assert wait(resumed, folders[2]) == [0, 0], logs(folders[2])
    assert "resuming from step 100" in logs(folders[2])
    newest = ["python", "-c", "import meseta.checkpoint as c; print(c.verify(c.newest('s3://clicks/checkpoints')))"]
    assert wait([cluster.start(DATA_2, newest, tmp_path, variables)], tmp_path) == [0]
    assert expected in logs(tmp_path)
    assert json.loads((folders[2] / "runs/clicks/summary.json").read_text())["num_ranks"] == 4


@on_hosts
@pytest.mark.soak
def test_separate_hosts_for_readers(
    cluster: Cluster, shared: Path, prepared: Path, expected: str, tmp_path: Path
) -> None:
    services, train = code("Separate hosts for readers")
    keys, dispatch, work = services.splitlines()
    assert wait([cluster.start(DATA_1, keys, shared, {})], shared) == [0], logs(shared)
    trainers = tmp_path / "trainers"
    trainers.mkdir()
    run_commands(f"cp -p {shared}/run.yaml . && cp -pr {shared}/keys . && rm keys/key.pem", trainers)
    for host, command in ((DATA_1, dispatch), (DATA_2, work)):
        cluster.start(host, command, shared, {})
    processes = start_on_both(cluster, train, [trainers, trainers])
    assert wait(processes, trainers) == [0, 0], logs(trainers) + logs(shared)
    check_run(trainers, expected)
