"""The four kinds of channel that the script runs on."""

from __future__ import annotations

from tests.conformance.aio import AioCaller, RobustCaller
from tests.conformance.blocking import BlockingCaller
from tests.conformance.caller import Caller, Publication, Wrap
from tests.conformance.selecting import AsyncCaller

CALLERS: dict[str, type[Caller]] = {
    "blocking": BlockingCaller,
    "async": AsyncCaller,
    "aio": AioCaller,
    "robust": RobustCaller,
}

__all__ = ["CALLERS", "Caller", "Publication", "Wrap"]
