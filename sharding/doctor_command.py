"""`warren doctor`: what keeps this machine from using this cluster, and what mends it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Annotated

import typer

from sharding.cluster_commands import LOCAL_BROKER, ManagementUrls
from sharding.commands import app, printable
from sharding.doctor import Finding, Verdict, examine, places_from
from sharding.doctor.findings import summary

_MARKS = {Verdict.OK: "ok     ", Verdict.WARNING: "warning", Verdict.PROBLEM: "problem"}

StreamUrls = Annotated[
    list[str],
    typer.Option(
        "--stream-url",
        envvar="WARREN_STREAM_URL",
        show_envvar=True,
        help="Stream URL of a node or a balancer; several times, for failover.",
    ),
]


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for each question.")] = 5.0,
    scratch: Annotated[
        str, typer.Option(help="What the names that are made and removed again begin with.")
    ] = "warren.doctor",
    url: Annotated[
        list[str],
        typer.Option(
            "--url", envvar="WARREN_URL", show_envvar=True, help="AMQP URL; several times, each."
        ),
    ] = [],  # noqa: B006 - typer copies it
    management: ManagementUrls = [],  # noqa: B006
    stream_url: StreamUrls = [],  # noqa: B006
) -> None:
    """Look at addresses, versions, nodes, balancers and permissions; exit code 1 for a problem."""
    anything = url or management or stream_url
    places = places_from(url if anything else LOCAL_BROKER, management, stream_url)
    findings = examine(places, timeout=timeout, scratch=scratch)
    if as_json:
        typer.echo(json.dumps([finding.to_json() for finding in findings], indent=1))
    else:
        typer.echo(report(findings))
    if any(finding.verdict is Verdict.PROBLEM for finding in findings):
        raise typer.Exit(1)


def report(findings: Sequence[Finding]) -> str:
    """One line for what is well, three for what is not."""
    lines: list[str] = []
    for finding in findings:
        mark, check = _MARKS[finding.verdict], f"{finding.check}, {finding.subject}"
        if finding.verdict is Verdict.OK:
            lines.append(f"{mark}  {check}: {finding.found}")
            continue
        lines.append(f"{mark}  {check}: {finding.found}")
        lines.append(f"           wanted: {finding.wanted}")
        lines.append(f"           {finding.fix}")
    return os.linesep.join([*map(printable, lines), summary(findings)])
