"""A view as a table or a tree: pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from sharding.commands import printable
from sharding.sight.views import ShardState, ShardView, View, ViewKind

_STYLES = {ShardState.UP: "green", ShardState.AWAY: "red", ShardState.MISSING: "red"}
_UNKNOWN = "–"


def heading(view: View) -> str:
    parts = [str(view.kind)]
    if view.kind is ViewKind.QUEUE:
        parts = [f"epoch {view.epoch}", f"exchange {view.exchange}"]
    parts.append(f"{len(view.shards)} shard{'s' * (len(view.shards) != 1)}")
    away = sum(shard.state is not ShardState.UP for shard in view.shards)
    if away:
        parts.append(f"{away} not up")
    return printable(f"{view.name}: {', '.join(parts)}")


def as_table(view: View) -> RenderableType:
    table = Table()
    columns = _columns(view)
    for name in columns:
        is_text = name in ("shard", "leader", "node", "replicas", "state")
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return Group(Text(heading(view)), table, *_notes(view))


def as_tree(view: View) -> RenderableType:
    tree = Tree(Text(heading(view)))
    for node, shards in view.by_leader.items():
        branch = tree.add(_text(node or "no leader known"))
        for shard in shards:
            leaf = branch.add(_line(shard))
            for group in shard.groups:
                consumers = "" if group.consumers is None else f", {_consumers(group.consumers)}"
                stored = "nothing stored" if group.stored is None else f"stored {group.stored}"
                leaf.add(
                    _text(f"group {group.group}: lag {_shown(group.lag)}, {stored}{consumers}")
                )
    return Group(tree, *_notes(view))


def _columns(view: View) -> dict[str, Sequence[Text]]:
    shards = view.shards
    replicas = [_text(", ".join(shard.replicas)) for shard in shards]
    columns: dict[str, Sequence[Text]] = {"shard": [_text(shard.name) for shard in shards]}
    columns["node" if view.kind is ViewKind.QUEUE else "leader"] = [
        _text(shard.leader or _UNKNOWN) for shard in shards
    ]
    if any(replicas):
        columns["replicas"] = replicas
    columns["state"] = [Text(shard.state, _STYLES[shard.state]) for shard in shards]
    if view.kind is ViewKind.QUEUE:
        columns["messages"] = [_number(shard.messages) for shard in shards]
        columns["consumers"] = [_number(shard.consumers) for shard in shards]
        columns["slots"] = [_number(shard.slots) for shard in shards]
        return columns
    columns["first"] = [_number(shard.first) for shard in shards]
    columns["last"] = [_number(shard.last) for shard in shards]
    if any(shard.consumers is not None for shard in shards):
        columns["consumers"] = [_number(shard.consumers) for shard in shards]
    for group in view.groups:
        lags = [{each.group: each.lag for each in shard.groups}.get(group) for shard in shards]
        columns[printable(f"lag of {group}")] = list(map(_number, lags))
    return columns


def _line(shard: ShardView) -> Text:
    parts: list[str] = []
    if shard.messages is not None:
        parts.append(f"{shard.messages} messages")
    if shard.first is not None:
        parts.append(f"offsets {shard.first} to {shard.last}")
    elif shard.state is ShardState.UP and shard.messages is None:
        parts.append("empty")
    if shard.consumers is not None:
        parts.append(_consumers(shard.consumers))
    if shard.slots is not None:
        parts.append(f"{shard.slots} slots")
    if shard.replicas:
        parts.append(f"replicas {', '.join(shard.replicas)}")
    line = _text(f"{shard.name}  ")
    line.append(shard.state, _STYLES[shard.state])
    return line.append(printable(f"  {', '.join(parts)}") if parts else "")


def _consumers(count: int) -> str:
    return f"{count} consumer{'s' * (count != 1)}"


def _notes(view: View) -> list[Text]:
    return [_text(f"{shard.name}: {shard.note}") for shard in view.shards if shard.note]


def _number(value: int | None) -> Text:
    return Text(_shown(value))


def _shown(value: int | None) -> str:
    return _UNKNOWN if value is None else str(value)


def _text(text: str) -> Text:
    return Text(printable(text))
