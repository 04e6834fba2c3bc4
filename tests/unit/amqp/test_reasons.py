"""Why a connection failed is said in the words of its cause, however deep pika wraps it."""

from __future__ import annotations

import pytest
from pika.adapters.utils import connection_workflow as workflow
from pika.exceptions import AMQPConnectionError

from sharding.amqp.session import said_by_pika

REFUSED = ConnectionRefusedError(111, "Connection refused")


@pytest.mark.parametrize(
    "error",
    [
        REFUSED,
        AMQPConnectionError(REFUSED),
        AMQPConnectionError(
            workflow.AMQPConnectionWorkflowFailed(
                [OSError("an earlier one"), workflow.AMQPConnectorSocketConnectError(REFUSED)]
            )
        ),
    ],
)
def test_reason_is_the_innermost_cause(error: BaseException) -> None:
    assert said_by_pika(error) == "[Errno 111] Connection refused"


def test_reason_without_a_text_is_its_kind() -> None:
    assert said_by_pika(AMQPConnectionError()) == "AMQPConnectionError"
    assert said_by_pika("two\n lines") == "two lines"
