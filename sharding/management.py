"""The management API of one node, with the standard library."""

from __future__ import annotations

import base64
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from sharding.errors import RemoteError

_LONGEST_REASON = 4_096


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
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                content = answer.read()
            return json.loads(content) if content else None
        except urllib.error.HTTPError as error:
            with error:
                reason = _reason(error.read(_LONGEST_REASON)) or str(error.reason)
                what = f"{method} {self.url}/api/{quoted}: {error.code} {reason}"
                raise NoAnswer(what, error.code, reason) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            # While connecting, urllib wraps it.
            cause = getattr(error, "reason", error)
            in_time = not isinstance(cause, TimeoutError)
            what = f"{method} {self.url}/api/{quoted}: {error}"
            raise NoAnswer(what, in_time=in_time) from None

    def _authorization(self) -> str:
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def _reason(body: bytes) -> str:
    """What the broker says of a refusal: `{"error": …, "reason": …}`, unless it is no broker."""
    try:
        return " ".join(str(json.loads(body)["reason"]).split())
    except (ValueError, KeyError, TypeError):
        return ""
