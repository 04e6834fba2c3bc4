"""Heartbeats are sent in time, and a silent peer is dead after two of them."""

from __future__ import annotations

import math

from sharding.stream.protocol.session import Heartbeats


def test_something_is_sent_at_least_every_half_interval() -> None:
    heartbeats = Heartbeats(10, now=100)
    assert not heartbeats.is_due(104.9)
    assert heartbeats.is_due(105)
    heartbeats.sent(105)
    assert not heartbeats.is_due(109.9)
    assert heartbeats.is_due(110)


def test_a_peer_is_dead_after_two_intervals_of_silence() -> None:
    heartbeats = Heartbeats(10, now=100)
    assert not heartbeats.is_dead(119.9)
    assert heartbeats.is_dead(120)
    heartbeats.received(119)
    assert not heartbeats.is_dead(138.9)
    assert heartbeats.is_dead(139)


def test_what_we_send_does_not_keep_a_silent_peer_alive() -> None:
    heartbeats = Heartbeats(10, now=100)
    heartbeats.sent(119)
    assert heartbeats.is_dead(120)


def test_the_next_check_is_when_something_has_to_be_done_and_not_before() -> None:
    heartbeats = Heartbeats(10, now=100)
    assert heartbeats.next_check() == 105
    heartbeats.sent(118)
    assert heartbeats.next_check() == 120
    heartbeats.received(119)
    assert heartbeats.next_check() == 123


def test_without_heartbeats_nothing_is_sent_and_nobody_is_dead() -> None:
    heartbeats = Heartbeats(0, now=100)
    assert not heartbeats.is_due(10**9)
    assert not heartbeats.is_dead(10**9)
    assert heartbeats.next_check() == math.inf
