"""`StreamConsumerGroup`: workers that share the partitions of a super stream, or one stream.

    with StreamConsumerGroup(environment, "invoices", handle, group="billing") as group:
        group.run()                # until stop(), or SIGTERM or SIGINT in the main thread

It is the front of a `StreamWorker`, which has threads of its own.
"""

from __future__ import annotations

from sharding.groups.handling.threads import Handler, HandlerThreads
from sharding.groups.log import logger
from sharding.groups.options import GroupOptions
from sharding.groups.running import BlockingFront, OnFailure
from sharding.groups.streams.options import StreamGroupOptions, for_streams
from sharding.groups.streams.worker import Partitions, StreamWorker, members_stream
from sharding.stream.environment import StreamEnvironment
from sharding.stream.errors import NotSupported

FIRST_VERSION = (3, 11)


class StreamConsumerGroup(BlockingFront):
    """Any number of these with one `group` name, in any processes, read one stream together.

    Each partition is read by one of them at a time; loads differ by at most one partition; those of
    a worker that dies go to the others. Of a plain stream one worker reads, the others wait.
    `handler` gets one `Delivery` at a time, or with `batch_size` above 1 a list; the group's offset
    passes a message when it returns, and it is tried again when it raises.

    A stream may have any number of groups: each has offsets of its own and sees every message. The
    members of a group have to be workers of Warren. Needs RabbitMQ 3.11 or later.

    It works from `with` (or `start()`) on; `run()` waits until it is stopped.
    """

    options: StreamGroupOptions
    _worker: StreamWorker | None = None

    def __init__(
        self,
        environment: StreamEnvironment,
        stream: str,
        handler: Handler,
        *,
        group: str,
        options: GroupOptions | None = None,
        on_failure: OnFailure | None = None,
    ) -> None:
        super().__init__(stream, group, handler, for_streams(options), on_failure)
        self.options.reading(group)  # raises what the stream client would
        members_stream(stream)  # raises if that can't be a name
        self.stream = stream
        self.group = group
        self._environment = environment

    def _begin(self) -> None:
        version = self._environment.server_version
        if version < FIRST_VERSION:
            found = ".".join(map(str, version))
            raise NotSupported(
                f"consumer groups over streams need RabbitMQ 3.11 or later, not {found}: older "
                "brokers know no single active consumer"
            )
        access = self._environment.lend(self)
        partitions = Partitions(access, self.stream, self.options.answer_timeout)
        partitions.find()
        runner = self._runner = HandlerThreads(self._handler, self.options, on_failure=self._fail)
        worker = self._worker = StreamWorker(
            self.worker,
            self._environment,
            access,
            partitions,
            self.group,
            self.options,
            runner,
            self._fail,
        )
        try:
            worker.start()
        except BaseException:
            self._runner = self._worker = None
            worker.leave(0)
            raise

    def _end(self, patience: float) -> bool:
        if self._worker is None:
            return True
        self._worker.wind_down()
        logger.info("stopping; handlers have %g s to finish", patience)
        return self._worker.leave(patience)

    close = BlockingFront.stop  # an environment closes what uses it
