"""Prometheus metrics of whatever counts: one call serves them.

    from sharding import metrics

    server = metrics.serve(9100, topology, environment, producer, publisher, group)

The names are in docs/sight.md. Needs the extra `metrics`. Sources are held until the server is
closed; one that fails is left out of the answer and logged, so that the others are still seen.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator
from typing import Any

from sharding.errors import InvalidInput, LocalError
from sharding.metrics.names import Sample, Source, added_up, samples_of

try:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
except ModuleNotFoundError as missing:
    if str(missing.name).partition(".")[0] != "prometheus_client":
        raise
    raise ModuleNotFoundError(
        "metrics need an extra: pip install 'rabbit-warren[metrics]'", name=missing.name
    ) from None

logger = logging.getLogger("warren.metrics")

_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}


class Collector:
    """For a registry of prometheus_client; asks the sources at each scrape."""

    def __init__(self, sources: Iterable[Source] = ()) -> None:
        self._sources: tuple[Source, ...] = ()
        self.add(*sources)

    def add(self, *sources: Source) -> None:
        """Also collect from these; one that is there already is not counted twice."""
        for source in sources:
            if not any(_has(source, name) for name in ("counters", "samples")):
                rule = "must have counters: a Topology, a StreamEnvironment, a Producer …"
                raise InvalidInput("source", rule, type(source).__name__)
            if not any(source is known for known in self._sources):
                # New ones: a scrape may be going through them.
                self._sources = (*self._sources, source)

    def collect(self) -> Iterator[Metric]:
        for metric, values in added_up(self._samples()).items():
            names = tuple(sorted({name for labels in values for name, _ in labels}))
            family: Any = _FAMILIES.get(metric.kind, _untyped)(
                metric.name, metric.help, labels=names
            )
            for labels, value in values.items():
                known = dict(labels)
                family.add_metric([known.get(name, "") for name in names], value)
            yield family

    def describe(self) -> list[Metric]:
        """Nothing: a registry would else collect when the collector is registered."""
        return []

    def _samples(self) -> Iterator[Sample]:
        for source in self._sources:
            try:
                yield from list(samples_of(source))
            except Exception:
                logger.exception("no metrics of a %s", type(source).__name__)


def _has(source: object, name: str) -> bool:
    """Without asking for it: a property may fail, and that is a scrape's matter."""
    return inspect.getattr_static(source, name, None) is not None


def _untyped(name: str, documentation: str, labels: tuple[str, ...]) -> Any:
    from prometheus_client.core import UnknownMetricFamily

    return UnknownMetricFamily(name, documentation, labels=labels)


class MetricsServer:
    """An HTTP server in a thread of its own, until it is closed."""

    def __init__(self, port: int, addr: str, sources: Iterable[Source]) -> None:
        self.collector = Collector(sources)
        registry = CollectorRegistry()
        registry.register(self.collector)
        try:
            self._server, self._thread = start_http_server(port, addr, registry)
        except OSError as error:
            raise LocalError(
                f"metrics can't be served at {addr}:{port}: {error.strerror}"
            ) from None

    @property
    def port(self) -> int:
        """The one that listens; differs from the one asked for only if that was 0."""
        return int(self._server.server_port)

    def add(self, *sources: Source) -> None:
        self.collector.add(*sources)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def collector(*sources: Source) -> Collector:
    """To register with a registry that the application serves by itself."""
    return Collector(sources)


def serve(port: int, *sources: Source, addr: str = "127.0.0.1") -> MetricsServer:
    """Serve the metrics of these sources at `http://addr:port/metrics`.

    Others on the network see them only with another `addr`: names of queues are no secret to
    everybody.
    """
    return MetricsServer(port, addr, sources)
