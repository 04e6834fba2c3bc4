"""AMQP 1.0 decimals: IEEE 754-2008 numbers in the binary integer encoding.

From the left: the sign, then the exponent and the coefficient as whole numbers. Where the two bits
after the sign are both 1, the exponent stands two bits further right, and the coefficient begins
with an unwritten 100; where the two bits after those are 1 as well, it is an infinity or no number.
"""

from __future__ import annotations

from decimal import Decimal

# By number of bytes: bits of the exponent, its bias, the largest coefficient.
_FORMATS = {
    4: (8, 101, 10**7 - 1),
    8: (10, 398, 10**16 - 1),
    16: (14, 6176, 10**34 - 1),
}


def read_decimal(data: bytes) -> Decimal:
    """The number written in 4, 8 or 16 bytes."""
    exponent_bits, bias, largest = _FORMATS[len(data)]
    bits = int.from_bytes(data)
    width = len(data) * 8 - 1 - exponent_bits  # of the coefficient, where it is written in full
    sign, rest = bits >> (len(data) * 8 - 1), bits & ((1 << (len(data) * 8 - 1)) - 1)
    combination = rest >> (len(data) * 8 - 6)  # the five bits after the sign
    if combination == 0b11111:
        return Decimal("NaN")
    if combination == 0b11110:
        return Decimal("-Infinity" if sign else "Infinity")
    if combination >> 3 == 0b11:
        exponent = rest >> (width - 2) & ((1 << exponent_bits) - 1)
        coefficient = 0b100 << (width - 2) | rest & ((1 << (width - 2)) - 1)
    else:
        exponent, coefficient = rest >> width, rest & ((1 << width) - 1)
    if coefficient > largest:
        coefficient = 0  # the standard says that such a coefficient stands for zero
    return Decimal((sign, tuple(map(int, str(coefficient))), exponent - bias))


def write_decimal(value: Decimal) -> bytes:
    """`value` in 16 bytes; ValueError if it does not fit."""
    exponent_bits, bias, largest = _FORMATS[16]
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        special = 0b11110 if value.is_infinite() else 0b11111
        return ((sign << 5 | special) << 122).to_bytes(16)
    coefficient = int("".join(map(str, digits)))
    if coefficient > largest or not -bias <= exponent <= 6111:
        raise ValueError(f"{value} does not fit into a decimal of 34 digits")
    width = 127 - exponent_bits
    return (sign << 127 | (exponent + bias) << width | coefficient).to_bytes(16)
