"""`postroad bench`: ours and the peers installed on this machine, in one run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

Rounds = Annotated[int, typer.Option(min=1, help="Alternating rounds; fewer than three tell little.")]
Seconds = Annotated[float, typer.Option(min=0.2, help="Measured time of each system in each round.")]
Systems = Annotated[
    str,
    typer.Option(help="Some of postroad, mosquitto, nats, redis, rabbitmq, separated by commas."),
]
DurableSystems = Annotated[
    str,
    typer.Option(
        help="Some of postroad, jetstream, jetstream-always, rabbitmq, mosquitto, separated by commas."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")]


def _finish(name: str, rows: list[dict[str, Any]], settings: dict[str, Any], *, as_json: bool) -> None:
    import msgspec
    from rich.console import Console

    from postroad.bench.rounds import machine
    from postroad.bench.table import show

    settings = {**settings, **machine()}
    if as_json:
        typer.echo(msgspec.json.encode({"name": name, "rows": rows, "settings": settings}).decode())
    else:
        show(name, rows, settings, Console())
    if any("error" in row for row in rows):
        raise typer.Exit(1)


def _run(name: str, rounds: int, seconds: float, systems: str, as_json: bool) -> None:
    import signal

    from rich.console import Console

    from postroad.bench.rounds import alternate, cases

    wanted, settings = cases(name, systems, seconds)
    # Being told to end must unwind like an interrupt does, or the servers under test would stay behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Console(stderr=True).status("starting") as status:
        rows = alternate(wanted, rounds, status.update)
    _finish(name, rows, {**settings, "rounds": rounds}, as_json=as_json)


def fanout(rounds: Rounds = 3, seconds: Seconds = 5.0, systems: Systems = "", as_json: Json = False) -> None:
    """Deliveries a second and broker CPU for each: 4 publishers, 4 topics, 100 subscribers."""
    _run("fanout", rounds, seconds, systems, as_json)


def durable(
    rounds: Rounds = 3, seconds: Seconds = 5.0, systems: DurableSystems = "", as_json: Json = False
) -> None:
    """The same with durable subscriptions: deliveries a second, catch-up of 1 and of 25, bytes on disk."""
    _run("durable", rounds, seconds, systems, as_json)


def queues(
    rounds: Rounds = 3,
    seconds: Seconds = 3.0,
    systems: Annotated[
        str,
        typer.Option(help="Some of postroad, jetstream, jetstream-always, rabbitmq, separated by commas."),
    ] = "",
    as_json: Json = False,
) -> None:
    """Three brokers, three copies of each message: messages a second, latency, CPU; then kill -9."""
    import signal

    from rich.console import Console

    from postroad.bench.queue_senders import PAYLOAD
    from postroad.bench.queues import BROKERS, run

    # Being told to end must unwind like an interrupt does, or the servers under test would stay behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Console(stderr=True).status("starting") as status:
        rows = run(rounds, seconds, systems, status.update)
    settings = {"payload_bytes": len(PAYLOAD), "brokers": BROKERS, "seconds": seconds, "rounds": rounds}
    _finish("queues", rows, settings, as_json=as_json)


def latency(rounds: Rounds = 3, seconds: Seconds = 5.0, systems: Systems = "", as_json: Json = False) -> None:
    """How long an event takes at 5,000 a second, one at a time; ours also through 3 and 5 brokers."""
    _run("latency", rounds, seconds, systems, as_json)


def topics(rounds: Rounds = 3, seconds: Seconds = 5.0, systems: Systems = "", as_json: Json = False) -> None:
    """The same for 200 publishers, 500 topics and 500 subscribers, 5,000 events a second in all."""
    _run("topics", rounds, seconds, systems, as_json)


def memory(rounds: Rounds = 3, seconds: Seconds = 2.0, systems: Systems = "", as_json: Json = False) -> None:
    """Resident memory of an idle connection and of a subscription; SECONDS to settle before each reading."""
    _run("memory", rounds, seconds, systems, as_json)


def besteffort(
    rounds: Rounds = 3, seconds: Seconds = 5.0, systems: Systems = "", as_json: Json = False
) -> None:
    """Best effort with and without repair beside plain mode, Mosquitto with QoS 0 and NATS core."""
    import signal

    from rich.console import Console

    from postroad.bench.besteffort import RATE, cases
    from postroad.bench.rounds import alternate
    from postroad.bench.workloads import PAYLOAD_BYTES
    from postroad.bench.workloads import RATE as RAW_RATE

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Console(stderr=True).status("starting") as status:
        rows = alternate(cases(systems, seconds), rounds, status.update)
    settings = {
        "payload_bytes": PAYLOAD_BYTES,
        "events_per_s": f"{RAW_RATE} by raw sockets, {RATE} by our client",
        "seconds": seconds,
        "rounds": rounds,
    }
    _finish("besteffort", rows, settings, as_json=as_json)


def match(rounds: Rounds = 3, as_json: Json = False) -> None:
    """Matching alone: time per event at ten thousand, a hundred thousand and a million subscriptions."""
    from rich.console import Console

    from postroad.bench.match import run

    with Console(stderr=True).status("matching"):
        rows = run(rounds=rounds)
    _finish("match", list(rows), {"rounds": rounds}, as_json=as_json)


def tracking(rounds: Rounds = 15, seconds: Seconds = 3.0, as_json: Json = False) -> None:
    """What tracking costs: latency and CPU with the strategies none, exact and bloom, and bits stored.

    Many short rounds; what counts is the difference from none within a round. Then all brokers side by side,
    which is what p99 and CPU are judged by. A second broker without tracking shows how much is noise. Bits
    are those of one message in one history; a broker that delivers a message once has two.
    """
    import signal

    from rich.console import Console

    from postroad.bench.tracking import aims, noise, run

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Console(stderr=True).status("starting") as status:
        rows = run(rounds=rounds, seconds=seconds, tell=status.update)
    settings: dict[str, Any] = {"seconds": seconds, "rounds": rounds, **noise(rows)}
    for aim, measured, bound, verdict in aims(rows):
        settings[f"aim: {aim} {bound:.4g}"] = f"{measured:.3g}, {verdict}"
    _finish("tracking", rows, settings, as_json=as_json)


def pipeline(
    rounds: Rounds = 3,
    events: Annotated[int, typer.Option(min=1_000, help="Published by each round of the sink.")] = 200_000,
    ids: Annotated[
        int, typer.Option(min=1_000, help="Traced; a fifth of them at 100 filters per id.")
    ] = 300_000,
    as_json: Json = False,
) -> None:
    """The pipeline on Spark: source and sink, bulk trace against a join with the exact log, growth.

    Source rows beside a data source of Spark that yields empty rows. Traces with 1, 10 and 100 filters per
    id, the stored filters that must be asked about a message; the exact log of the same traffic is Parquet.
    """
    import signal

    from rich.console import Console

    from postroad.spark.session import check_installed

    check_installed()
    from postroad.bench.pipeline import aims, run

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Console(stderr=True).status("starting") as status:
        rows = run(rounds=rounds, events=events, ids=ids, tell=status.update)
    settings: dict[str, Any] = {"rounds": rounds, "events": events, "ids": ids}
    for aim, measured, bound, reached in aims(rows):
        settings[f"aim: {aim} {bound:.4g}"] = f"{measured:.3g}, {'met' if reached else 'missed'}"
    _finish("pipeline", rows, settings, as_json=as_json)


def hostile(
    attacks: Annotated[
        str, typer.Option(help="Those whose names hold one of these words, separated by commas.")
    ] = "",
    seconds: Annotated[float, typer.Option(min=0.2, help="Before, during and after each attack.")] = 3.0,
    as_json: Json = False,
) -> None:
    """An honest publisher and subscriber beside each attack: p99 and memory before, during and after it."""
    import signal

    import msgspec
    from rich.console import Console
    from rich.table import Table

    from postroad.bench.hostile import chosen, run, show
    from postroad.bench.rounds import machine

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Console(stderr=True).status("starting") as status:
        rows = run(chosen(attacks), seconds, status.update)
    settings = {"seconds": seconds, **machine()}
    if as_json:
        typer.echo(msgspec.json.encode({"name": "hostile", "rows": rows, "settings": settings}).decode())
    else:
        heads = ("attack", "plain p99 ms", "durable p99 ms", "memory MiB", "lost", "aims met")
        table = Table(*heads, title="bench hostile: before / during / after", title_justify="left")
        for line in show(rows):
            table.add_row(*line)
        Console().print(table)
    if any(row["lost"] for row in rows):
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    bench = typer.Typer(
        help="Benchmarks: ours and the peers installed here, in one run.", no_args_is_help=True
    )
    for command in (
        fanout,
        durable,
        queues,
        latency,
        topics,
        memory,
        besteffort,
        match,
        tracking,
        pipeline,
        hostile,
    ):
        bench.command()(command)
    app.add_typer(bench, name="bench")
