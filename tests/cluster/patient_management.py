"""The management API for tests: a broker that was held up for some seconds has not failed."""

from __future__ import annotations

from typing import Any

from sharding.cluster.management import Management
from tests.cluster.waiting import PATIENCE


class PatientManagement(Management):
    def get(self, *path: str, timeout: float = PATIENCE) -> Any:
        return super().get(*path, timeout=timeout)

    def call(self, method: str, *path: str, body: object = None, timeout: float = PATIENCE) -> Any:
        return super().call(method, *path, body=body, timeout=timeout)
