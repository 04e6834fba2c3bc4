"""How far a place lets us in: a ladder of steps, and what to do about each one that breaks.

The name resolves, the port answers, TLS is trusted, somebody answers, in the right protocol, the
login works, the virtual host opens. What is above a broken step is not tried. Pure; `probing`
climbs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sharding.doctor.findings import SILENCE, Finding, ok, problem
from sharding.doctor.places import Place, Protocol


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


def judge(reached: Reached) -> Finding:
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
