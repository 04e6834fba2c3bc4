"""Any valid name, policy, node and shard map."""

from __future__ import annotations

from hypothesis import strategies as st

from sharding import Address, Node, OnUnavailable, Policy, Shard, ShardKind, ShardMap, ShardName
from sharding.maps.json_fields import Scalar

# Surrogates can't be written as UTF-8, and names hold no NUL and no line break. At most 4 bytes a
# character.
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r\n"), min_size=1)
names = texts.map(lambda text: text[:60])
logical_names = (
    (names | st.lists(names, min_size=2, max_size=3).map(" - ".join))
    .map(lambda name: name.encode()[:120].decode(errors="ignore"))
    .filter(lambda name: name and not name.startswith("amq."))
)
_words = st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Z"], exclude_characters="@"),
    min_size=1,
    max_size=10,
)
node_names = st.builds("{}@{}".format, _words, _words)
shard_names = st.builds(ShardName, logical_names, node_names, st.integers(0, 10**6))

scalars: st.SearchStrategy[Scalar] = (
    texts
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.booleans()
)
policies = st.builds(
    Policy,
    name=names,
    pattern=st.sampled_from(["^images", ".", "(a|b)+", "grüße$"]),
    shards_per_node=st.integers(1, 4_096),
    priority=st.integers(-(2**63), 2**63 - 1),
    routing_key=st.none() | st.just("") | names,
    durable=st.booleans(),
    queue_arguments=st.dictionaries(names, scalars, max_size=4),
    on_unavailable=st.sampled_from(OnUnavailable),
)
addresses = st.builds(Address, _words, st.integers(1, 65_535))


@st.composite
def shard_maps(draw: st.DrawFn) -> ShardMap:
    kind = draw(st.sampled_from(ShardKind))
    may_be_away = st.booleans() if kind is ShardKind.QUEUE else st.just(True)
    on = draw(st.lists(node_names, min_size=1, max_size=4, unique=True))
    nodes = [
        Node(name, tuple(draw(st.lists(addresses, max_size=2))), draw(st.none() | names))
        for name in on
    ]
    shards = [
        Shard(name, draw(st.sampled_from(on)), draw(may_be_away))
        for name in draw(st.lists(names, min_size=1, max_size=6, unique=True))
    ]
    shards[0] = Shard(shards[0].name, shards[0].node)  # one at least is available
    return ShardMap(
        logical=draw(logical_names),
        epoch=draw(st.integers(1, 2**63)),
        shards=tuple(draw(st.permutations(shards))),
        nodes=tuple(nodes),
        policy=draw(policies),
        kind=kind,
    )
