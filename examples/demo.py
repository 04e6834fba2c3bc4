"""The demo: a real cluster, a few thousand keys routed over its nodes, and a Spark pipeline on it.

Run by `make demo`. Uses the cluster that `make up` left running, or starts one and takes it down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import track
from rich.table import Table

from examples import spark_pipeline
from sharding import Address, Node, Policy, Shard, ShardMap, ShardName, difference
from tests.cluster import Cluster, folders
from tests.cluster.display import cluster_table

KEYS = 5_000
POLICY = Policy("demo", pattern="^images$", shards_per_node=2)


def main() -> None:
    console = Console()
    with running_cluster(console) as cluster:
        console.print(cluster_table(cluster))
        images = shard_map(cluster)
        routed = Counter(
            images.shard_of(f"user-{number}").name
            for number in track(range(KEYS), "routing keys", console=console, transient=True)
        )
        console.print(routes_table(images, routed))
        console.print(what_a_lost_node_changes(images))
        spark_pipeline.run(pipeline_settings(cluster), console)


@contextmanager
def running_cluster(console: Console) -> Iterator[Cluster]:
    if "warren" in folders.names():
        yield Cluster.attach("warren")
        return
    with console.status("starting three RabbitMQ nodes") as status:
        cluster = Cluster.start(progress=status.update)
    with cluster:
        yield cluster


def shard_map(cluster: Cluster) -> ShardMap:
    """The map of the logical queue `images`: two shards on each node."""
    return ShardMap(
        logical="images",
        epoch=1,
        shards=tuple(
            Shard(str(ShardName("images", node.name, index)), node.name)
            for node in cluster
            for index in range(POLICY.shards_per_node)
        ),
        nodes=tuple(
            Node(node.name, (Address(node.endpoint.address, node.endpoint.ports["amqp"]),))
            for node in cluster
        ),
        policy=POLICY,
    )


def routes_table(images: ShardMap, routed: Counter[str]) -> Table:
    table = Table(title=f"{KEYS:,} keys of the logical queue 'images'", title_justify="left")
    table.add_column("shard")
    table.add_column("keys", justify="right")
    table.add_column("share", justify="right")
    for shard in images.shards:
        keys = routed[shard.name]
        table.add_row(shard.name, f"{keys:,}", f"{keys / KEYS:.1%}")
    return table


def what_a_lost_node_changes(images: ShardMap) -> str:
    """Take the last node out of the map and say, in words, what that moves."""
    gone = images.nodes[-1].name
    smaller = ShardMap(
        logical=images.logical,
        epoch=images.epoch + 1,
        shards=tuple(shard for shard in images.shards if shard.node != gone),
        nodes=images.nodes[:-1],
        policy=images.policy,
    )
    return "\n".join([f"If {gone} left for good:", *difference(images, smaller)])


def pipeline_settings(cluster: Cluster) -> spark_pipeline.Settings:
    node = cluster.nodes[0].endpoint
    return spark_pipeline.Settings(
        uri=f"rabbitmq-stream://{node.address}:{node.ports['stream']}",
        super_stream="orders",
        amqp_url=node.amqp_url,
    )


if __name__ == "__main__":
    main()
