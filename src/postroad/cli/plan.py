"""`postroad plan tracking`: settings for an accuracy, a rate, a memory, a clock quality and a jitter.

`postroad plan repair`: what a publication record detects, and how long it must be (spec B11).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from postroad.units import MILLISECOND_US, SECOND_US, duration_us, size

if TYPE_CHECKING:
    from postroad.tracking.planner import Impossible, Plan


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Turn a wish into settings.", no_args_is_help=True)
    group.command("tracking")(tracking)
    group.command("repair")(repair)
    app.add_typer(group, name="plan")


def tracking(
    accuracy: Annotated[
        float, typer.Option("--accuracy", metavar="A", help="Share of claims that are true, such as 0.999.")
    ] = 0.999,
    rate: Annotated[
        float, typer.Option("--rate", metavar="R", help="Messages a second at the peak, in one history.")
    ] = 5000,
    memory: Annotated[
        str, typer.Option("--memory", metavar="M", help="For the filter of one history, such as '128 KiB'.")
    ] = "128 KiB",
    skew: Annotated[
        str, typer.Option("--skew", metavar="S", help="How far a publisher's clock is off at most.")
    ] = "250 ms",
    jitter: Annotated[
        str, typer.Option("--jitter", metavar="J", help="Longest way of a message, and skew between brokers.")
    ] = "500 ms",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> int:
    """Print the tracking settings that meet a wish, as a piece of configuration.

    If no settings can, say which wish is in the way and the nearest that is possible, and exit with 1.
    """
    from postroad.tracking.planner import Plan, Wish, plan

    wish = Wish(
        accuracy=accuracy,
        rate=rate,
        memory=size(memory),
        skew_us=duration_us(skew),
        jitter_us=duration_us(jitter),
    )
    result = plan(wish)
    if isinstance(result, Plan):
        print(json.dumps(_as_json(result), indent=2) if as_json else _as_toml(result))
        return 0
    if as_json:
        print(json.dumps(_impossible_json(result), indent=2))
    else:
        print(_impossible_text(result))
    return 1


def repair(
    match: Annotated[
        float, typer.Option("--match", metavar="P", help="Share of a publisher's messages that match.")
    ] = 0.05,
    loss: Annotated[
        float, typer.Option("--loss", metavar="L", help="Share of messages lost on the way to a receiver.")
    ] = 0.01,
    record: Annotated[
        int, typer.Option("--record", metavar="R", help="Entries of a publication record.")
    ] = 10,
    sharing: Annotated[
        int, typer.Option("--sharing", metavar="N", help="Receivers that miss the same message.")
    ] = 1,
    overlap: Annotated[
        float,
        typer.Option("--overlap", metavar="O", help="Share of its messages that another one wants too."),
    ] = 0.5,
    aim: Annotated[float, typer.Option("--aim", metavar="A", help="Detection probability to reach.")] = 0.99,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Print how likely a loss is detected by records of R entries, and the record that an aim takes.

    The default way of repair, summaries, needs no record: it is told beside it.
    """
    from postroad.client.repair.planning import plan

    figures = plan(match=match, loss=loss, record=record, sharing=sharing, overlap=overlap, aim=aim)
    if as_json:
        print(json.dumps(figures, indent=2))
        return
    proposed, reaching = figures["proposed_record"], figures["reaching_record"]
    print(f"detection  {figures['detection']:.4f} with records of {record} entries")
    if reaching is None or reaching != proposed:
        needed = "no record reaches" if reaching is None else f"{reaching:g} entries would reach"
        detected = figures["proposed_detection"]
        print(f"record     {needed} {aim:g}; {proposed:g}, the most there can be, detect {detected:.4f}")
    else:
        print(f"record     {proposed:g} entries reach {aim:g}, {figures['proposed_bytes']:,} bytes a message")
    print(f"summaries  {figures['summary_detection']:.6f} with the default way, 2 entries a message")


def _duration(us: int) -> str:
    if us % SECOND_US == 0:
        return f"{us // SECOND_US} s"
    return f"{us // MILLISECOND_US} ms" if us % MILLISECOND_US == 0 else f"{us} us"


def _bytes(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} bytes"


def _settings(plan: Plan) -> dict[str, Any]:
    return {
        "strategy": "bloom",
        "bits": plan.shape.m,
        "capacity": plan.shape.n,
        "hashes": plan.shape.k,
        "persist": _duration(plan.persist_us),
        "skew": _duration(plan.skew_us),
        "jitter": _duration(plan.wish.jitter_us),
    }


def _as_toml(plan: Plan) -> str:
    shape = plan.shape
    lines = [
        f"# Meets accuracy {plan.wish.accuracy} at {plan.wish.rate:g} messages a second in one history:",
        f"# at most {plan.w + 1} filters match a time"
        f" (w = {plan.w}, Tn = {plan.lifetime_us / SECOND_US:.3g} s),"
        f" each wrong with {shape.fpp:.2g}, together {1 - plan.accuracy:.2g}.",
        f"# Stored: {_bytes(plan.bytes_per_day)} a day and history, {shape.m / shape.n:.3g} bits a message."
        f" Memory: {_bytes(shape.size)} a history.",
        f"# Clocks may be off by {_duration(plan.skew_limit_us // MILLISECOND_US * MILLISECOND_US)}"
        f" before more filters match.",
        "[tracking]",
    ]
    comments = {
        "bits": "m",
        "capacity": "n",
        "hashes": "k",
        "persist": "Tp",
        "skew": "Ts",
        "jitter": "Tj",
    }
    for name, value in _settings(plan).items():
        comment = f"  # {comments[name]}" if name in comments else ""
        lines.append(f"{name} = {json.dumps(value)}{comment}")
    return "\n".join(lines)


def _as_json(plan: Plan) -> dict[str, Any]:
    return {
        "possible": True,
        "m": plan.shape.m,
        "n": plan.shape.n,
        "k": plan.shape.k,
        "w": plan.w,
        "Tp_ms": plan.persist_us // MILLISECOND_US,
        "Tn_ms": plan.lifetime_us // MILLISECOND_US,
        "Ts_ms": plan.skew_us / MILLISECOND_US,
        "accuracy": plan.accuracy,
        "fpp": plan.shape.fpp,
        "bytes_per_day": plan.bytes_per_day,
        "memory_bytes": plan.shape.size,
        "configuration": {"tracking": _settings(plan)},
    }


_SHOWN = {
    "memory": lambda wish: f"--memory '{wish.memory}'",
    "rate": lambda wish: f"--rate {wish.rate:g}",
    "accuracy": lambda wish: f"--accuracy {wish.accuracy:.15g}",
    "skew": lambda wish: f"--skew '{_duration(wish.skew_us)}'",
    "jitter": lambda wish: f"--jitter '{_duration(wish.jitter_us)}'",
}


def _impossible_text(impossible: Impossible) -> str:
    lines = [f"impossible: {impossible.reason}", "possible with one of:"]
    return "\n".join(
        lines + ["  " + " ".join(_SHOWN[name](wish) for name in names) for names, wish in impossible.nearest]
    )


def _impossible_json(impossible: Impossible) -> dict[str, Any]:
    values = {
        "memory": lambda wish: wish.memory,
        "rate": lambda wish: wish.rate,
        "accuracy": lambda wish: wish.accuracy,
        "skew": lambda wish: wish.skew_us / SECOND_US,
        "jitter": lambda wish: wish.jitter_us / SECOND_US,
    }
    nearest = [{name: values[name](wish) for name in names} for names, wish in impossible.nearest]
    single = all(len(change) == 1 for change in nearest)
    return {
        "possible": False,
        "reason": impossible.reason,
        "nearest": {name: value for change in nearest for name, value in change.items()} if single else {},
        "together": [] if single else nearest,
    }
