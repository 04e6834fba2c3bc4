"""A node as processes of this machine."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import folders, processes
from tests.cluster.configuration import configuration
from tests.cluster.nodes import LISTENERS, Endpoint, answers_tcp, ends_with_a_boot
from tests.cluster.sources import Installation
from tests.cluster.waiting import wait_until

# Idle schedulers of several nodes would spin against each other on two cores.
_NO_BUSY_WAIT = "+sbwt none +sbwtdcpu none +sbwtdio none"


def free_ports(record: folders.Record, count: int) -> list[int]:
    """Ports of the cluster's own block that none of its nodes has and nobody listens on.

    A node that is down must find its ports free when it comes back, so no other cluster may choose
    them meanwhile. They have to be free at every address: a node does not start if its
    distribution port is in use anywhere on the machine.
    """
    taken = {record.epmd_port} | {port for node in record.nodes for port in node["ports"].values()}
    found = [port for port in record.ports if port not in taken and _is_free(port)]
    if len(found) < count:
        raise RuntimeError(f"{count} free ports wanted in {record.ports}, {len(found)} found")
    return found[:count]


def _is_free(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections linger
        probe.bind(("", port))
        return True
    return False


def new_endpoint(record: folders.Record) -> Endpoint:
    """A name, an address and free ports for one more node."""
    taken = {node["address"] for node in record.nodes}
    candidates = epmd_addresses(record)
    address = next((one for one in candidates if one not in taken), None)
    if address is None:
        raise ValueError(f"a cluster on one machine has at most {len(candidates)} nodes")
    wanted = (*LISTENERS, "distribution", *record.extra_ports)
    # epmd knows nodes by the part before the @, and the cluster has one epmd.
    name = f"rmq{address.rpartition('.')[2]}@{address}"
    ports = free_ports(record, len(wanted))
    return Endpoint(name, address, dict(zip(wanted, ports, strict=True)))


def epmd_addresses(record: folders.Record) -> list[str]:
    # epmd listens at each of them: 14 are too many, 12 are taken by all three versions (tried).
    return [f"127.0.{record.block}.{number}" for number in range(1, 13)]


def start_epmd(record: folders.Record, installation: Installation) -> None:
    """Erlang's port mapper, one for each cluster: the machine's own is left alone."""
    folder = folders.cluster_folder(record.name)
    addresses = ",".join(epmd_addresses(record))
    argv = installation.erlang("epmd", "-port", str(record.epmd_port), "-address", addresses)
    log = folder / "epmd.log"
    processes.spawn(argv, dict(os.environ), folder / "epmd", log)
    # A node that finds no epmd would start one itself, open to the network.
    wait_until(lambda: answers_tcp("127.0.0.1", record.epmd_port), 20, log.read_text)


@dataclass(frozen=True)
class NativeNode:
    record: folders.Record
    installation: Installation
    endpoint: Endpoint

    @property
    def folder(self) -> Path:
        return folders.cluster_folder(self.record.name) / self.endpoint.address

    def start(self) -> None:
        self._write_files()
        argv = [*self._on_its_core(), *self.installation.command("rabbitmq-server")]
        processes.spawn(argv, self._environment(), self.folder, self.folder / "output.log")

    def _on_its_core(self) -> list[str]:
        if not self.record.one_core_each:
            return []
        cores = sorted(os.sched_getaffinity(0))
        # First nodes have the most to do, so those of two clusters do not meet on one core.
        number = self.record.block + int(self.endpoint.address.rpartition(".")[2])
        return ["taskset", "--cpu-list", str(cores[number % len(cores)])]

    def stop(self) -> None:
        self.thaw()  # a frozen node could not obey
        for pid in processes.beam(self.folder):
            os.kill(pid, signal.SIGTERM)
        if not processes.wait_until_gone(self.folder, timeout=60):
            processes.kill_all(self.folder)

    def kill(self) -> None:
        processes.kill_all(self.folder)

    def freeze(self) -> None:
        processes.send(self.folder, signal.SIGSTOP)
        # The signal is sent; each thread stops when the kernel next sees it.
        wait_until(lambda: processes.all_stopped(self.folder), 10)

    def thaw(self) -> None:
        processes.send(self.folder, signal.SIGCONT)

    def running(self) -> bool:
        return bool(processes.marked(self.folder))

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def ctl(self, *arguments: str) -> str:
        argv = self.installation.command("rabbitmqctl", "--longnames", *arguments)
        done = subprocess.run(
            argv, env=self._environment(), capture_output=True, text=True, timeout=120
        )
        if done.returncode:
            raise RuntimeError(f"rabbitmqctl {arguments[0]}: {done.stderr or done.stdout}")
        return done.stdout

    def ask_cluster(self, expression: str) -> str:
        """By a plain Erlang beside the node, which starts in a third of what rabbitmqctl costs."""
        name = f"asking-{secrets.token_hex(4)}@{self.endpoint.address}"
        cookie = (self.folder / ".erlang.cookie").read_text()
        argv = self.installation.erlang(
            *("erl", "-boot", "no_dot_erlang", "-noinput", "-hidden"),
            *("-name", name, "-setcookie", cookie, "-start_epmd", "false"),
            *("-kernel", "inet_dist_use_interface", self._interface),
            *("-eval", f'io:format("~p~n", [{expression}]), halt().'),
        )
        done = subprocess.run(
            argv, env=self._environment(), capture_output=True, text=True, timeout=120
        )
        if done.returncode:
            raise RuntimeError(f"erl: {done.stderr or done.stdout}")
        return done.stdout

    def has_booted(self) -> bool:
        log = self.folder / "log" / f"{self.endpoint.name}.log"
        return log.exists() and ends_with_a_boot(log.read_text())

    def last_words(self) -> str:
        logs = [*sorted((self.folder / "log").glob("*.log")), self.folder / "output.log"]
        lines = [line for log in logs if log.exists() for line in log.read_text().splitlines()]
        # What went wrong stands before the crash reports that follow from it; what it printed and
        # did not log, such as a port that is taken, comes last.
        errors = [line for line in lines if "[error]" in line]
        return "\n".join([*errors[:10], "…", *lines[-20:]])

    @property
    def _interface(self) -> str:
        """The node's address as Erlang writes it."""
        return "{" + self.endpoint.address.replace(".", ",") + "}"

    def _environment(self) -> dict[str, str]:
        dist = self.endpoint.ports["distribution"]
        return {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(self.folder),
            "LANG": "C.UTF-8",
            "ERL_CRASH_DUMP_SECONDS": "0",  # no dump
            "ERL_EPMD_PORT": str(self.record.epmd_port),
            "RABBITMQ_USE_LONGNAME": "true",
            "RABBITMQ_NODENAME": self.endpoint.name,
            "RABBITMQ_DIST_PORT": str(dist),
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",  # not the machine's own settings
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "data"),
            "RABBITMQ_LOG_BASE": str(self.folder / "log"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                f"-kernel inet_dist_use_interface {self._interface} {_NO_BUSY_WAIT}"
            ),
        }

    def _write_files(self) -> None:
        (self.folder / "data").mkdir(parents=True, exist_ok=True)
        (self.folder / "log").mkdir(exist_ok=True)
        cookie = self.folder / ".erlang.cookie"
        if not cookie.exists():
            cookie.write_text(f"warren-{self.record.name}")
            cookie.chmod(0o400)
        (self.folder / "enabled_plugins").write_text(f"[{','.join(self.record.plugins)}].\n")
        (self.folder / "rabbitmq.conf").write_text(
            configuration(self.record, self.endpoint, self.endpoint.address, self.endpoint.ports)
        )
