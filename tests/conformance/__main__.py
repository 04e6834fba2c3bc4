"""Play the script on a real plugin and record what it shows.

python -m tests.conformance                     record 4.0
python -m tests.conformance --version 3.10      say what differs there; record nothing
"""

from __future__ import annotations

import argparse
import json
import logging

from tests.cluster import Cluster
from tests.conformance import recorded
from tests.conformance.callers import CALLERS
from tests.conformance.script import SCENARIOS
from tests.conformance.stage import plugin_stage


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance")
    parser.add_argument("--version", default=recorded.VERSION)
    version = parser.parse_args().version
    logging.disable(logging.CRITICAL)  # refusals are what we are here for
    recording: recorded.Recording = {}
    with Cluster.start(version=version, plugins=["rabbitmq_sharding"]) as cluster:
        for kind in CALLERS:
            stage = plugin_stage(cluster, kind)
            recording[kind] = {name: stage.play(each) for name, each in SCENARIOS.items()}
    if version == recorded.VERSION:
        recorded.save(recording)
    else:
        _show_differences(recording)


def _show_differences(recording: recorded.Recording) -> None:
    known = recorded.load()
    for kind, transcripts in recording.items():
        for scenario, transcript in transcripts.items():
            for label, value in transcript.items():
                before = known[kind][scenario].get(label)
                if value != before:
                    print(f"{kind}, {scenario}, {label}:")
                    print(f"  {recorded.VERSION}: {json.dumps(before)}")
                    print(f"  here: {json.dumps(value)}")


if __name__ == "__main__":
    main()
