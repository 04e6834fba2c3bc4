"""How to reach the cluster: the options that reading and writing share.

| option | default | meaning |
|---|---|---|
| `uri` | `rabbitmq-stream://localhost:5552` | one or more addresses, with commas between, of one \
cluster; `rabbitmq-stream+tls://` for TLS; the path is the virtual host; never a user or password |
| `user`, `userFile` | `WARREN_USER`, else guest | see `Credentials` |
| `password`, `passwordFile`, `passwordEnv` | `WARREN_PASSWORD`, else guest | see `Credentials` |
| `mechanism` | `plain` | `plain`, `external` (a TLS certificate), `anonymous` |
| `loadBalancer` | `false` | the first address leads to a load balancer |
| `tlsCaFile` | the system's | the authorities to trust, a PEM file on each executor |
| `tlsCertificateFile`, `tlsKeyFile` | none | the client's own certificate and key |
| `tlsServerName` | the host dialled | the name that certificates must have |
| `zones` | none | a JSON object from hosts to zones, the executors' own hosts included |
| `connectTimeout` | `5s` | for one connection |
| `requestTimeout` | `10s` | for one answer of a broker |
| `heartbeat` | `60s` | a connection that is silent for twice as long is dead |

The own host is compared by its name; where that is not the name the nodes know (in containers),
the environment variable `WARREN_OWN_HOSTS` adds others, with commas between.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import SplitResult, quote, urlsplit, urlunsplit

from sharding.amqp.addresses import checked_parts
from sharding.errors import InvalidInput, LocalError
from sharding.stream.protocol.constants import Limits
from spark.options.values import BadOption, Hidden, OptionValues

if TYPE_CHECKING:
    from sharding.stream.environment import EnvironmentOptions

USER_VARIABLE, PASSWORD_VARIABLE = "WARREN_USER", "WARREN_PASSWORD"
_DEFAULT = "guest"


class NoCredentials(LocalError):
    """A file or a variable that should hold a user or a password is not there, or empty."""


@dataclass(frozen=True)
class Login:
    """A user and a password, found in this process."""

    user: str
    password: str = field(repr=False)

    def into(self, uri: str) -> str:
        """`uri`, which holds no login, with this one."""
        parts = urlsplit(uri)
        who = f"{quote(self.user, safe='')}:{quote(self.password, safe='')}"
        return urlunsplit(parts._replace(netloc=f"{who}@{parts.netloc}"))


@dataclass(frozen=True)
class Credentials:
    """Who logs in, and where each process gets the password from.

    In order: the options `user` and `password`; the files or the environment variable that the
    options `userFile`, `passwordFile`, `passwordEnv` name; the environment variables `WARREN_USER`
    and `WARREN_PASSWORD`; guest. Files and variables are those of the process that connects, so on
    a cluster each executor needs them. Then nothing secret leaves the driver: this holds only
    names, and what they lead to is looked up where a connection is made.

    A password in an option travels with the tasks, since it has to. It is in no repr and no error.
    """

    user: str | None = None
    user_file: str | None = None
    password: str | None = field(default=None, repr=False)
    password_file: str | None = None
    password_env: str | None = None

    @classmethod
    def parse(cls, values: OptionValues) -> Credentials:
        values.at_most_one_of("user", "userFile")
        values.at_most_one_of("password", "passwordFile", "passwordEnv")
        return cls(
            user=values.text("user"),
            user_file=values.text("userFile"),
            password=values.secret("password"),
            password_file=values.text("passwordFile"),
            password_env=values.text("passwordEnv"),
        )

    def login(
        self,
        environment: Mapping[str, str] = os.environ,
        read_file: Callable[[str], str] = lambda path: Path(path).read_text(encoding="utf-8"),
    ) -> Login:
        """Look them up, in this process and now: files and variables may have changed."""
        user = self.user
        if user is None and self.user_file is not None:
            user = _in_file("userFile", self.user_file, read_file)
        password = self.password
        if password is None and self.password_file is not None:
            password = _in_file("passwordFile", self.password_file, read_file)
        elif password is None and self.password_env is not None:
            password = environment.get(self.password_env)
            if not password:
                raise NoCredentials(
                    f"option 'passwordEnv': the environment variable {self.password_env!r} is not "
                    "set in this process; every executor needs it"
                )
        return Login(
            user if user is not None else environment.get(USER_VARIABLE, _DEFAULT),
            password if password is not None else environment.get(PASSWORD_VARIABLE, _DEFAULT),
        )


def uris_without_login(
    values: OptionValues, option: str, schemes: tuple[str, ...]
) -> tuple[str, ...]:
    """The addresses of an option, which must hold neither user nor password."""
    # Before anything else is looked at: a password may be the reason why they can't be told apart.
    _refuse_login(option, values.text(option, ""))
    uris = values.names(option, shown=False)
    for uri in uris:
        uri_without_login(option, uri, schemes)
    return uris


def uri_without_login(option: str, text: str, schemes: tuple[str, ...]) -> SplitResult:
    """The parts of `text`, which must hold neither user nor password."""
    _refuse_login(option, text)
    try:
        return checked_parts(option, text, schemes)
    except InvalidInput as unreadable:
        found = unreadable.found
    places = " or ".join(f"{scheme}://" for scheme in schemes)
    raise BadOption(option, f"must begin with {places}, then host:port", found)


def _refuse_login(option: str, text: str) -> None:
    if "@" in text:
        rule = (
            "must hold no user and no password, since Spark shows it in query plans; give them "
            "with the options user and password, passwordFile or passwordEnv"
        )
        raise BadOption(option, rule, Hidden())


def _in_file(option: str, path: str, read_file: Callable[[str], str]) -> str:
    try:
        text = read_file(path)
    except (OSError, UnicodeDecodeError) as error:
        # Not the error's own text: that of a decoding error holds the content.
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise NoCredentials(
            f"option {option!r}: {path!r} can't be read in this process ({why}); "
            "every executor needs it"
        ) from None
    # Editors and `echo` end a file with a line break, which is not a part of what it holds.
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise NoCredentials(f"option {option!r}: {path!r} is empty")
    return text


OWN_HOSTS_VARIABLE = "WARREN_OWN_HOSTS"
_DEFAULT_URI = "rabbitmq-stream://localhost:5552"
_PLAIN, _TLS = "rabbitmq-stream", "rabbitmq-stream+tls"

Mechanism = Literal["PLAIN", "EXTERNAL", "ANONYMOUS"]
_MECHANISMS: dict[str, Mechanism] = {
    "plain": "PLAIN",
    "external": "EXTERNAL",
    "anonymous": "ANONYMOUS",
}


@dataclass(frozen=True)
class Tls:
    """Where certificates are found, in the process that connects."""

    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None

    def context(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.certificate_file is not None:
                # An encrypted key is refused: its password would be asked for at a terminal.
                context.load_cert_chain(self.certificate_file, self.key_file, password=_no_password)
        except (OSError, ValueError) as error:
            files = [self.ca_file, self.certificate_file, self.key_file]
            named = ", ".join(file for file in files if file)
            raise LocalError(
                f"options tlsCaFile, tlsCertificateFile, tlsKeyFile: {named} can't be used in this "
                f"process ({error}); every executor needs them"
            ) from None
        return context


@dataclass(frozen=True)
class ConnectOptions:
    """How to reach the cluster. Equal options share connections, so it can be a dict's key."""

    uris: tuple[str, ...] = (_DEFAULT_URI,)
    credentials: Credentials = field(default_factory=Credentials)
    mechanism: Mechanism = "PLAIN"
    load_balancer: bool = False
    tls: Tls | None = None
    zones: tuple[tuple[str, str], ...] = ()
    connect_timeout: float = 5.0
    request_timeout: float = 10.0
    heartbeat: float = 60.0
    limits: Limits = Limits()

    @classmethod
    def parse(cls, values: OptionValues) -> ConnectOptions:
        uris = uris_without_login(values, "uri", (_PLAIN, _TLS)) or (_DEFAULT_URI,)
        schemes = {urlsplit(uri).scheme for uri in uris}
        if len(schemes) > 1:
            rule = f"must all begin with {_PLAIN}://, or all with {_TLS}://"
            raise BadOption("uri", rule, ", ".join(uris))
        return cls(
            uris=uris,
            credentials=Credentials.parse(values),
            mechanism=values.choice("mechanism", _MECHANISMS, "PLAIN"),
            load_balancer=values.boolean("loadBalancer", False),
            tls=_tls(values, _TLS in schemes),
            zones=_zones(values),
            connect_timeout=values.seconds("connectTimeout", 5.0),
            request_timeout=values.seconds("requestTimeout", 10.0),
            heartbeat=values.seconds("heartbeat", 60.0),
        )

    @property
    def vhost(self) -> str:
        from sharding.stream.uris import StreamUri

        return StreamUri.parse(self.uris[0]).vhost

    def environment_options(
        self, environment: Mapping[str, str] = os.environ
    ) -> EnvironmentOptions:
        """The stream client's options, for this process."""
        from sharding.stream.environment import EnvironmentOptions

        return EnvironmentOptions(
            load_balancer=self.load_balancer,
            tls=self.tls.context() if self.tls else None,
            server_name=self.tls.server_name if self.tls else None,
            mechanism=self.mechanism,
            own_hosts=own_hosts(environment),
            zones=dict(self.zones),
            connect_timeout=self.connect_timeout,
            request_timeout=self.request_timeout,
            heartbeat=self.heartbeat,
            limits=self.limits,
            connection_name="warren-spark",
        )


def own_hosts(environment: Mapping[str, str]) -> frozenset[str]:
    """The names of this host."""
    others = environment.get(OWN_HOSTS_VARIABLE, "").split(",")
    return frozenset({socket.gethostname(), *(name.strip() for name in others if name.strip())})


def _tls(values: OptionValues, wanted: bool) -> Tls | None:
    tls = Tls(
        ca_file=values.text("tlsCaFile"),
        certificate_file=values.text("tlsCertificateFile"),
        key_file=values.text("tlsKeyFile"),
        server_name=values.text("tlsServerName"),
    )
    if not wanted and tls != Tls():
        raise BadOption(
            "uri", f"must begin with {_TLS}:// for the tls… options", values.text("uri")
        )
    if tls.key_file is not None and tls.certificate_file is None:
        raise BadOption("tlsKeyFile", "needs tlsCertificateFile", tls.key_file)
    return tls if wanted else None


def _zones(values: OptionValues) -> tuple[tuple[str, str], ...]:
    zones = values.json_object("zones") or {}
    pairs = [(host, zone) for host, zone in sorted(zones.items()) if isinstance(zone, str)]
    if len(pairs) < len(zones):
        raise BadOption("zones", "must be a JSON object from hosts to zones, all text", zones)
    return tuple(pairs)


def _no_password() -> str:
    raise ValueError("the key needs a password")
