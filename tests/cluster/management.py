"""A few questions to the management API, with the standard library."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any


class NoAnswer(ConnectionError):
    """The node does not answer, or not with sense; it may be starting or stopping."""


@dataclass(frozen=True)
class Management:
    """The management API of one node."""

    url: str
    user: str = "guest"
    password: str = "guest"

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
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                content = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                raise NoAnswer(f"{method} {error.url}: {error.code} {error.reason}") from None
        except (OSError, ValueError) as error:
            raise NoAnswer(f"{method} {self.url}: {error}") from None
        return json.loads(content) if content else None

    def _authorization(self) -> str:
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
