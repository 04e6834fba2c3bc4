"""Which chunks the broker is asked for, by the filter values of the messages in them."""

from __future__ import annotations

from dataclasses import dataclass

from spark.option_values import BadOption, OptionValues


@dataclass(frozen=True)
class ChunkFilter:
    """No values: everything. Brokers filter whole chunks, so rows with other values come along."""

    values: tuple[str, ...] = ()
    match_unfiltered: bool = False

    @classmethod
    def parse(cls, options: OptionValues) -> ChunkFilter:
        found = cls(
            options.names("filterValues"),
            options.boolean("matchUnfiltered", False),
        )
        if found.match_unfiltered and not found.values:
            raise BadOption("matchUnfiltered", "needs filterValues", "none")
        return found
