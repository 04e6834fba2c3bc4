"""What the plugin did on RabbitMQ 4.0, as recorded; and where we mean to do better.

The file holds {kind of channel: {scenario: transcript}}. `python -m tests.conformance` records it
anew; `test_plugin_transcript` checks it against the real plugin. Keeping it means that our wrappers
can be compared on any broker version without a second cluster, and with 4.0's manners on 3.10 too,
where the plugin closes the connection (541 INTERNAL_ERROR) instead of refusing.
"""

from __future__ import annotations

import json
from itertools import starmap
from pathlib import Path

from tests.conformance.values import Transcript, Value

VERSION = "4.0"
FILE = Path(__file__).with_name("plugin.json")

Recording = dict[str, dict[str, Transcript]]

PIKA = ("blocking", "async")


def load() -> Recording:
    recording: Recording = json.loads(FILE.read_text())
    return recording


def save(recording: Recording) -> None:
    """One line per label, so that a change can be read."""
    kinds = [
        f'"{kind}": {{\n' + ",\n".join(starmap(_scenario, transcripts.items())) + "\n}"
        for kind, transcripts in recording.items()
    ]
    FILE.write_text("{\n" + ",\n".join(kinds) + "\n}\n")


def _scenario(name: str, transcript: Transcript) -> str:
    lines = [f"  {json.dumps(label)}: {json.dumps(seen)}" for label, seen in transcript.items()]
    return f' "{name}": {{\n' + ",\n".join(lines) + "\n }"


def wanted(kind: str, scenario: str) -> Transcript:
    """What our wrapper shall show: what the plugin showed, but for the differences we mean."""
    return {**load()[kind][scenario], **_meant(kind, scenario)}


def _meant(kind: str, scenario: str) -> Transcript:
    """Where ours differs, and means to.

    * pika never hears the plugin's DeclareOk, as it carries another name than was asked for. Ours
      answers: with the name and the counts that the broker does send, and aio-pika does show.
    * Our exchange is a direct one, and the broker says so when it is declared as another type.
    * aio-pika takes the name in the plugin's DeclareOk for the queue's, so all that is consumed
      through the declared object comes from shard 0. Ours goes to the shard with fewest consumers.
    * CC and BCC are refused: a queue that took such a copy would hide that no shard took it.
    * An aio-pika message's `channel` is aiormq's own. What is published through it passes by our
      wrapper and is not sharded; `message.channel` can't be replaced without patching aio-pika.
    """
    shard, other = (f"sharding: images - <connected> - {index}" for index in (0, 1))
    if scenario == "exchange_declaring":
        plugin = json.dumps(load()[kind][scenario])
        ours: Transcript = json.loads(plugin.replace("''x-modulus-hash''", "'direct'"))
        return ours
    if scenario == "carbon_copies":
        return {
            label: {"publish": _refused(*label.split("'")[1:4:2]), "found": []}
            for label in load()[kind][scenario]
            if "CC" in label
        }
    if kind not in PIKA:
        if scenario == "consuming_from_the_declared":
            return {"consumers": {shard: 1, other: 1}}
        if scenario == "publishing_in_a_callback":
            answers = load()[kind][scenario]["answers"]
            assert isinstance(answers, list)
            return {"answers": answers[:1]}
        return {}
    if scenario == "declaring":
        answer: Value = {"queue": shard, "messages": 2, "consumers": 0}
        return {"durable": answer, "passive": answer}
    if scenario == "no_shard_on_the_node":
        return {"declare": {"queue": shard, "messages": 0, "consumers": 0}}
    return {}


def _refused(header: str, copies: str) -> Value:
    rule = "must not be set for a sharded name, as a copy could hide that no shard took it"
    return {
        "raises": "InvalidInput",
        "with": [f"headers['{header}']: {rule}; found ['{copies}']"],
    }
