"""The management API, with the standard library: which nodes there are, where they listen."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import unquote

import pika
import pika.channel
import pika.exceptions

from sharding.amqp.addresses import checked_parts
from sharding.amqp.session import INSTANCE
from sharding.errors import RemoteError
from sharding.maps.membership import token_of, voted
from sharding.maps.naming import token_of_node
from sharding.maps.planning import Member
from sharding.maps.shard_map import Address, Node

_LONGEST_REASON = 4_096
_LONGEST_ANSWER = 256 * 1024 * 1024
"""Queues are listed a whole virtual host at a time."""


class NoAnswer(RemoteError, ConnectionError):
    """The API did not answer, or refused; `status` is the HTTP status where there was one, and
    `reason` what the broker said to it. `in_time` is false if the time was up."""

    def __init__(
        self, text: str, status: int | None = None, reason: str = "", in_time: bool = True
    ) -> None:
        super().__init__(text)
        self.status = status
        self.reason = reason
        self.in_time = in_time


@dataclass(frozen=True)
class Management:
    """
    >>> Management("http://localhost:15672")
    Management(url='http://localhost:15672', user='guest')
    """

    url: str
    user: str = "guest"
    password: str = field(default="guest", repr=False)

    def get(self, *path: str, timeout: float = 10) -> Any:
        return self.call("GET", *path, timeout=timeout)

    def call(self, method: str, *path: str, body: object = None, timeout: float = 10) -> Any:
        """One request; each part of the path is quoted, so a vhost is written as it is."""
        quoted = "/".join(urllib.parse.quote(part, safe="") for part in path)
        request = urllib.request.Request(
            f"{self.url}/api/{quoted}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Authorization": self._authorization()},
        )
        what = f"{method} {self.url}/api/{quoted}"
        with _Deadline(timeout) as deadline:
            try:
                with deadline.opener().open(request, timeout=timeout) as answer:
                    content = answer.read(_LONGEST_ANSWER + 1)
                    missing = answer.length
                if deadline.has_passed:
                    raise TimeoutError("timed out")
                if len(content) > _LONGEST_ANSWER:
                    raise NoAnswer(f"{what}: an answer of more than {_LONGEST_ANSWER} bytes")
                if missing:
                    raise NoAnswer(f"{what}: the answer ended {missing} bytes too early")
                return json.loads(content) if content else None
            except urllib.error.HTTPError as error:
                with error:
                    reason = _reason(error.read(_LONGEST_REASON)) or str(error.reason)
                if 300 <= error.code < 400:
                    reason = "a redirect, which is not followed, as the login would go along"
                raise NoAnswer(f"{what}: {error.code} {reason}", error.code, reason) from None
            except (OSError, ValueError, http.client.HTTPException) as error:
                if isinstance(error, NoAnswer):
                    raise
                # While connecting, urllib wraps it.
                cause = getattr(error, "reason", error)
                in_time = not (deadline.has_passed or isinstance(cause, TimeoutError))
                text = error if in_time or not deadline.has_passed else "timed out"
                raise NoAnswer(f"{what}: {text}", in_time=in_time) from None

    def _authorization(self) -> str:
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


class _Deadline:
    """Ends a request when its time is up; sockets have a time-out for each byte only."""

    def __init__(self, seconds: float) -> None:
        self.has_passed = False
        self._sockets: list[socket.socket] = []
        self._timer = threading.Timer(seconds, self._pass)
        self._timer.daemon = True

    def __enter__(self) -> _Deadline:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def opener(self) -> urllib.request.OpenerDirector:
        return urllib.request.build_opener(_Http(self), _NoRedirects)

    def watch(self, connected: socket.socket) -> None:
        self._sockets.append(connected)
        if self.has_passed:
            self._pass()

    def _pass(self) -> None:
        self.has_passed = True
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class _Watched(http.client.HTTPConnection):
    deadline: _Deadline

    def connect(self) -> None:
        super().connect()
        self.deadline.watch(self.sock)


class _WatchedTls(_Watched, http.client.HTTPSConnection):
    pass


class _Http(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    def __init__(self, deadline: _Deadline) -> None:
        super().__init__()
        self._deadline = deadline

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(self._connection, _Watched), request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(self._connection, _WatchedTls), request)

    def _connection(self, kind: type[_Watched], host: str, **options: Any) -> _Watched:
        made = kind(host, **options)
        made.deadline = self._deadline
        return made


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def _reason(body: bytes) -> str:
    """What the broker says of a refusal: `{"error": …, "reason": …}`, unless it is no broker."""
    try:
        return " ".join(str(json.loads(body)["reason"]).split())
    except (ValueError, KeyError, TypeError):
        return ""


def management_api(url: str, amqp: pika.URLParameters | None = None) -> Management:
    """User and password are those in the URL, else those of the AMQP connection, else guest's."""
    parts = checked_parts("management_urls", url, ("http", "https"))
    host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else parts.hostname
    port = f":{parts.port}" if parts.port else ""
    address = f"{parts.scheme}://{host}{port}{parts.path.rstrip('/')}"
    credentials: Any = pika.PlainCredentials("guest", "guest") if amqp is None else amqp.credentials
    return Management(
        address,
        unquote(parts.username) if parts.username else credentials.username,
        unquote(parts.password) if parts.password else credentials.password,
    )


_EVERYWHERE = {"", "::", "0.0.0.0", "0:0:0:0:0:0:0:0"}


class ClusterView:
    """The management APIs of one cluster: which nodes there are, and what each of them knows.

    Who changes maps by what they say has them proved first (`believe`): an API may be another
    cluster's, where nodes may even have the same names, or that of a node that is cut off.
    """

    def __init__(self, apis: Sequence[Management], timeout: float = 5.0) -> None:
        self.apis = tuple(apis)
        self._timeout = timeout
        self._believed = self.apis
        self._preferred: Management | None = None

    def __bool__(self) -> bool:
        return bool(self.apis)

    @property
    def is_believed(self) -> bool:
        return bool(self._believed)

    def believe(self, apis: Iterable[Management]) -> None:
        """Ask these from now on, and no others."""
        self._believed = tuple(apis)

    def ask(
        self, method: str, *path: str, body: object = None, timeout: float | None = None
    ) -> Any:
        """One question to the first API that answers; a refusal with a status is an answer."""
        timeout = self._timeout if timeout is None else timeout
        problem = NoAnswer("no management API is known to be of this cluster")
        for api in sorted(self._believed, key=lambda api: api is not self._preferred):
            try:
                answer = api.call(method, *path, body=body, timeout=timeout)
            except NoAnswer as error:
                if error.status is not None and error.status < 500:
                    raise
                problem = error
                continue
            self._preferred = api
            return answer
        raise problem

    def members(self, tls: bool = False, known: Iterable[Node] = ()) -> list[Member]:
        """The nodes; `NoAnswer` if none of the APIs answers.

        Good news, that all `known` nodes are there and run, one API may tell: none should have more
        to do than it must. Of bad news counts what most of them say.
        """
        waiting = sorted(self._believed, key=lambda api: api is not self._preferred)
        problem = NoAnswer("no management API is known to be of this cluster")
        while waiting:
            api = waiting.pop(0)
            try:
                report = self._report(api, tls)
            except NoAnswer as error:
                problem = error
                continue
            self._preferred = api
            here = {token_of(member.node) for member in report if member.running}
            if len(here) == len(report) and here.issuperset(map(token_of, known)):
                return report
            return voted([report, *self._reports(waiting, tls)])
        raise problem

    def _reports(self, apis: Sequence[Management], tls: bool) -> Iterator[list[Member]]:
        with ThreadPoolExecutor(max_workers=max(len(apis), 1)) as threads:
            for asked in [threads.submit(self._report, api, tls) for api in apis]:
                with suppress(NoAnswer):
                    yield asked.result()

    def _report(self, api: Management, tls: bool) -> list[Member]:
        overview = api.get("overview", timeout=self._timeout)
        nodes = api.get("nodes", timeout=self._timeout)
        with _read_as_an_answer(api):
            members = members_from(nodes, overview.get("listeners", []), tls)
        if not members:
            raise NoAnswer(f"{api.url} names no node")
        return members

    def knows_queue(self, api: Management, vhost: str, queue: str) -> bool | None:
        """Whether an API sees a queue; None if it may not be asked for it."""
        try:
            found = api.get("queues", vhost, queue, timeout=self._timeout)
        except NoAnswer as error:
            if error.status == 404:
                return False
            if _is_about_the_thing(error):
                return None
            raise
        with _read_as_an_answer(api):
            return (found["name"], found["vhost"]) == (queue, vhost)

    def knows_connection(self, api: Management, vhost: str, instance: str) -> bool:
        """Whether an API lists a connection of ours, which tells it some seconds late."""
        try:
            listed = api.get("vhosts", vhost, "connections", timeout=self._timeout)
        except NoAnswer as error:
            if _is_about_the_thing(error):
                return False
            raise
        with _read_as_an_answer(api):
            properties = (each.get("client_properties") or {} for each in listed)
            return any(each.get(INSTANCE) == instance for each in properties)

    def version(self) -> tuple[int, ...]:
        text = self.ask("GET", "overview")["rabbitmq_version"]
        return tuple(int(part) for part in text.split(".")[:2])

    def queue_node(self, vhost: str, queue: str) -> str | None:
        """Where a queue lives; None if there is no such queue."""
        try:
            found = self.ask("GET", "queues", vhost, queue)
        except NoAnswer as error:
            if error.status == 404:
                return None
            raise
        return str(found["node"]) if found.get("node") else None


def _is_about_the_thing(error: NoAnswer) -> bool:
    """Whether an API refused what was asked, and not who asks: a wrong password changes nothing by
    asking for something else."""
    return error.status is not None and error.status < 500 and error.status != 401


@contextmanager
def _read_as_an_answer(api: Management) -> Iterator[None]:
    """Whatever answers at a URL may be something else."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"{api.url} answers as no management API does: {type(error).__name__}: {error}"
        raise NoAnswer(what) from None


def members_from(
    nodes: Iterable[Mapping[str, Any]], listeners: Iterable[Mapping[str, Any]], tls: bool = False
) -> list[Member]:
    """Members from what the management API says of nodes and listeners."""
    wanted = "amqp/ssl" if tls else "amqp"
    found = {
        node: tuple(address for protocol, address in each if protocol == wanted)
        for node, each in listeners_by_node(listeners).items()
    }
    return [
        Member(
            Node(node["name"], found.get(node["name"], ()), token_of_node(node["name"])),
            running=bool(node.get("running")),
            drained=node.get("being_drained"),
        )
        for node in sorted(nodes, key=lambda node: str(node["name"]))
    ]


def listeners_by_node(
    listeners: Iterable[Mapping[str, Any]],
) -> dict[str, list[tuple[str, Address]]]:
    """Where each node listens, with the broker's word for the protocol, each place once.

    A listener on all interfaces is reached under the host in the node's name.
    """
    found: dict[str, list[tuple[str, Address]]] = {}
    for listener in listeners:
        node, address = str(listener["node"]), str(listener["ip_address"])
        host = node.partition("@")[2] if address in _EVERYWHERE else address
        entry = str(listener["protocol"]), Address(host, int(listener["port"]))
        if entry not in found.setdefault(node, []):
            found[node].append(entry)
    return found
