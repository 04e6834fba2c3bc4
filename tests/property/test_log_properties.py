"""However writers race, all readers of the log agree on the history.

Each example is a log that several writers wrote: a writer knows the log up to some point, often not
to the end, and appends its proposal. Between the proposals lie records cut off, repeated, citing
epochs that never were or not yet, and plain garbage. The expected history is worked out from what
the writers did, without reading the records.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding import Policy, UnsupportedFormat
from sharding.maps.map_log import State, Verdict, apply, encode
from tests.support.log_records import replay
from tests.support.maps import queue_map, stream_map

GARBAGE = st.binary(max_size=20) | st.sampled_from(
    [b"{}", b"null", b'{"format":1}', b'{"format":1,"base":0}', b'{"format":1,"base":0,"state":{}}']
)

MAPS = [queue_map("ab"), queue_map("abc"), stream_map(2)]


@dataclass(frozen=True)
class Entry:
    """One record of the log; `proposal` is what its writer meant, None if it is no record."""

    record: bytes
    proposal: State | None = None


@st.composite
def proposals(draw: st.DrawFn, seen: State) -> State:
    """What a writer that knows `seen` may want next."""
    policy = Policy(draw(st.sampled_from("ab")), "^images$", draw(st.integers(1, 1000)))
    shard_map = draw(st.sampled_from(MAPS))
    return draw(
        st.sampled_from(
            [
                seen.with_policy(policy),
                seen.without_policy(policy.name),
                seen.with_map(shard_map),
                seen.without_map(shard_map.logical),
            ]
        )
    )


@st.composite
def logs(draw: st.DrawFn) -> list[Entry]:
    writers = [0] * draw(st.integers(2, 4))  # how many records each has read
    log: list[Entry] = []
    states = [State()]  # what who has read so many records knows
    for _ in range(draw(st.integers(0, 25))):
        kind = draw(st.sampled_from(["propose"] * 6 + ["cut", "repeat", "forge", "garbage"]))
        if kind == "garbage" or (kind in {"cut", "repeat"} and not log):
            log.append(Entry(draw(GARBAGE)))
        elif kind == "cut":
            record = draw(st.sampled_from(log)).record
            log.append(Entry(record[: draw(st.integers(0, max(0, len(record) - 1)))]))
        elif kind == "repeat":
            log.append(draw(st.sampled_from(log)))
        elif kind == "forge":
            forged = State(epoch=draw(st.integers(0, 30))).with_policy(Policy("forged", ".", 1))
            log.append(Entry(encode(forged), forged))
        else:
            writer = draw(st.integers(0, len(writers) - 1))
            writers[writer] = draw(st.integers(writers[writer], len(log)))
            proposal = draw(proposals(states[writers[writer]]))
            log.append(Entry(encode(proposal), proposal))
        states.append(apply(states[-1], log[-1].record).state)
    return log


def records(log: list[Entry]) -> list[bytes]:
    return [entry.record for entry in log]


def winners(log: list[Entry]) -> list[State]:
    """The proposals that take effect: of those made for the next epoch, the first."""
    history: list[State] = []
    for entry in log:
        if entry.proposal is not None and entry.proposal.epoch == len(history) + 1:
            history.append(entry.proposal)
    return history


def read(log: list[Entry]) -> list[Verdict]:
    verdicts: list[Verdict] = []
    for record in records(log):
        verdicts.append(apply(verdicts[-1].state if verdicts else State(), record))
    return verdicts


@given(logs())
def test_each_epoch_is_won_by_the_first_that_cites_the_one_before(log: list[Entry]) -> None:
    history = [verdict.state for verdict in read(log) if verdict.void is None]
    assert [state.epoch for state in history] == list(range(1, len(history) + 1))
    assert history == winners(log)  # and a winner's state is what its writer proposed


@given(logs())
def test_a_void_record_changes_nothing_and_says_why(log: list[Entry]) -> None:
    before = State()
    for entry, verdict in zip(log, read(log), strict=True):
        if verdict.void is not None:
            assert verdict.state == before
            cause = "not a record" if entry.proposal is None else "cites epoch"
            assert verdict.void.startswith(cause)
        before = verdict.state


@given(logs(), st.lists(st.integers(0, 25)))
def test_readers_agree_in_whatever_pieces_they_read(log: list[Entry], cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(log)) for cut in cuts), len(log)]
    state = State()
    for start, end in pairwise(bounds):
        state = replay(records(log)[start:end], state)
        assert state == replay(records(log)[:end])  # as one who comes only now
    assert state == (winners(log) or [State()])[-1]


@given(logs(), st.integers(0, 25), st.integers(2, 99))
def test_a_newer_format_stops_every_reader_at_the_same_place(
    log: list[Entry], place: int, number: int
) -> None:
    place = min(place, len(log))
    newer = json.dumps({"format": number, "base": place, "anything": [1]}).encode()
    before = replay(records(log)[:place])
    with pytest.raises(UnsupportedFormat):
        replay([*records(log)[:place], newer, *records(log)[place:]])
    with pytest.raises(UnsupportedFormat):
        replay([newer, *records(log)[place:]], before)


@given(logs(), st.data())
def test_a_writer_that_has_read_everything_always_wins(
    log: list[Entry], data: st.DataObject
) -> None:
    seen = replay(records(log))
    proposal = data.draw(proposals(seen))
    assert replay([*records(log), encode(proposal)]) == proposal
    rival = replace(proposal, policies={})
    assert replay([*records(log), encode(proposal), encode(rival)]) == proposal
