"""`postroad pipeline`: what is done in bulk to events, their paths and the network's records, on Spark."""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from postroad.cli.connection import DEFAULT_BROKER, connecting
from postroad.cli.contexts import Options
from postroad.errors import UsageError
from postroad.units import duration_us, size

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LakeOption = Annotated[
    str,
    typer.Option(
        "--lake", metavar="PLACE", help="The lake: a folder, or s3://, gs://, abfss:// or hdfs://..."
    ),
]
MasterOption = Annotated[
    str,
    typer.Option("--master", metavar="URL", help="Spark's engine: local[*], spark://HOST:PORT, yarn, ..."),
]
RemoteOption = Annotated[
    str, typer.Option("--remote", metavar="URL", help="A Spark Connect server, sc://HOST:PORT, instead.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
LOCAL = "local[*]"


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Work on the lake, with Spark.", no_args_is_help=True)
    for command in (land, trace, compact, audit, plan, sweep, migrate):
        group.command(command.__name__)(_with_spark(command))
    app.add_typer(group, name="pipeline")


def _with_spark(command: Callable[..., None]) -> Callable[..., None]:
    """Said in one line where Spark is not installed; help is there all the same."""

    @wraps(command)
    def checked(**arguments: Any) -> None:
        from postroad.spark.session import check_engine, check_installed

        check_installed()
        check_engine(arguments.get("master", LOCAL), arguments.get("remote", ""))
        command(**arguments)

    return checked


@contextmanager
def _spark(doing: str, master: str, remote: str) -> Iterator[SparkSession]:
    """A session with a progress bar, for as long as the block."""
    from rich.console import Console

    from postroad.spark.progress import watched
    from postroad.spark.session import make_session

    pressed = threading.Event()

    def interrupt(*_: object) -> None:
        logging.disable(logging.CRITICAL)  # Py4J tells at length in which call it was
        raise KeyboardInterrupt  # so that what was begun is put away

    def note(*_: object) -> None:
        """A JVM that is left alone while it starts tells at length of that."""
        if pressed.is_set():  # for the second time
            interrupt()
        pressed.set()
        print("ending as soon as Spark has started", file=sys.stderr, flush=True)

    def listen(heard: Callable[..., None]) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, heard)

    listen(note)
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print("starting Spark ...")
    with console.status("starting Spark"):
        spark = make_session(master=master, remote=remote, name=f"postroad {doing}")
    listen(interrupt)  # in place of Spark's own, which talks to its JVM from within other talk
    try:
        if pressed.is_set():
            raise KeyboardInterrupt
        with watched(spark, doing):
            yield spark
    finally:
        spark.stop()


def _free(*places: Path | None) -> None:
    """UsageError if there is something already: said before Spark has worked for it."""
    for place in places:
        if place is not None and place.exists():
            raise UsageError(f"{place} exists already: choose another place, or remove it")


def _tell(result: dict[str, Any], text: str, *, as_json: bool) -> None:
    print(json.dumps(result) if as_json else text)


@connecting
def land(
    lake: LakeOption,
    once: Annotated[bool, typer.Option("--once", help="Land what there is now, then end.")] = False,
    *,
    connection: Options,
    master: MasterOption = LOCAL,
    remote: RemoteOption = "",
    as_json: JsonOption = False,
) -> None:
    """Keep a lake of events, filters, attachments, topology and deliveries up to date from a network."""
    from postroad.client.addresses import parse_addresses
    from postroad.spark.lake.landing import land as landed
    from postroad.spark.lake.tables import Lake, Tables
    from postroad.spark.options import Access

    stop = threading.Event()
    broker = connection.broker or DEFAULT_BROKER
    parse_addresses(broker)
    access = Access(
        token=connection.token or "",
        tls_ca=connection.tls_ca or "",
        tls_cert=connection.tls_cert or "",
        tls_key=connection.tls_key or "",
    )
    Tables(lake).check_place()

    def say(line: str) -> None:
        if not as_json:
            print(line, flush=True)

    def trouble(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def interrupted(*_: object) -> None:
        if stop.is_set():  # for the second time
            raise KeyboardInterrupt
        stop.set()

    with _spark("landing", master, remote) as spark:
        if not once:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, interrupted)
            logging.getLogger("py4j").setLevel(logging.CRITICAL)  # a batch that is stopped
        place = Lake(spark, lake)
        added = landed(place, broker, access=access, once=once, tell=say, trouble=trouble, stop=stop)
    rows = dict(sorted(added.items()))
    listed = ", ".join(f"{count:,} of {table}" for table, count in rows.items())
    _tell({"lake": lake, "rows": rows}, f"rows added: {listed or 'none'}; {lake}", as_json=as_json)


def trace(
    lake: LakeOption,
    ids: Annotated[
        Path, typer.Option("--ids", metavar="FILE", help="One id a line, or Parquet with a column `id`.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Parquet: one row per id.")],
    skew: Annotated[
        str | None, typer.Option(help="Instead of the brokers' tracking.skew, as in the lake.")
    ] = None,
    jitter: Annotated[str | None, typer.Option(help="Instead of the brokers' tracking.jitter.")] = None,
    routing: Annotated[str | None, typer.Option(help="Instead of the brokers' tracking.routing.")] = None,
    master: MasterOption = LOCAL,
    remote: RemoteOption = "",
    as_json: JsonOption = False,
) -> None:
    """Trace any number of messages: origin, route, receivers and the doubt of each."""
    from postroad.spark.lake.tables import Lake, Tables, spark_path, write_folder
    from postroad.spark.trace.bulk import read_ids
    from postroad.spark.trace.bulk import trace as traced
    from postroad.spark.trace.topology import latest, tracking_settings
    from postroad.tracking.settings import TrackingConfig

    given: dict[str, Any] = {} if routing is None else {"routing": routing}
    given |= {} if skew is None else {"skew_us": duration_us(skew)}
    given |= {} if jitter is None else {"jitter_us": duration_us(jitter)}
    TrackingConfig(**given)  # says what cannot be
    if not ids.exists():
        raise UsageError(f"there is no file {ids} to read ids from")
    Tables(lake).check("filters", "attachments")
    _free(out)
    with _spark("tracing", master, remote) as spark:
        began = time.monotonic()
        place = Lake(spark, lake)
        config = replace(tracking_settings(latest(place).values()), **given)
        traces = traced(place, read_ids(spark, ids), config=config)
        write_folder(traces.write.parquet, out)
        seconds = time.monotonic() - began
        verdicts = {
            row.verdict: row["count"]
            for row in spark.read.parquet(spark_path(out))
            .groupBy("verdict")
            .count()
            .orderBy("verdict")
            .collect()
        }
    total = sum(verdicts.values())
    listed = ", ".join(f"{count:,} {verdict}" for verdict, count in verdicts.items())
    _tell(
        {"out": str(out), "ids": total, "verdicts": verdicts, "seconds": seconds},
        f"{total:,} ids in {seconds:.1f} s, {total / seconds:,.0f} a second: {listed or 'none'}; {out}",
        as_json=as_json,
    )


def compact(
    lake: LakeOption,
    table: Annotated[
        list[str] | None, typer.Option("--table", help="Only this table (several). \\[default: all]")
    ] = None,
    accuracy: Annotated[float, typer.Option(help="That joined filters must keep.")] = 0.999,
    keep: Annotated[
        str, typer.Option(help="How long, from now on, earlier versions of tables can be read.")
    ] = "168 h",
    master: MasterOption = LOCAL,
    remote: RemoteOption = "",
    as_json: JsonOption = False,
) -> None:
    """Join part-full filters, drop states that were replaced, and turn many small files into few."""
    from postroad.spark.lake.compact import check_accuracy, hours
    from postroad.spark.lake.compact import compact as compacted
    from postroad.spark.lake.tables import SCHEMAS, Lake, Tables, check_table

    keep_hours = hours(keep)
    check_accuracy(accuracy)
    for name in table or ():
        check_table(name)
    tables = Tables(lake)
    tables.check()
    tables.check_place()
    with _spark("compacting", master, remote) as spark:
        place = Lake(spark, lake)
        done = [compacted(place, name, accuracy=accuracy, keep_hours=keep_hours) for name in table or SCHEMAS]
    lines = [
        f"{compaction.table}: {compaction.files_before:,} files into {compaction.files_after:,},"
        f" {compaction.rows_before:,} rows into {compaction.rows_after:,},"
        f" {compaction.bytes_before:,} bytes into {compaction.bytes_after:,}"
        if compaction.files_before
        else f"{compaction.table}: nothing to do"
        for compaction in done
    ]
    _tell({"tables": [compaction._asdict() for compaction in done]}, "\n".join(lines), as_json=as_json)


def migrate(lake: LakeOption, as_json: JsonOption = False) -> None:
    """Make Delta tables of a lake of an earlier Postroad, in place."""
    from postroad.spark.lake.migrate import migrate as migrated
    from postroad.spark.lake.tables import Tables

    rows = migrated(Tables(lake))
    listed = ", ".join(f"{count:,} of {table}" for table, count in rows.items())
    _tell({"lake": lake, "rows": rows}, f"rows brought over: {listed or 'none'}; {lake}", as_json=as_json)


def audit(
    lake: LakeOption,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write an HTML page with plots there.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write the tables there, as Parquet.")
    ] = None,
    subscriptions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What `postroad subs --json` printed. \\[default: what landing noted]",
        ),
    ] = None,
    late: Annotated[str, typer.Option(help="A delivery later than this is a fault.")] = "10 s",
    master: MasterOption = LOCAL,
    remote: RemoteOption = "",
    as_json: JsonOption = False,
) -> None:
    """Compare what every durable subscription and inbox should have got with what it was given; and say what
    best-effort events were lost on which link, and how many were repaired."""
    from postroad.spark.audit import KINDS, OTHER_MODES, as_rows, landed_subscriptions, read_subscriptions
    from postroad.spark.audit import audit as audited
    from postroad.spark.lake.tables import Lake, Tables, write_folder
    from postroad.spark.report import audited_modes, collect, unseen_text, write_report
    from postroad.spark.trace.topology import latest

    late_us = duration_us(late)
    tables = Tables(lake)
    if not any(tables.files(table) for table in OTHER_MODES):
        tables.check("events", "deliveries")
    _free(out)
    if report is not None and (report.is_dir() or not report.absolute().parent.is_dir()):
        raise UsageError(f"{report} is no place for a file")
    subscribed = landed_subscriptions(tables) if subscriptions is None else read_subscriptions(subscriptions)
    with _spark("auditing", master, remote) as spark:
        place = Lake(spark, lake)
        audit = audited(place, subscribed, late_us=late_us)
        summary = as_rows(audit.summary)
        if out is not None:

            def write(path: str) -> None:
                audit.faults.write.parquet(f"{path}/faults")
                audit.summary.write.parquet(f"{path}/summary")
                audit.timeline.write.parquet(f"{path}/timeline")
                audit.losses.write.parquet(f"{path}/losses")
                audit.queues.inboxes.write.parquet(f"{path}/inboxes")
                audit.queues.faults.write.parquet(f"{path}/queue_faults")
                audit.best_effort.links.write.parquet(f"{path}/links")
                audit.best_effort.receivers.write.parquet(f"{path}/repairs")

            write_folder(write, out)
        unseen = as_rows(audit.unseen)
        places = latest(place) if unseen else {}
        inboxes = as_rows(audit.queues.inboxes)
        links = as_rows(audit.best_effort.links)
        receivers = as_rows(audit.best_effort.receivers)
        if report is not None:
            write_report(report, collect(place, audit, late_us=late_us))
    totals = {name: sum(row[name] for row in summary) for name in ("due", "delivered", "pending", *KINDS)}
    text = ", ".join(f"{count:,} {name}" for name, count in totals.items())
    text += audited_modes(inboxes, links, receivers)
    written = f"; {report}" if report is not None else ""
    if unseen:
        print(unseen_text(unseen, places), file=sys.stderr)
    result = {"totals": totals, "subscriptions": summary, "unseen": unseen}
    result |= {"inboxes": inboxes, "links": links, "repairs": receivers}
    _tell(result, f"{text}{written}", as_json=as_json)


def plan(
    lake: LakeOption,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write a file per broker there.")
    ] = None,
    accuracy: Annotated[float, typer.Option(help="Share of claims that are true.")] = 0.999,
    memory: Annotated[str, typer.Option(help="For the filter of one history.")] = "128 KiB",
    master: MasterOption = LOCAL,
    remote: RemoteOption = "",
    as_json: JsonOption = False,
) -> None:
    """Propose settings for every broker, and for clients that repair, from what was observed, with the reason
    for each."""
    from postroad.spark.lake.compact import check_accuracy
    from postroad.spark.lake.tables import Lake, Tables
    from postroad.spark.plan import as_toml, observe, propose, write_plans
    from postroad.spark.plan_repair import observe_losses, propose_repair, repair_toml

    Tables(lake).check("filters", "attachments")
    check_accuracy(accuracy)
    size(memory)
    _free(out)
    with _spark("planning", master, remote) as spark:
        observed = observe(Lake(spark, lake))
        losses = observe_losses(Lake(spark, lake))
    repair = "" if losses is None else repair_toml(propose_repair(losses))
    proposals = [propose(broker, accuracy=accuracy, memory=size(memory)) for broker in observed]
    if out is not None:
        write_plans(proposals, out, repair=repair)
    texts = {proposal.observed.broker: as_toml(proposal) for proposal in proposals}
    said = "\n".join([*texts.values(), *([repair] if repair else [])])
    _tell({"brokers": texts, "repair": repair or None}, said, as_json=as_json)


def sweep(
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Parquet: one row per simulated network.")
    ],
    seed: Annotated[int, typer.Option(help="The first seed.")] = 1,
    seeds: Annotated[int, typer.Option(min=1, help="So many seeds of each combination.")] = 10,
    minutes: Annotated[str, typer.Option(help="Of virtual time; several with commas.")] = "0.5",
    brokers: Annotated[str, typer.Option(help="How many; several with commas.")] = "3",
    tracking: Annotated[str, typer.Option(help="none, exact, bloom; several with commas.")] = "none",
    master: MasterOption = LOCAL,
    remote: RemoteOption = "",
    as_json: JsonOption = False,
) -> None:
    """Simulate many networks, every combination with every seed; exit 1 if a rule did not hold."""
    from postroad.lab.sweep import grid
    from postroad.lab.sweep import sweep as swept
    from postroad.spark.lake.tables import spark_path, write_folder

    runs = grid(
        seeds=range(seed, seed + seeds),
        minutes=[float(text) for text in _list(minutes, float)],
        brokers=[int(text) for text in _list(brokers, int)],
        tracking=_list(tracking, str),
    )
    _free(out)
    with _spark("simulating", master, remote) as spark:
        write_folder(swept(spark, runs).write.parquet, out)
        rows = spark.read.parquet(spark_path(out)).filter("rule <> ''").orderBy("seed").collect()
    broken = [{"seed": row.seed, "rule": row.rule, "text": row.text} for row in rows]
    lines = [f"{len(runs):,} networks simulated, {len(broken)} broke a rule; {out}"]
    lines += [f"seed {row['seed']} violates {row['rule']}: {row['text']}" for row in broken]
    _tell({"out": str(out), "runs": len(runs), "broken": broken}, "\n".join(lines), as_json=as_json)
    if broken:
        raise typer.Exit(1)


def _list(text: str, kind: type[float] | type[int] | type[str]) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        try:
            kind(part)
        except ValueError:
            raise UsageError(f"{part!r} in {text!r} is no number") from None
    return parts
