"""Steps over the sections that stand before the body, for all messages at once.

What RabbitMQ makes of messages that were published over AMQP 0-9-1 is a header, annotations (the
exchange, the routing key, sometimes more), often properties, and one data section. Each section
says how long it is, so it takes five steps at most from the start of a message to its body; each
step is made for all messages at once. In the same way the entries of the annotations are passed in
search of the key.

Sections that are asked for are not stepped over, and whatever is unusual stops a message: both are
left to the general reader. What lies within a section that nobody asked for is not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from sharding.stream.formats.arrow_rows import Integers, Octets, unaligned

Flags: TypeAlias = npt.NDArray[np.bool_]

HEADER, DELIVERY, ANNOTATIONS, PROPERTIES, APPLICATION = 0x70, 0x71, 0x72, 0x73, 0x74
_LISTS = (HEADER, PROPERTIES)
_EMPTY_LIST = 0x45
_SYMBOL, _STRING = 0xA3, 0xA1
_MAX_ANNOTATIONS = 16

# How many bytes a value has after its constructor; those that begin with their length: _SHORT.
_UNKNOWN, _SHORT = -1, -2
_WIDTHS = np.full(256, _UNKNOWN, np.int64)
for _width, _constructors in {
    0: range(0x40, 0x46),
    1: range(0x50, 0x57),
    2: range(0x60, 0x62),
    4: range(0x70, 0x75),
    8: range(0x80, 0x85),
    16: (0x94, 0x98),
    _SHORT: (0xA0, _STRING, _SYMBOL),
}.items():
    _WIDTHS[list(_constructors)] = _width


@dataclass(frozen=True, slots=True)
class Annotations:
    """What the annotations of each message hold; where `known` is False, nothing is said."""

    known: Flags
    keyed: Flags
    key_starts: Integers
    key_ends: Integers


def step_over(
    buffer: Octets, starts: Integers, ends: Integers, sections: tuple[int, ...]
) -> tuple[Integers, Integers]:
    """Where `sections` are over, and where the annotations began (−1 without any)."""
    words = unaligned(buffer, ">u4")
    position, previous = starts, np.zeros(len(starts), np.int64)
    annotations = np.full(len(starts), -1, np.int64)
    for _ in sections:
        head = words[position].astype(np.int64)  # 00 53, the section, the constructor
        section, constructor = head >> 8 & 0xFF, head & 0xFF
        is_list = np.isin(section, _LISTS)
        wide = constructor == np.where(is_list, 0xD0, 0xD1)
        short = constructor == np.where(is_list, 0xC0, 0xC1)
        size = np.where(wide, 8 + words[position + 4].astype(np.int64), 4)
        size = np.where(short, 5 + buffer[position + 4].astype(np.int64), size)
        stepping = (
            (head >> 16 == 0x0053)
            & np.isin(section, sections)
            & (section > previous)
            & (wide | short | (is_list & (constructor == _EMPTY_LIST)))
            & (position + size <= ends)
        )
        if not stepping.any():
            break
        annotations = np.where(stepping & (section == ANNOTATIONS), position, annotations)
        previous = np.where(stepping, section, previous)
        position = np.where(stepping, position + size, position)
    return position, annotations


def find_keys(buffer: Octets, annotations: Integers) -> Annotations:
    """The keys in the sections that begin at `annotations`, which lie within the buffer."""
    present = annotations >= 0
    eights = unaligned(buffer, "<u8")
    section = np.maximum(annotations, 0)
    known = ~present | (buffer[section + 3] == 0xC1)  # a map whose sizes are single bytes
    end = section + 5 + buffer[section + 4]
    values = buffer[section + 5].astype(np.int64)
    known &= ~present | ((values % 2 == 0) & (values <= 2 * _MAX_ANNOTATIONS))
    position = np.minimum(section + 6, end)
    key_starts, key_ends = np.zeros((2, len(annotations)), np.int64)
    keyed = np.zeros(len(annotations), np.bool_)
    for number in range(int(values[present & known].max(initial=0)) // 2):
        here = present & known & (2 * number < values)
        name_size = buffer[position + 1].astype(np.int64)
        value = position + 2 + name_size
        constructor = buffer[value]
        width = _WIDTHS[constructor]
        after = value + 1 + np.where(width == _SHORT, 1 + buffer[value + 1].astype(np.int64), width)
        is_key = (
            here
            & (name_size == 13)
            & (eights[position + 2] == int.from_bytes(b"x-routin", "little"))
            & (eights[position + 7] == int.from_bytes(b"ting-key", "little"))
        )
        usual = (buffer[position] == _SYMBOL) & (width != _UNKNOWN) & (after <= end)
        known &= ~here | (usual & (~is_key | (constructor == _STRING)))
        keyed |= is_key
        key_starts = np.where(is_key, value + 2, key_starts)
        key_ends = np.where(is_key, after, key_ends)
        position = np.where(here & known, after, position)
    known &= ~present | (position == end)
    return Annotations(known, keyed & known, key_starts, key_ends)
