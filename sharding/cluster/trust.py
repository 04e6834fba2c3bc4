"""Which hosts get the login of this process.

Whoever may write maps could name any host in one. So an address counts if the user named its host,
by a URL or a pattern, or if the cluster confirmed it: a management API that is proved to be its
own.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from sharding.errors import InvalidInput
from sharding.maps.shard_map import Address


class Trust:
    def __init__(self, hosts: Iterable[str], patterns: Iterable[str] = ()) -> None:
        rule = "must be host names, with * and ? for what differs"
        if not isinstance(patterns, Iterable):
            raise InvalidInput("trusted_hosts", rule, patterns)
        patterns = [patterns] if isinstance(patterns, str) else list(patterns)
        if not all(isinstance(each, str) and each for each in patterns):
            raise InvalidInput("trusted_hosts", rule, patterns)
        self._hosts = {host.lower() for host in hosts}
        self._patterns = [each.lower() for each in patterns]
        self._confirmed: frozenset[Address] = frozenset()

    def confirm(self, addresses: Iterable[Address]) -> None:
        """The cluster itself says that its nodes listen there now, and nowhere else."""
        self._confirmed = frozenset(addresses)

    def allows(self, address: Address) -> bool:
        host = address.host.lower()
        return (
            host in self._hosts
            or address in self._confirmed
            or any(fnmatchcase(host, pattern) for pattern in self._patterns)
        )
