"""The same examples in every run: a failure here is a change of the code, never luck."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("the same every time", derandomize=True, database=None, deadline=None)
settings.load_profile("the same every time")
