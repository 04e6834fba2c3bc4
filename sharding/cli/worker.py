"""`warren worker`: one worker of a consumer group, in the foreground."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from sharding.cli.options import LOCAL_BROKER, ManagementUrls, StreamUrls, Urls, app
from sharding.cluster.topology import Topology
from sharding.errors import InvalidInput
from sharding.groups import ConsumerGroup, GroupOptions, Retry
from sharding.groups.options import DEAD_LETTERS_OF_GROUP

LOCAL_STREAMS = "rabbitmq-stream://guest:guest@localhost:5552"
HANDLER_RULE = "must look like pkg.module:function"


@app.command()
def worker(
    handler: Annotated[str, typer.Argument(help="A function, as pkg.module:function.")],
    queue: Annotated[str | None, typer.Option(help="The logical queue to read.")] = None,
    stream: Annotated[str | None, typer.Option(help="Or the stream or super stream.")] = None,
    group: Annotated[str | None, typer.Option(help="The group's name; for a stream.")] = None,
    prefetch: Annotated[int, typer.Option(help="Messages of a shard in hand.")] = 100,
    parallelism: Annotated[int, typer.Option(help="Handlers at work at one time.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Above 1 the handler gets lists.")] = 1,
    batch_wait: Annotated[float, typer.Option(help="Seconds that a batch may fill.")] = 0.1,
    retries: Annotated[int, typer.Option(help="Attempts after the first one.")] = 4,
    dead_letter: Annotated[
        str, typer.Option(help="Where failed messages go; '' keeps trying without end.")
    ] = DEAD_LETTERS_OF_GROUP,
    handler_timeout: Annotated[
        float | None, typer.Option(help="Seconds after which a handler counts as hanging.")
    ] = None,
    consumer_timeout: Annotated[
        float, typer.Option(help="The broker's consumer_timeout, in seconds; 0 if it has none.")
    ] = 1800.0,
    stop_timeout: Annotated[
        float, typer.Option(help="Seconds that handlers may finish in at SIGTERM.")
    ] = 30.0,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve Prometheus metrics at this port of localhost.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Say what changes, and why.")] = False,
    url: Urls = LOCAL_BROKER,
    stream_url: StreamUrls = [LOCAL_STREAMS],  # noqa: B006 - typer copies it
    offset: Annotated[
        str, typer.Option(help="Where a new group of a stream begins: first, last or next.")
    ] = "first",
    management: ManagementUrls = [],  # noqa: B006 - typer copies it
) -> None:
    """Handle the messages of a logical queue or a stream, together with other workers.

    Runs until SIGTERM or SIGINT; then it finishes what is in hand and gives the rest back.
    """
    _log_to_stderr(verbose)
    options = GroupOptions(
        prefetch=prefetch,
        parallelism=parallelism,
        batch_size=batch_size,
        batch_wait=batch_wait,
        retry=Retry(attempts=retries + 1),
        dead_letter=dead_letter or None,
        handler_timeout=handler_timeout,
        consumer_timeout=consumer_timeout or None,
        stop_timeout=stop_timeout,
    )
    if (queue is None) == (stream is None):
        raise InvalidInput("--queue", "must be given, or --stream, and not both", queue)
    handle = load_handler(handler)
    if queue is not None:
        if group is not None:
            raise InvalidInput("--group", "must not be given: a queue has one group", group)
        run_queue_worker(queue, handle, options, url, management, metrics_port)
    elif stream is not None:
        if group is None:
            raise InvalidInput("--group", "must be given with --stream", group)
        run_stream_worker(stream, group, handle, options, offset, stream_url, metrics_port)


def run_queue_worker(
    queue: str,
    handle: Callable[[Any], Any],
    options: GroupOptions,
    urls: list[str],
    management: list[str],
    metrics_port: int | None,
) -> None:
    with Topology(*urls, management_urls=management) as topology:
        if inspect.iscoroutinefunction(handle):
            import asyncio

            from sharding.groups import AioConsumerGroup

            async def work() -> None:
                group = AioConsumerGroup(topology, queue, handle, options=options)
                with metrics(metrics_port, group, topology):
                    await group.run()

            asyncio.run(work())
            return
        group = ConsumerGroup(topology, queue, handle, options=options)
        with metrics(metrics_port, group, topology):
            group.run()


def run_stream_worker(
    stream: str,
    group_name: str,
    handle: Callable[[Any], Any],
    options: GroupOptions,
    offset: str,
    urls: list[str],
    metrics_port: int | None,
) -> None:
    from sharding.groups import StreamConsumerGroup
    from sharding.groups.streams.options import for_streams
    from sharding.stream import StreamEnvironment

    if inspect.iscoroutinefunction(handle):
        raise InvalidInput("handler", "must not be asynchronous: streams are read in threads", "")
    chosen = for_streams(options, offset=offset)
    with StreamEnvironment(*urls, heartbeat=options.heartbeat) as environment:
        group = StreamConsumerGroup(environment, stream, handle, group=group_name, options=chosen)
        with metrics(metrics_port, group, environment):
            group.run()


@contextmanager
def metrics(port: int | None, *sources: Any) -> Iterator[None]:
    """Serve the counters of these, where a port is given."""
    if port is None:
        yield
        return
    from sharding.metrics.prometheus import serve

    with serve(port, *sources):
        yield


def load_handler(name: str) -> Callable[[Any], Any]:
    """The function that `pkg.module:function` names, found from the current folder too."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise InvalidInput("handler", HANDLER_RULE, name)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise  # the module is there, and lacks one of its own
        raise InvalidInput("handler", f"must be in a module; {module} is none", name) from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise InvalidInput("handler", f"must exist in {module}", name)
        found = getattr(found, part)
    if not callable(found):
        raise InvalidInput("handler", "must be callable", name)
    return found  # type: ignore[no-any-return]  # its types are the application's


def _log_to_stderr(verbose: bool) -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("warren").setLevel(logging.INFO if verbose else logging.WARNING)
