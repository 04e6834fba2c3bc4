"""Whatever order messages end in, each is acknowledged once, and none that has not ended."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sharding.groups.queues.shard_reader import Acknowledgements


class Broker:
    """A channel's unacknowledged tags, with the broker's rule: an unknown tag is an error."""

    def __init__(self, count: int) -> None:
        self.out = set(range(1, count + 1))

    def ack(self, tag: int, multiple: bool) -> None:
        assert tag in self.out, f"406 unknown delivery tag {tag}"
        self.out -= {each for each in self.out if each <= tag} if multiple else {tag}


@given(st.data(), st.integers(1, 40))
def test_what_has_ended_is_acknowledged_at_once_and_nothing_else_is(
    data: st.DataObject, count: int
) -> None:
    order = data.draw(st.permutations(range(1, count + 1)))
    broker, acknowledgements = Broker(count), Acknowledgements()
    ended: set[int] = set()
    while len(ended) < count:
        size = data.draw(st.integers(1, 6))
        together = order[len(ended) : len(ended) + size]
        ended |= set(together)
        for tag, multiple in acknowledgements.settle(together):
            broker.ack(tag, multiple)
        assert broker.out == set(range(1, count + 1)) - ended


def test_what_ends_in_order_needs_one_acknowledgement() -> None:
    acknowledgements = Acknowledgements()
    assert acknowledgements.settle([1, 2, 3]) == [(3, True)]
    assert acknowledgements.settle([5, 6]) == [(5, False), (6, False)]
    assert acknowledgements.settle([4]) == [(4, True)]
    assert acknowledgements.settle([7]) == [(7, True)]
