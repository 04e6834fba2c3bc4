"""Which streams are read: one, those of a super stream, several, or all whose names match."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from sharding.cluster.management import Management
from sharding.errors import RemoteError
from sharding.stream.errors import StreamNotFound
from spark.credentials import uri_without_login
from spark.option_values import BadOption, OptionValues
from spark.options import ConnectOptions

Kind: TypeAlias = Literal["stream", "superStream", "streams", "streamPattern"]
_KINDS: tuple[Kind, ...] = ("stream", "superStream", "streams", "streamPattern")


class Cluster(Protocol):
    """What is asked of the cluster; `StreamEnvironment` in real life."""

    def partitions(self, super_stream: str) -> tuple[str, ...]: ...

    def route(self, stream: str) -> object: ...

    def exists(self, stream: str) -> bool: ...


@dataclass(frozen=True)
class Selection:
    kind: Kind
    names: tuple[str, ...] = ()
    """Of streams, or of the one super stream."""
    pattern: str = ""
    management_url: str = ""

    @classmethod
    def parse(cls, values: OptionValues) -> Selection:
        given = values.one_of(*_KINDS)
        kind = next(kind for kind in _KINDS if kind == given)
        url = values.text("managementUrl", "")
        names = values.names("streams")
        pattern = values.text("streamPattern", "")
        single = values.text("stream") or values.text("superStream")
        if url:
            uri_without_login("managementUrl", url)
        if kind != "streamPattern":
            if url:
                raise BadOption("managementUrl", "is for streamPattern only", kind)
            return cls(kind, (single,) if single else names)
        try:
            re.compile(pattern)
        except re.error as problem:
            rule = f"must be a regular expression ({problem})"
            raise BadOption("streamPattern", rule, pattern) from None
        if not url:
            rule = "needs managementUrl (http://host:15672): only the management API lists streams"
            raise BadOption("streamPattern", rule, "none")
        return cls(kind, pattern=pattern, management_url=url.rstrip("/"))

    def find(
        self, cluster: Cluster, all_streams: Callable[[], Iterable[str]], *, missing_ok: bool
    ) -> dict[str, int]:
        """The streams there are now, in order, each with its number in its super stream."""
        if self.kind == "superStream":
            return self._of_super_stream(cluster)
        if self.kind == "streamPattern":
            matches = re.compile(self.pattern).fullmatch
            return dict.fromkeys(sorted(name for name in all_streams() if matches(name)), 0)
        missing = [name for name in self.names if not _exists(cluster, name)]
        if missing and not missing_ok:
            raise BadOption(self.kind, "must exist", ", ".join(missing))
        return dict.fromkeys((name for name in self.names if name not in missing), 0)

    def _of_super_stream(self, cluster: Cluster) -> dict[str, int]:
        (name,) = self.names
        try:
            found = cluster.partitions(name)
        except StreamNotFound:
            found = ()
        if not found:
            raise BadOption("superStream", "must be a super stream that exists", name)
        return {stream: number for number, stream in enumerate(found)}


def _exists(cluster: Cluster, stream: str) -> bool:
    """From memory, if it says yes. A no may be old, and is asked for again."""
    try:
        cluster.route(stream)
    except StreamNotFound:
        return cluster.exists(stream)
    return True


def listed_streams(options: ConnectOptions, management_url: str) -> list[str]:
    """The names of all streams in the virtual host, as the management API lists them."""
    login = options.credentials.login()
    management = Management(management_url, login.user, login.password)
    answer = management.get("queues", options.vhost, timeout=options.request_timeout)
    try:
        return [str(queue["name"]) for queue in answer if queue.get("type") == "stream"]
    except (AttributeError, KeyError, TypeError):
        raise RemoteError(
            f"{management_url} does not answer as RabbitMQ's management API does"
        ) from None
