"""What `make bench` writes."""

from __future__ import annotations

from pathlib import Path

from benchmarks.report import NOTES, Figures, goals_missed, load, save, write_table
from benchmarks.rounds import Ratio, print_ratio

SPEEDS = {"ours": [10.0, 30.0, 20.0], "theirs": [10.0, 10.0, 10.0]}
STREAMS = Figures("2026-11-16", {"rstream": "1.1.1"}, (Ratio("ours", "theirs", (1.0, 3.0), 2.5),))


def test_a_ratio_is_of_the_same_round_and_says_its_spread() -> None:
    ratio = print_ratio(SPEEDS, "ours", "theirs", 2)
    assert (ratio.rounds, ratio.median, ratio.spread) == ((1.0, 3.0, 2.0), 2.0, (1.0, 3.0))
    assert str(ratio) == (
        "ours / theirs: 2.00 (median), spread 1.00 to 3.00, 3 rounds; goal: at least 2"
    )


def test_figures_come_back_as_they_were_kept(tmp_path: Path) -> None:
    kept = tmp_path / "results.json"
    assert load(kept) == {}
    save({"Streams": STREAMS}, kept)
    assert load(kept) == {"Streams": STREAMS}


def test_the_table_says_of_what_a_row_is_a_ratio_and_which_goal_is_missed(tmp_path: Path) -> None:
    table = tmp_path / "results.md"
    write_table({"Streams": STREAMS}, table)
    assert "| ours | theirs | 2.00 (1.00–3.00) | 2 | ≥ 2.5 **missed** |" in table.read_text()
    assert "2026-11-16, with rstream 1.1.1" in table.read_text()
    assert goals_missed([STREAMS]) == list(STREAMS.ratios)


def test_what_people_wrote_below_the_mark_stays(tmp_path: Path) -> None:
    table = tmp_path / "results.md"
    table.write_text(f"old figures\n{NOTES}\n\nWhy it is so.\n")
    write_table({"Streams": STREAMS}, table)
    assert table.read_text().endswith(f"{NOTES}\n\nWhy it is so.\n")
    assert "old figures" not in table.read_text()
