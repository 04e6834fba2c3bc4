"""Logs that try the rules of format 2 one by one: `tests/vectors/map_log.json` is made of them.

They are written field by field, as docs/map-log.md says it, and not by the code that they try. In
one log lie many records that are void, each of which would set a policy of its own if it counted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

LOG = "warren.shard-maps"
Fields = dict[str, Any]
Records = list[Fields]


def policy(name: str, /, **fields: Any) -> Fields:
    return {
        "name": name,
        "pattern": "^p",
        "shards_per_node": 1,
        "priority": 0,
        "routing_key": None,
        "durable": True,
        "queue_arguments": {},
        "on_unavailable": "fail",
        **fields,
    }


def shard(name: str, node: str = "r@a", /, **fields: Any) -> Fields:
    return {"name": name, "node": node, "available": True, **fields}


def node(name: str = "r@a", /, **fields: Any) -> Fields:
    return {"name": name, "addresses": [], "reply_token": None, **fields}


def shard_map(name: str, epoch: int = 1, /, **fields: Any) -> Fields:
    return {
        "format": 1,
        "logical": name,
        "epoch": epoch,
        "kind": "queue",
        "exchange": name,
        "shards": [shard("s")],
        "nodes": [node()],
        "policy": policy("p"),
        **fields,
    }


def policy_set(name: str, base: Any = 0, /, *, more: Fields | None = None, **fields: Any) -> Fields:
    change = {"kind": "policy-set", "name": name, "base": base, "policy": policy(name, **fields)}
    return {**change, **(more or {})}


def map_set(name: str, base: int = 0, /, *, more: Fields | None = None, **fields: Any) -> Fields:
    value = shard_map(name, base + 1, **fields)
    return {"kind": "map-set", "name": name, "base": base, "map": value, **(more or {})}


def without(fields: Fields, *names: str) -> Fields:
    return {name: value for name, value in fields.items() if name not in names}


def record(*changes: Any, **fields: Any) -> Fields:
    return {"format": 2, "id": "r", "log": "A", "start": 0, "changes": list(changes), **fields}


REMARK: Fields = {"x-a": 1}
NO_NUMBERS = [
    "9223372036854775808",
    "-9223372036854775809",
    "18446744073709551615",
    "1e999",
    "NaN",
    "Infinity",
    "-Infinity",
    "01",
    "1" * 5000,
]
VOID_POLICIES: list[Fields] = [
    {"name": "w"},
    {"pattern": ""},
    {"shards_per_node": 4097},
    {"shards_per_node": True},
    {"priority": 2**63},
    {"routing_key": "k" * 256},
    {"routing_key": "a\nb"},
    {"durable": 1},
    {"queue_arguments": {"x": None}},
    {"queue_arguments": {"x": []}},
    {"queue_arguments": {"": 1}},
    {"on_unavailable": "wait"},
]
VOID_MAPS: list[Fields] = [
    {"logical": "w"},
    {"epoch": 2},
    {"format": 0},
    {"kind": "topic"},
    {"exchange": ""},
    {"shards": []},
    {"shards": [shard("s"), shard("s")]},
    {"shards": [shard("s", "r@b")]},
    {"shards": [shard("s", available=False)]},
    {"shards": [shard("s"), shard("t", available=False)], "kind": "stream"},
    {"shards": [shard("s", available=1)]},
    {"nodes": [node(), node()]},
    {"nodes": [without(node(), "reply_token")]},
    {"nodes": [node(reply_token="")]},
    {"nodes": [node(addresses=[["h", 0]])]},
    {"nodes": [node(addresses=[["h", 65536]])]},
    {"nodes": [node(addresses=[["", 1]])]},
    {"nodes": [node(addresses=[["a host", 1]])]},
    {"nodes": [node(addresses=[["h", 1, 2]])]},
    {"nodes": [node("no at sign")], "shards": [shard("s", "no at sign")]},
    {"policy": policy("p", shards_per_node=0)},
]
FOUNDER = record(policy_set("a"), id="A", log=None)
SECOND = record(policy_set("b"))


def lies(body: Fields | str | bytes, exchange: str = LOG, **how: int) -> Fields:
    if isinstance(body, dict):
        body = json.dumps(body)
    written = body if isinstance(body, bytes) else body.encode()
    return {"exchange": exchange, "body": written.decode("latin-1"), **how}


def log(*bodies: Fields | str | bytes) -> Records:
    return [lies(body) for body in bodies]


def entry(name: str, revision: int = 1, /, **fields: Any) -> Fields:
    value = policy(name, **fields)
    return {"kind": "policy", "name": name, "revision": revision, "policy": value}


def snapshot(
    covers: int, entries: list[Any], epoch: int = 2, *, parts: int = 1, **of: Any
) -> list[Fields]:
    """The parts of a snapshot; `of` has fields of all parts, of the text, and the record's id."""
    text = json.dumps({"epoch": epoch, "entries": entries, **of.pop("text", {})})
    name, log_ = of.pop("id", "s"), of.pop("log", "A")
    digest, size = hashlib.sha256(text.encode()).hexdigest(), -(-len(text) // parts)
    return [
        {
            "format": 2,
            "id": name,
            "log": log_,
            "start": 0,
            "snapshot": {
                "covers": covers,
                "part": number + 1,
                "parts": parts,
                "sha256": digest,
                "text": text[number * size : (number + 1) * size],
                **of,
            },
        }
        for number in range(parts)
    ]


def with_more(record_: Fields, more: str) -> str:
    """A record with something behind its fields that is not to be written by a JSON library."""
    return f"{json.dumps(record_)[:-1]},{more}}}"


TRUE = [entry("a"), entry("b")]
LATER = record(policy_set("a", 1, shards_per_node=7))


def rules() -> Iterator[tuple[str, Records, int]]:
    """Name, records, and the offset of the first of them."""
    for name, records in _records_of_changes():
        yield f"rules: {name}", records, 0
    for name, records in _snapshots():
        yield f"snapshots: {name}", records, 0
    other = record(policy_set("z"), log="another", id="o")
    founds = record(policy_set("z"), log=None, id="late")
    yield (
        "lost: the oldest records left are void, and a snapshot says which log it is",
        log(other, founds, *snapshot(7, TRUE, parts=2), LATER),
        6,
    )
    yield (
        "lost: what covers less than the offset before the oldest record left is passed over",
        log(*snapshot(4, [entry("old")], 1), *snapshot(6, TRUE, id="t"), LATER),
        6,
    )
    yield "lost: no snapshot is left", log(other, SECOND, founds), 6


def _records_of_changes() -> Iterator[tuple[str, Records]]:
    yield (
        "numbers",
        log(
            FOUNDER,
            *(
                with_more(record(policy_set(f"v{n}")), f'"x-n":{number}')
                for n, number in enumerate(NO_NUMBERS)
            ),
            with_more(record(policy_set("most")), '"x-n":9223372036854775807'),
            with_more(record(policy_set("least")), '"x-n":-9223372036854775808'),
            with_more(record(policy_set("fraction")), '"x-n":1e3'),
            record(policy_set("whole", 0.0)),
            record(policy_set("whole", shards_per_node=1.0)),
            record(policy_set("whole"), start=0.0),
            record(policy_set("whole"), format=2.0),
        ),
    )
    nested = '"x-n":' + "[" * 19 + "]" * 19
    yield (
        "what is no JSON for this format",
        log(
            FOUNDER,
            with_more(record(policy_set("twice")), '"start":0'),
            with_more(record(policy_set("twice")), '"x-n":{"a":1,"a":1}'),
            with_more(record(policy_set("deep")), nested.replace("[]", "[[]]")),
            with_more(record(policy_set("half")), '"x-n":"\\ud83d"'),
            with_more(record(policy_set("half")), '"x-\\ude00":1'),
            b"\xef\xbb\xbf" + json.dumps(record(policy_set("mark"))).encode(),
            json.dumps(record(policy_set("comma")))[:-1] + ",}",
            json.dumps(record(policy_set("two"))) + "{}",
            json.dumps(record(policy_set("latin\u00fc")), ensure_ascii=False).encode("latin-1"),
            with_more(record(policy_set("20 deep")), nested),
            with_more(record(policy_set("whole pair")), '"x-n":"\\ud83d\\ude00"'),
        ),
    )
    yield (
        "envelopes that are void, whatever else is in them",
        log(
            FOUNDER,
            without(record(policy_set("v")), "id"),
            without(record(policy_set("v")), "log"),
            without(record(policy_set("v")), "start"),
            without(record(policy_set("v")), "changes"),
            record(policy_set("v"), id=""),
            record(policy_set("v"), id="\u00fc" * 128),
            record(policy_set("v"), log=""),
            record(policy_set("v"), log=None),
            record(policy_set("v"), log="another"),
            record(policy_set("v"), log="another", why=1),
            record(policy_set("v"), start=-1),
            record(policy_set("v"), start="0"),
            record(policy_set("v"), start=None, why=1),
            record(policy_set("v"), format=1),
            record(policy_set("v"), format=True),
            record(policy_set("v"), snapshot={}),
            record(policy_set("v"), note="nothing"),
            record(),
            record(why=1),
            {"format": 2, "note": "nothing"},
            {"format": 2, "id": "n", "log": "A", "start": 0, "note": "sealed", "for": "a"},
            SECOND,
        ),
    )
    yield (
        "changes that are void",
        log(
            FOUNDER,
            record("policy-set"),
            record(policy_set("v"), policy_set("v")),
            record(policy_set("v"), {"kind": "policy-new", "name": "v"}),
            record(policy_set("v", -1)),
            record(policy_set("v", None)),
            record(without(policy_set("v", more={"why": 1}), "base")),
            record(without(policy_set("v"), "policy")),
            record({"kind": "policy-cleared", "name": ""}),
            record({"kind": "policy-cleared", "name": "a", "base": 0}),
            record(policy_set("a", 0, more={"why": 1})),
            record(policy_set("a", 0), {"kind": "open", "name": "m"}),
            record(policy_set("v", shards_per_node=0), {"kind": "open", "name": "m"}),
            record(policy_set("v"), policy_set("a", 3)),
            SECOND,
        ),
    )
    yield (
        "policies that are void",
        log(
            FOUNDER,
            *(record(policy_set("v", **fields)) for fields in VOID_POLICIES),
            record(policy_set("a\nb")),
            record(
                {**policy_set("v"), "policy": without(policy("v"), "routing_key")},
            ),
            record(policy_set("bounds", priority=-(2**63), shards_per_node=4096, routing_key="")),
        ),
    )
    yield (
        "maps that are void",
        log(
            FOUNDER,
            *(record(map_set("v", **fields)) for fields in VOID_MAPS),
            record(map_set("amq.v")),
            record(
                map_set(
                    "films",
                    shards=[shard("s"), shard("t", available=False)],
                    nodes=[node(), node("r@b", addresses=[["h", 65535]], reply_token="t")],
                )
            ),
        ),
    )
    yield (
        "what counts, though one may doubt it",
        log(
            FOUNDER,
            record({"kind": "policy-cleared", "name": "never", "base": 0}),
            record({"kind": "map-forgotten", "name": "never", "base": 0}, id="A"),
            record(policy_set("b", more={"x-why": [1]}), **{"x-who": None}),
            record({"kind": "policy-cleared", "name": "a", "base": 1}, start=9),
            record(policy_set("a", 2)),
        ),
    )
    yield (
        "what is not understood, entry by entry",
        log(
            FOUNDER,
            record({"kind": "policy-new", "name": "1"}),
            record({"kind": "new", "name": "2", "base": "any"}),
            record(policy_set("3", more={"why": 1})),
            record(policy_set("4", more={"map": {}})),
            record(policy_set("5", order=1)),
            record(policy_set("6", **REMARK)),
            record(policy_set("7", order=1, shards_per_node=0)),
            record(policy_set("8", pattern="(", shards_per_node=0)),
            record(map_set("9", tokens={})),
            record(map_set("10", format=2)),
            record(map_set("11", shards=[shard("s", retired=1)])),
            record(map_set("12", nodes=[node(zone=1)])),
            record(map_set("13", policy=policy("p", order=1))),
            record(map_set("14", policy=policy("p", pattern="["))),
            record(map_set("15", more={"policy": {}})),
            record(map_set("16", **REMARK)),
            SECOND,
        ),
    )
    yield (
        "what is concerned concerns what is named with it, and is changed no more",
        log(
            FOUNDER,
            SECOND,
            record({"kind": "policy-new", "name": "a"}),
            LATER,
            record(policy_set("a", 99)),
            record(policy_set("a", 1), policy_set("stale", 5), policy_set("with stale")),
            record(policy_set("a", 1), policy_set("b", 1)),
            record(policy_set("b", 1)),
            record(policy_set("c")),
        ),
    )
    yield (
        "an unknown field of a record concerns everything",
        log(FOUNDER, record(policy_set("b"), why=1), LATER),
    )
    strange = [
        ("of an unknown kind", record({"kind": "policy-new", "name": "a"}, id="A", log=None)),
        ("with a field of tomorrow", record(policy_set("a", order=1), id="A", log=None)),
        ("with a value that is void", record(policy_set("a", priority=""), id="A", log=None)),
        ("that cites a revision", record(policy_set("a", 1), id="A", log=None)),
    ]
    rival = record(policy_set("a"), id="B", log=None)
    for what, founder in strange:
        yield (
            f"a founder {what} founds all the same",
            log(founder, rival, record(policy_set("b", 0), log="B"), SECOND),
        )
    yield (
        "a founder with an unknown field founds, and concerns everything",
        log(record(policy_set("a"), id="A", log=None, why=1), rival, SECOND),
    )
    yield (
        "a part of a snapshot founds nothing",
        log(*snapshot(0, [], 0, log=None), *snapshot(0, [], 0), FOUNDER),
    )


def _snapshots() -> Iterator[tuple[str, Records]]:
    begun = [FOUNDER, SECOND]
    untrue = [entry("a", 4, shards_per_node=9), {"kind": "map", "name": "m", "revision": 2}]
    yield (
        "an untrue one is the state for everybody",
        log(*begun, *snapshot(1, untrue, 40), LATER, record(policy_set("a", 4, shards_per_node=8))),
    )
    yield (
        "records behind the covered one are judged again",
        log(
            *begun,
            LATER,
            record(policy_set("c")),
            *snapshot(1, TRUE, parts=2),
            record(policy_set("d")),
        ),
    )
    parts = snapshot(1, TRUE, parts=3)
    yield (
        "changes between the parts",
        log(*begun, parts[0], LATER, parts[1], record(policy_set("c")), parts[2]),
    )
    lie = [entry("lie", 2)]
    yield (
        "one that covers less than the accepted one",
        log(*begun, LATER, *snapshot(2, [*TRUE[1:], entry("a", 2)], 3), *snapshot(1, lie, id="t")),
    )
    yield "one that covers what is to come", log(*begun, *snapshot(2, lie), LATER)
    yield (
        "one that covers what lies 1,000 before",
        [
            *log(*begun),
            lies("nothing", "", times=999),
            *log(*snapshot(1, lie)),
        ],
    )
    yield (
        "one that covers what lies more than 1,000 before",
        [
            *log(*begun),
            lies("nothing", "", times=1000),
            *log(*snapshot(1, lie)),
        ],
    )
    (part,) = snapshot(1, lie)
    room = 100_000 - len(json.dumps(part))
    yield "a part of 100,000 bytes", [*log(*begun), lies(part, spaces=room)]
    yield "a part of 100,001 bytes", [*log(*begun), lies(part, spaces=room + 1)]
    yield "for another log", log(*begun, *snapshot(1, lie, log="another"))
    yield (
        "for another log, with an unknown field",
        log(*begun, *snapshot(1, lie, log="another", why=1), LATER),
    )
    yield "another digest", log(*begun, *snapshot(1, lie, sha256="0" * 64))
    digest = str(part["snapshot"]["sha256"])
    yield "a digest in capitals", log(*begun, *snapshot(1, lie, sha256=digest.upper()))
    parts = snapshot(1, lie, parts=3)
    yield "parts out of order", log(*begun, parts[0], parts[2], parts[1], parts[2])
    yield "a part twice", log(*begun, parts[0], parts[1], parts[1], parts[2])
    yield "the first part twice", log(*begun, parts[0], *parts)
    yield "begun again after it had ended", log(*begun, parts[0], parts[0], *parts)
    other = snapshot(1, lie, parts=4)
    yield "another number of parts", log(*begun, parts[0], other[1], *parts[1:])
    yield (
        "two under one name",
        log(
            *begun,
            parts[0],
            LATER,
            *snapshot(3, [entry("a", 2), entry("b")], 3, parts=2),
            *parts[1:],
        ),
    )
    for what, entries, epoch in [
        ("a value that is void", [entry("a", shards_per_node=0)], 1),
        ("a revision of 0", [entry("a", 0)], 1),
        ("a revision above the epoch", [entry("a", 3)], 2),
        ("an entry twice", [entry("a"), entry("a")], 2),
        ("a name that is not the value's", [{**entry("a"), "name": "b"}], 2),
        ("a map of another epoch", [{"kind": "map", "name": "m", "revision": 2}], 1),
        ("no revision", [without(entry("a"), "revision")], 1),
        ("an epoch below 0", [], -1),
    ]:
        yield f"with {what}: none", log(*begun, *snapshot(1, entries, epoch), LATER)
    map_of_old = {"kind": "map", "name": "m", "revision": 2, "map": shard_map("m", 1)}
    yield "with a map of another epoch: none, too", log(*begun, *snapshot(1, [map_of_old], 2))
    yield (
        "an unknown field of a part concerns everything",
        log(*begun, *snapshot(1, TRUE, why=1), LATER),
    )
    yield (
        "an unknown field of the text concerns everything",
        log(*begun, *snapshot(1, TRUE, text={"why": 1}), LATER),
    )
    yield (
        "remarks",
        log(
            *begun,
            *snapshot(1, [{**entry("lie"), "x-a": 1}], text={"x-a": 1}, **{"x-a": 1}),
        ),
    )
    odd = [
        {**entry("a"), "why": 1},
        entry("b", order=1),
        {"kind": "policy-new", "name": "p"},
        {"kind": "new", "name": "m", "steps": [1]},
        {"kind": "map", "name": "n", "revision": 1, "map": shard_map("n", tokens={})},
    ]
    yield (
        "what is not understood, entry by entry",
        log(
            *begun, *snapshot(1, odd, 9), LATER, record(policy_set("b", 1)), record(policy_set("c"))
        ),
    )
    strange = record({"kind": "policy-new", "name": "a"})
    newer = {"format": 3}
    yield (
        "one that is understood ends what was not",
        log(*begun, strange, newer, *snapshot(3, TRUE), LATER),
    )
    yield (
        "what lies behind the covered one stays not understood",
        log(*begun, strange, *snapshot(1, TRUE), LATER),
    )
    yield "and what concerns everything, too", log(*begun, newer, *snapshot(1, TRUE), LATER)
    first = snapshot(1, odd[:2], parts=2)
    third = snapshot(3, [*TRUE, entry("c")], 3, id="t")
    yield (
        "the next one ends what one said, though it covers less than that one's last part",
        log(*begun, first[0], record(policy_set("c")), first[1], *third, LATER),
    )
    all_stops = snapshot(1, TRUE, parts=2, text={"why": 1})
    yield (
        "the next one ends what the text of one said",
        log(*begun, all_stops[0], record(policy_set("c")), all_stops[1], *third, LATER),
    )
