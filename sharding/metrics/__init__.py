"""Figures for Prometheus: what is counted under which name, and the server that shows it.

`names` is pure and imports `errors` only, so everything may count. `prometheus` needs the extra
`metrics`; it is loaded when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sharding.metrics.prometheus import Collector, MetricsServer, collector, serve
else:  # hidden from type checkers, which would take any name for known

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from sharding.metrics import prometheus

        return getattr(prometheus, name)


__all__ = ["Collector", "MetricsServer", "collector", "serve"]
