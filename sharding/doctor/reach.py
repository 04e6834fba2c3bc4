"""How far a place lets us in: a ladder of steps, and what to do about each one that breaks.

The name resolves, the port answers, TLS is trusted, somebody answers, in the right protocol, the
login works, the virtual host opens. What is above a broken step is not tried. A place is a URL that
the doctor was given; its text never holds a password.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any
from urllib.parse import urlsplit

import pika
import pika.exceptions

from sharding.amqp.addresses import amqp_parameters
from sharding.amqp.connected_node import REPLY_TO, node_token
from sharding.amqp.session import innermost
from sharding.cluster.management import Management, NoAnswer, management_api
from sharding.doctor.findings import SILENCE, Finding, ok, problem
from sharding.errors import Unreachable, WarrenError, reason
from sharding.stream.connections.connection import ConnectOptions, Login, StreamClient, connect
from sharding.stream.connections.transport import Transport, dial, resolved
from sharding.stream.errors import (
    AccessRefused,
    AuthenticationFailed,
    ConnectionLost,
    PeerNotTrusted,
)
from sharding.stream.protocol.constants import Broker
from sharding.stream.protocol.handshake import PeerProperties
from sharding.stream.uris import StreamUri


class Protocol(StrEnum):
    AMQP = "AMQP"
    STREAMS = "streams"
    MANAGEMENT = "management"


@dataclass(frozen=True)
class Place:
    protocol: Protocol
    address: Broker
    user: str
    vhost: str = ""
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    way_in: Any = field(default=None, repr=False)
    """What its protocol's client is opened with, credentials included."""

    def __str__(self) -> str:
        return f"{self.protocol} {self.address}"

    @property
    def amqp(self) -> pika.URLParameters:
        assert isinstance(self.way_in, pika.URLParameters)
        return self.way_in

    @property
    def stream(self) -> StreamUri:
        assert isinstance(self.way_in, StreamUri)
        return self.way_in

    @property
    def management(self) -> Management:
        assert isinstance(self.way_in, Management)
        return self.way_in


def places_from(
    amqp: Iterable[str], management: Iterable[str], streams: Iterable[str]
) -> tuple[Place, ...]:
    """Every URL, checked; `InvalidInput` for one that is none.

    Management URLs without a user get that of the first AMQP URL, as for a `Topology`.
    """
    parameters = [amqp_parameters(url) for url in amqp]
    apis = [(url, management_api(url, *parameters[:1])) for url in management]
    return (
        *map(_amqp_place, parameters),
        *(_management_place(url, api) for url, api in apis),
        *(_stream_place(StreamUri.parse(url)) for url in streams),
    )


def _amqp_place(given: pika.URLParameters) -> Place:
    credentials: Any = given.credentials
    return Place(
        Protocol.AMQP,
        Broker(given.host, given.port),
        credentials.username,
        given.virtual_host,
        given.ssl_options.context if given.ssl_options else None,
        given,
    )


def _management_place(url: str, api: Management) -> Place:
    parts = urlsplit(url)
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    address = Broker(parts.hostname or "", parts.port or (443 if tls else 80))
    return Place(Protocol.MANAGEMENT, address, api.user, "", tls, api)


def _stream_place(uri: StreamUri) -> Place:
    tls = ssl.create_default_context() if uri.tls else None
    return Place(Protocol.STREAMS, uri.address, uri.user, uri.vhost, tls, uri)


class Step(Enum):
    NAME = "name"
    PORT = "port"
    TLS = "TLS"
    ANSWER = "answer"
    """It is silent: who or what it is can't be said."""
    PROTOCOL = "protocol"
    LOGIN = "login"
    VHOST = "virtual host"


@dataclass(frozen=True, slots=True)
class Reached:
    """How a place was found: the step that broke, or who answered."""

    place: Place
    broken: Step | None = None
    detail: str = ""
    product: str = "RabbitMQ"
    version: str = ""
    node: str = ""
    """Who answered: the name, address or token by which this protocol tells nodes apart."""

    @property
    def works(self) -> bool:
        return self.broken is None


_WANTED = {
    Step.NAME: "a name that resolves",
    Step.PORT: "a port that answers",
    Step.TLS: "a certificate that this machine trusts",
    Step.ANSWER: "an answer in time",
    Step.PROTOCOL: "a broker that speaks {protocol}",
    Step.LOGIN: "a login of user {user!r} that is accepted",
    Step.VHOST: "a virtual host {vhost!r} that opens for user {user!r}",
}
_USUAL_PORTS = {
    Protocol.AMQP: "5672 (5671 with TLS)",
    Protocol.STREAMS: "5552 (5551 with TLS)",
    Protocol.MANAGEMENT: "15672 (15671 with TLS)",
}
_FIXES = {
    Step.NAME: "Correct the host name, or make it known to this machine's resolver.",
    Step.PORT: "Correct the port (RabbitMQ's for {protocol} is {port}), start the node, or open "
    "the firewall between here and there.",
    Step.TLS: "Name the authority's file in SSL_CERT_FILE and the host as the certificate does, "
    "or use the URL without TLS if the port has none.",
    Step.ANSWER: SILENCE,
    Step.PROTOCOL: "Give the URL of the {protocol} port, {port}; with TLS the URL begins with "
    "{secure}.",
    Step.LOGIN: "Correct user and password (in a URL / # ? are written %2F %23 %3F); "
    "'rabbitmqctl authenticate_user {user}' tries them on a node. guest is let in from the "
    "broker's own machine only.",
    Step.VHOST: "Correct the virtual host (/ itself is written %2F or left out), make it with "
    "'rabbitmqctl add_vhost {vhost}', or let the user in with "
    '\'rabbitmqctl set_permissions -p {vhost} {user} ".*" ".*" ".*"\'.',
}
_SECURE = {
    Protocol.AMQP: "amqps://",
    Protocol.STREAMS: "rabbitmq-stream+tls://",
    Protocol.MANAGEMENT: "https://",
}
_STREAM_PORT = (
    " If nothing listens there, enable streams on the node: "
    "'rabbitmq-plugins enable rabbitmq_stream rabbitmq_stream_management'."
)
_NO_TAG = "Not management user"


def judge_place(reached: Reached) -> Finding:
    place = reached.place
    words = {
        "protocol": place.protocol.value,
        "user": place.user,
        "vhost": place.vhost,
        "port": _USUAL_PORTS[place.protocol],
        "secure": _SECURE[place.protocol],
    }
    if reached.broken is None:
        wanted = "an address that lets this user in"
        where = f", virtual host {place.vhost!r}" if place.vhost else ""
        who = f"{reached.product} {reached.version} for user {place.user!r}{where}"
        return ok("address", str(place), wanted, who)
    fix = _FIXES[reached.broken].format(**words)
    if reached.broken is Step.LOGIN and _NO_TAG in reached.detail:
        fix = f"Run 'rabbitmqctl set_user_tags {place.user} monitoring' on a node."
    if reached.broken is Step.PORT and place.protocol is Protocol.STREAMS:
        fix += _STREAM_PORT
    wanted = _WANTED[reached.broken].format(**words)
    return problem(reached.broken.value, str(place), wanted, reached.detail, fix)


# A management port that is sent no whole line hangs up after 5 s, without a word: just when a
# question's usual time is up, so it was taken for a silent broker or a stranger by chance. With the
# end of an HTTP request in the greeting it answers 400 at once. A broker does not mind: to AMQP it
# is the begin of a frame, to streams a part of a name.
_END_OF_HTTP = "\r\n\r\n"
_GREETINGS = {
    Protocol.AMQP: b"AMQP\x00\x00\x09\x01" + _END_OF_HTTP.encode(),
    Protocol.STREAMS: PeerProperties({"connection_name": "warren doctor" + _END_OF_HTTP}).encode(1),
}
_FIRST_BYTES = {Protocol.AMQP: b"\x01", Protocol.STREAMS: b"\x00"}
"""Of the answer: a frame of the type method, and the size of a frame that is no giant."""
_TLS_ALERT = b"\x15\x03"
_LOGIN_REFUSED, _VHOST_REFUSED = 403, 530
_QUESTIONS = 4


def probe(place: Place, timeout: float) -> Reached:
    """How far this place lets us in, within about `timeout` for each step."""
    try:
        resolved(place.address, time.monotonic() + timeout)
    except Unreachable as error:
        return Reached(place, Step.NAME, str(error))
    try:
        transport = dial(place.address, time.monotonic() + timeout, None, None)
        if place.tls is not None:
            transport.close()
    except Unreachable as error:
        return Reached(place, Step.PORT, str(error))
    try:
        if place.tls is not None:
            transport = dial(place.address, time.monotonic() + timeout, place.tls, None)
    except (PeerNotTrusted, Unreachable) as error:
        return Reached(place, Step.TLS, str(error))
    try:
        stranger = _stranger(transport, place.protocol, timeout)
    except TimeoutError as error:
        return Reached(place, Step.ANSWER, str(error))
    except ConnectionLost as error:
        stranger = str(error)
    finally:
        transport.close()
    if stranger is not None:
        return Reached(place, Step.PROTOCOL, stranger)
    return _PROBES[place.protocol](place, timeout)


def who_answers(place: Place, timeout: float) -> str:
    """The node that a connection to a place which works ends at; "" if it does not work now.

    One connection and no more: a balancer that deals them out in turn would always give one of two
    nodes the first and the other the second.
    """
    return _PROBES[place.protocol](place, timeout).node


def _stranger(transport: Transport, protocol: Protocol, timeout: float) -> str | None:
    """What answers a greeting, if it is no broker that speaks the protocol; HTTP has none."""
    if protocol not in _GREETINGS:
        return None
    deadline = time.monotonic() + timeout
    transport.send([_GREETINGS[protocol]])
    buffer = bytearray(8)
    while (count := transport.receive_into(memoryview(buffer))) is None:
        left = deadline - time.monotonic()
        if left <= 0 or not transport.wait(left, to_receive=True):
            raise TimeoutError(f"no answer to the greeting of {protocol} within {timeout:g} s")
    answer = bytes(buffer[:count])
    if answer.startswith(_FIRST_BYTES[protocol]):
        return None
    if answer.startswith(_TLS_ALERT):
        return "the port speaks TLS, and the URL does not"
    if not answer:
        return f"the connection was ended at the greeting of {protocol}"
    return f"an answer in another protocol than {protocol}: {answer!r}"


# AMQP


@contextmanager
def amqp_connection(place: Place, timeout: float) -> Iterator[pika.BlockingConnection]:
    """An open connection that is ended, in use or not, after a few times `timeout`.

    pika waits for answers without end, and a broker may hold one back as long as a node hangs.
    """
    connection = _open_amqp(place, timeout)
    insides: Any = connection
    end = threading.Timer(_QUESTIONS * timeout, _shut_down, [insides._impl._transport._sock])
    end.daemon = True
    end.start()
    try:
        yield connection
    finally:
        with suppress(pika.exceptions.AMQPError):
            if connection.is_open:
                connection.close()
        end.cancel()


def _shut_down(sock: socket.socket) -> None:
    with suppress(OSError):  # closed already
        sock.shutdown(socket.SHUT_RDWR)


def _open_amqp(place: Place, timeout: float) -> pika.BlockingConnection:
    given = place.amqp
    parameters = pika.ConnectionParameters(
        host=given.host,
        port=given.port,
        virtual_host=given.virtual_host,
        credentials=given.credentials,
        ssl_options=given.ssl_options,
        socket_timeout=timeout,
        stack_timeout=timeout,
        blocked_connection_timeout=timeout,
        heartbeat=10,
        connection_attempts=1,
        client_properties={"connection_name": "warren doctor"},
    )
    return pika.BlockingConnection(parameters)


def _probe_amqp(place: Place, timeout: float) -> Reached:
    said: dict[str, Any] = {}
    token = ""
    try:
        with amqp_connection(place, timeout) as connection:
            insides: Any = connection
            said = insides._impl.server_properties or {}
            # Who may not publish is not told; permissions are another check.
            with suppress(pika.exceptions.AMQPError):
                token = _token(connection)
    except pika.exceptions.AMQPError as error:
        code, text = _why(error)
        if code == _LOGIN_REFUSED or isinstance(error, pika.exceptions.ProbableAuthenticationError):
            return Reached(place, Step.LOGIN, text)
        if code == _VHOST_REFUSED or isinstance(error, pika.exceptions.ProbableAccessDeniedError):
            return Reached(place, Step.VHOST, text)
        return Reached(place, Step.PROTOCOL, text)
    product, version = str(said.get("product", "")), str(said.get("version", ""))
    return Reached(place, product=product, version=version, node=token)


def _token(connection: pika.BlockingConnection) -> str:
    """What tells the connected node from others, without any right to the management API."""
    channel = connection.channel()
    insides: Any = channel
    returned: list[str | None] = []
    insides._impl.add_on_return_callback(
        lambda _, __, properties, ___: returned.append(properties.reply_to)
    )
    channel.basic_consume(REPLY_TO, lambda *_: None, auto_ack=True)
    properties = pika.BasicProperties(reply_to=REPLY_TO)
    channel.basic_publish("", "warren.nobody", b"", properties, mandatory=True)
    channel.close()
    return node_token(returned[0]) if returned and returned[0] else ""


def _why(error: BaseException) -> tuple[int | None, str]:
    """The broker's code and words; pika wraps them several times."""
    cause = innermost(error)
    code = getattr(cause, "reply_code", None)
    return code, getattr(cause, "reply_text", None) or reason(cause)


# Streams


def open_stream(place: Place, timeout: float) -> StreamClient:
    uri = place.stream
    return connect(
        place.address,
        ConnectOptions(
            login=Login(uri.user, uri.password, "PLAIN", uri.vhost),
            tls=place.tls,
            connect_timeout=timeout,
            request_timeout=timeout,
            connection_name="warren doctor",
        ),
    )


def _probe_stream(place: Place, timeout: float) -> Reached:
    try:
        client = open_stream(place, timeout)
    except AuthenticationFailed as error:
        return Reached(place, Step.LOGIN, str(error))
    except AccessRefused as error:
        return Reached(place, Step.VHOST, str(error))
    except WarrenError as error:
        step = Step.ANSWER if isinstance(error.__cause__, TimeoutError) else Step.PROTOCOL
        return Reached(place, step, str(error))
    try:
        version = ".".join(map(str, client.server_version))
        return Reached(place, version=version, node=str(client.node))
    finally:
        client.close(timeout)


# Management


def _probe_management(place: Place, timeout: float) -> Reached:
    try:
        overview = place.management.get("overview", timeout=timeout)
        # Users without the tag monitoring are not told the node.
        version, node = str(overview["rabbitmq_version"]), str(overview.get("node", ""))
    except NoAnswer as error:
        step = Step.LOGIN if error.status in (401, 403) else Step.PROTOCOL
        step = step if error.in_time else Step.ANSWER
        return Reached(place, step, error.reason or str(error))
    except (AttributeError, KeyError, TypeError):
        return Reached(place, Step.PROTOCOL, "an answer that is not RabbitMQ's")
    return Reached(place, version=version, node=node)


_PROBES = {
    Protocol.AMQP: _probe_amqp,
    Protocol.STREAMS: _probe_stream,
    Protocol.MANAGEMENT: _probe_management,
}
