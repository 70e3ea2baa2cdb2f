"""The audit as one HTML page that needs nothing else: plots inside as SVG, the numbers below each (P7)."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from math import cos, floor, pi, sin
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from postroad.errors import StorageError, UnavailableError
from postroad.spark.audit import KINDS, LOSSES, Audit, as_rows
from postroad.spark.audit_modes import QUEUE_COUNTS, QUEUE_KINDS
from postroad.spark.lake.tables import SCHEMAS, Lake
from postroad.spark.trace.topology import Place, latest, link_loads
from postroad.units import MILLISECOND_US, SECOND_US

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_FAULTS: Final = 500  # listed on the page; the tables have all
MAX_BARS: Final = 30  # subscriptions in a plot, the worst first
INK, GOOD, BAD, SOFT = "#1f2d3d", "#2a9d8f", "#e76f51", "#8d99ae"
COLOURS: Final = {
    "missing": "#d1495b",
    "duplicated": "#8e6bbf",
    "reordered": "#3a6ea5",
    "late": "#e9a03b",
    "unwanted": "#5c6b7a",
    "gaps": "#e7a08a",
    "redelivered": "#2a9d8f",
}
LINES: Final = (("median", "#2a9d8f"), ("95 %", "#e9a03b"), ("99 %", "#e76f51"))
_STYLE: Final = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2d3d; background: #f4f6f8; margin: 0; }
main { max-width: 1040px; margin: 0 auto; padding: 32px 20px 60px; }
h1 { font-size: 28px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 0 0 10px; }
p.sub { color: #66758a; margin: 0 0 22px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
.tiles { margin-bottom: 20px; }
.tile, section { background: #fff; border-radius: 10px; box-shadow: 0 1px 3px rgba(20, 40, 60, .12); }
.tile { padding: 14px 16px; } .tile b { display: block; font-size: 26px; line-height: 1.2; }
.tile span { color: #66758a; font-size: 13px; } .bad b { color: #d1495b; } .good b { color: #2a9d8f; }
section { padding: 18px 20px; margin-bottom: 18px; overflow-x: auto; } svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 8px; border-bottom: 1px solid #e6eaef; white-space: nowrap; }
th { color: #66758a; font-weight: 600; } th.t, td.t { text-align: left; }
p.warn { background: #fdf0ed; border-left: 4px solid #d1495b; padding: 10px 14px; border-radius: 6px; }
details { margin-top: 10px; } summary { cursor: pointer; color: #3a6ea5; font-size: 13px; }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What the page tells, as rows."""

    summary: list[dict[str, Any]]
    timeline: list[dict[str, Any]]
    losses: list[dict[str, Any]]
    faults: list[dict[str, Any]]  # the first of them
    unseen: list[dict[str, Any]]
    places: dict[str, Place]
    flows: dict[tuple[str, str], int]  # (origin, delivering broker) -> deliveries
    storage: list[tuple[str, int, int, int]]  # table, files, rows, bytes
    late_us: int
    inboxes: list[dict[str, Any]] = field(default_factory=list)
    queue_faults: list[dict[str, Any]] = field(default_factory=list)  # the first of them
    best_effort: list[dict[str, Any]] = field(default_factory=list)  # per link
    repairs: list[dict[str, Any]] = field(default_factory=list)  # per subscriber


def collect(lake: Lake, audit: Audit, *, late_us: int) -> Findings:
    """The audit, worked out."""
    return Findings(
        summary=as_rows(audit.summary),
        timeline=as_rows(audit.timeline),
        losses=as_rows(audit.losses),
        faults=as_rows(audit.faults.orderBy("kind", "subscriber", "tick").limit(MAX_FAULTS)),
        unseen=as_rows(audit.unseen),
        places=latest(lake),
        flows={(row["origin"], row["broker"]): row["count"] for row in as_rows(audit.flows)},
        storage=[_stored(lake, table) for table in SCHEMAS],
        late_us=late_us,
        inboxes=as_rows(audit.queues.inboxes),
        queue_faults=as_rows(audit.queues.faults.limit(MAX_FAULTS)),
        best_effort=as_rows(audit.best_effort.links),
        repairs=as_rows(audit.best_effort.receivers),
    )


def _stored(lake: Lake, table: str) -> tuple[str, int, int, int]:
    files = lake.files(table)
    return table, len(files), sum(file.rows for file in files), sum(file.size for file in files)


def write_report(path: Path, findings: Findings) -> None:
    """The page appears whole or not at all."""
    page = render(findings)
    aside = path.with_name(f".{path.name}.aside")
    try:
        aside.write_text(page, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def render(findings: Findings) -> str:
    """The page."""
    links = link_loads(findings.places, findings.flows)
    sections = [
        ("Completeness", _completeness(findings.summary), _summary_table(findings.summary)),
        ("Latency over time", _latency(findings.timeline), _timeline_table(findings.timeline)),
        ("Deliveries over time", _rate(findings.timeline), _timeline_table(findings.timeline)),
        ("Busiest paths", _map(findings.places, links), _links_table(findings.places, links, findings.flows)),
        ("Losses and repairs", _losses(findings), _losses_table(findings.losses)),
        ("Faults", _faults_text(findings), _faults_table(findings.faults)),
        ("Queues", _inboxes_text(findings), _inboxes_table(findings)),
        ("Best effort: loss per link", _links_lost(findings), _best_effort_table(findings)),
        ("Best effort: repairs", _repairs_text(findings.repairs), _repairs_table(findings)),
        ("Storage of the lake", _storage(findings.storage), _storage_table(findings.storage)),
    ]
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'><title>Postroad audit</title>"
        f"<style>{_STYLE}</style></head><body><main><h1>Delivery audit</h1>{_subtitle(findings)}"
        + _tiles(findings.summary)
        + "".join(_section(*section) for section in sections)
        + "</main></body></html>\n"
    )


# ---- plots


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UnavailableError("the report needs matplotlib: pip install 'postroad[spark]'") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(SOFT)
    axes.tick_params(colors=INK, labelsize=9)
    return figure, axes


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _completeness(summary: Sequence[Mapping[str, Any]]) -> str:
    worst = sorted(summary, key=lambda row: (_share(row), row["subscriber"]))[:MAX_BARS][::-1]
    figure, axes = _figure(9.6, 0.9 + 0.32 * len(worst))
    names = [row["subscriber"] for row in worst]
    shares = [100 * _share(row) for row in worst]
    axes.barh(names, [100.0] * len(worst), color="#eceff3")
    axes.barh(names, shares, color=[GOOD if share >= 100 else BAD for share in shares])
    for at, (row, share) in enumerate(zip(worst, shares, strict=True)):
        missing = f"  {row['missing']} missing" if row["missing"] else ""
        axes.text(101, at, f"{_percent(share)}{missing}", va="center", fontsize=9, color=INK)
    axes.set_xlim(0, 125)
    axes.set_xticks([0, 25, 50, 75, 100])
    axes.set_xlabel("share of what was due that arrived, in %")
    return _svg(figure)


def _latency(timeline: Sequence[Mapping[str, Any]]) -> str:
    from matplotlib.ticker import LogLocator, NullLocator

    if not timeline:
        return ""
    figure, axes = _figure(9.6, 3.2)
    times: Any = [_moment(row["at"]) for row in timeline]
    for at, (name, color) in enumerate(LINES):
        values = [max(row["latency_us"][at], 1) / MILLISECOND_US for row in timeline]
        axes.plot(times, values, color=color, label=name, linewidth=1.8, marker=".", markersize=4)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("milliseconds")
    axes.grid(axis="y", color="#e6eaef")
    axes.legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1), fontsize=9)
    figure.autofmt_xdate(rotation=0, ha="center")
    return _svg(figure)


def _rate(timeline: Sequence[Mapping[str, Any]]) -> str:
    if not timeline:
        return ""
    figure, axes = _figure(9.6, 2.6)
    times: Any = [_moment(row["at"]) for row in timeline]
    rates = [row["deliveries"] * SECOND_US / row["step_us"] for row in timeline]
    axes.fill_between(times, rates, color=GOOD, alpha=0.25)
    axes.plot(times, rates, color=GOOD, linewidth=1.8)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("deliveries a second")
    axes.grid(axis="y", color="#e6eaef")
    figure.autofmt_xdate(rotation=0, ha="center")
    return _svg(figure)


def _losses(findings: Findings) -> str:
    """What went wrong above the axis, what was made good below."""
    shown = [kind for kind in LOSSES if any(row[kind] for row in findings.losses)]
    if not shown:
        return "<p>Nothing was lost, late or out of order, and nothing had to be sent again.</p>"
    figure, axes = _figure(9.6, 3.0)
    step: Any = timedelta(microseconds=findings.timeline[0]["step_us"] if findings.timeline else SECOND_US)
    times: Any = [_moment(row["at"]) for row in findings.losses]
    below = [0] * len(times)
    for kind in shown:
        good = kind == "redelivered"
        counts = [-row[kind] if good else row[kind] for row in findings.losses]
        label = {"gaps": "told as gaps", "redelivered": "repaired: sent again"}.get(kind, kind)
        bottom = [0] * len(times) if good else below
        axes.bar(times, counts, step, bottom=bottom, align="edge", color=COLOURS[kind], label=label)
        below = below if good else [base + count for base, count in zip(below, counts, strict=True)]
    axes.axhline(0, color=SOFT, linewidth=0.8)
    axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    axes.set_ylabel("in each step of time")
    ends = [*times, *(_moment(row["at"]) for row in findings.timeline)]
    axes.set_xlim(min(ends), max(ends) + step)
    axes.legend(frameon=False, ncols=len(shown), loc="lower left", bbox_to_anchor=(0, 1), fontsize=9)
    figure.autofmt_xdate(rotation=0, ha="center")
    return _svg(figure)


def _storage(storage: Sequence[tuple[str, int, int, int]]) -> str:
    figure, axes = _figure(9.6, 0.7 + 0.32 * len(storage))
    tables = [row[0] for row in storage][::-1]
    sizes = [row[-1] / 1e6 for row in storage][::-1]
    axes.barh(tables, sizes, color=GOOD)
    for at, size in enumerate(sizes):
        axes.text(size, at, f"  {size:,.3g} MB", va="center", fontsize=9, color=INK)
    axes.set_xlim(0, max([*sizes, 1e-6]) * 1.15)
    axes.set_xlabel("MB on disk")
    return _svg(figure)


def _map(topology: Mapping[str, Place], links: Mapping[tuple[str, str], int]) -> str:
    if not topology:
        return "<p>No broker has told its links yet.</p>"
    figure, axes = _figure(9.6, 5.2)
    brokers = sorted(topology)
    places = {
        broker: (cos(2 * pi * at / len(brokers)), sin(2 * pi * at / len(brokers)))
        for at, broker in enumerate(brokers)
    }
    drawn = {
        (min(left, right), max(left, right))
        for left in brokers
        for right in topology[left].links
        if right in places
    }
    busiest = max([*links.values(), 1])
    for left, right in sorted(drawn):
        load = links.get((left, right), 0)
        (x1, y1), (x2, y2) = places[left], places[right]
        width = 1 + 9 * load / busiest
        axes.plot([x1, x2], [y1, y2], color=BAD if load else SOFT, alpha=0.75, linewidth=width, zorder=1)
        if load:
            x, y = (x1 + x2) / 2, (y1 + y2) / 2
            box = {"facecolor": "white", "edgecolor": "none", "pad": 2}
            axes.text(x, y, f"{load:,}", fontsize=9, color=INK, ha="center", va="center", bbox=box, zorder=4)
    for broker, (x, y) in places.items():
        axes.scatter([x], [y], s=620, color="#ffffff", edgecolors=INK, linewidths=1.5, zorder=2)
        axes.text(
            x, y, topology[broker].name or broker, fontsize=9, ha="center", va="center", zorder=3, color=INK
        )
    axes.set_axis_off()
    axes.margins(0.15)
    return _svg(figure)


# ---- text and tables


def _subtitle(findings: Findings) -> str:
    said = "No deliveries were reported."
    if findings.timeline:
        first, last = (
            findings.timeline[0]["at"],
            findings.timeline[-1]["at"] + findings.timeline[-1]["step_us"],
        )
        said = f"{_moment(first):%Y-%m-%d %H:%M:%S} to {_moment(last):%Y-%m-%d %H:%M:%S} UTC"
    warning = unseen_text(findings.unseen)
    return f"<p class='sub'>{said}</p>" + (f"<p class='warn'>{html.escape(warning)}</p>" if warning else "")


def unseen_text(unseen: Sequence[Mapping[str, Any]]) -> str:
    """A warning, if the lake does not have everything."""
    reports, spans = (sum(row[name] for row in unseen) for name in ("reports", "spans"))
    if not reports and not spans:
        return ""
    where = ", ".join(row["broker"] for row in unseen)
    return (
        f"The lake is not complete: {reports:,} delivery reports and {spans:,} spans of time of brokers"
        f" {where} never came to it. What seems missing there may have been delivered."
    )


def _share(row: Mapping[str, Any]) -> float:
    return 1 - row["missing"] / row["due"] if row["due"] else 1.0


def _percent(share: float) -> str:
    """Rounded down: only what is whole is 100 %."""
    return f"{floor(share * 1e4) / 1e4:g} %"


def _tiles(summary: Sequence[Mapping[str, Any]]) -> str:
    total = {name: sum(row[name] for row in summary) for name in ("due", "delivered", "pending", *KINDS)}
    share = _share(total) * 100
    tiles = [("good" if share >= 100 else "bad", _percent(share), "of what was due arrived")]
    tiles.append(("", f"{total['delivered']:,}", f"deliveries to {len(summary)} subscriptions"))
    slowest = max((row["latency_us"][2] for row in summary if row["latency_us"]), default=None)
    if slowest is not None:
        tiles.append(("", _ms(slowest), "99 % arrive within, at the slowest subscription"))
    tiles += [("bad" if total[kind] else "good", f"{total[kind]:,}", kind) for kind in KINDS]
    tiles.append(("", f"{total['pending']:,}", "pending"))
    return (
        "<div class='tiles'>"
        + "".join(
            f"<div class='tile {mood}'><b>{figure}</b><span>{text}</span></div>"
            for mood, figure, text in tiles
        )
        + "</div>"
    )


def _section(title: str, picture: str, numbers: str) -> str:
    details = f"<details><summary>the numbers</summary>{numbers}</details>" if picture else numbers
    return f"<section><h2>{html.escape(title)}</h2>{picture}{details}</section>"


def _table(head: Sequence[str], body: Sequence[Sequence[object]], *, text: Sequence[int]) -> str:
    def cell(tag: str, at: int, value: object) -> str:
        shown = f"{value:,}" if isinstance(value, int) else str(value)
        return f"<{tag}{' class=t' if at in text else ''}>{html.escape(shown)}</{tag}>"

    rows = ["".join(cell("th", at, value) for at, value in enumerate(head))]
    rows += ["".join(cell("td", at, value) for at, value in enumerate(row)) for row in body]
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"


def _summary_table(summary: Sequence[Mapping[str, Any]]) -> str:
    numbers = ("due", "delivered", *KINDS, "pending", "gaps", "redelivered")
    head = ("subscription", "topic", "condition", *numbers, "median", "95 %", "99 %", "longest")
    body = [
        (
            *(row["subscriber"], row["topic"], row["where"]),
            *(row[name] for name in numbers),
            *(_ms(quantile) for quantile in row["latency_us"] or (None, None, None)),
            _ms(row["latency_max_us"]),
        )
        for row in summary
    ]
    return _table(head, body, text=(0, 1, 2))


def _timeline_table(timeline: Sequence[Mapping[str, Any]]) -> str:
    body = [
        (
            _clock(row["at"]),
            row["deliveries"],
            *(_ms(quantile) for quantile in row["latency_us"]),
        )
        for row in timeline
    ]
    return _table(("from", "deliveries", "median", "95 %", "99 %"), body, text=(0,))


def _links_table(
    topology: Mapping[str, Place],
    links: Mapping[tuple[str, str], int],
    flows: Mapping[tuple[str, str], int],
) -> str:
    def name(broker: str) -> str:
        return topology[broker].name if broker in topology else broker

    ranked = sorted(links.items(), key=lambda item: (-item[1], item[0]))
    over = _table(
        ("link", "", "deliveries"),
        [(name(source), name(target), load) for (source, target), load in ranked],
        text=(0, 1),
    )
    ends = sorted(flows.items(), key=lambda item: (-item[1], item[0]))
    return over + _table(
        ("published at", "delivered at", "deliveries"),
        [(name(source), name(target), load) for (source, target), load in ends],
        text=(0, 1),
    )


def _losses_table(losses: Sequence[Mapping[str, Any]]) -> str:
    body = [(_clock(row["at"]), *(row[kind] for kind in LOSSES)) for row in losses]
    return _table(("from", *LOSSES), body, text=(0,))


def _faults_text(findings: Findings) -> str:
    count = sum(row[kind] for row in findings.summary for kind in KINDS)
    if not count:
        return "<p>None found.</p>"
    listed = f"; the first {len(findings.faults):,} are listed" if count > len(findings.faults) else ""
    late = _ms(findings.late_us)
    return f"<p>{count:,} found{listed}. Late means more than {late} after publication.</p>"


def _faults_table(faults: Sequence[Mapping[str, Any]]) -> str:
    head = ("kind", "subscriber", "id", "pubend", "tick", "broker", "latency")
    body = [
        (
            *(row["kind"], row["subscriber"], row["id"], row["pubend"], str(row["tick"])),
            *(row["broker"] or "", _ms(row["latency_us"])),
        )
        for row in faults
    ]
    return _table(head, body, text=(0, 1, 2, 3, 5))


def _inboxes_text(findings: Findings) -> str:
    if not findings.inboxes:
        return "<p>No broker reported messages of queues.</p>"
    count = sum(row[kind] for row in findings.inboxes for kind in QUEUE_KINDS)
    if not count:
        return f"<p>{len(findings.inboxes):,} inboxes, no fault found.</p>"
    listed = f"; the first {MAX_FAULTS:,} are listed" if count > len(findings.queue_faults) else ""
    return f"<p>{len(findings.inboxes):,} inboxes, {count:,} faults{listed}.</p>"


def _inboxes_table(findings: Findings) -> str:
    numbers = (*QUEUE_COUNTS, *QUEUE_KINDS)
    body = [
        (
            row["inbox"],
            *(row[name] for name in numbers),
            *(_ms(quantile) for quantile in row["latency_us"] or (None, None, None)),
            _ms(row["latency_max_us"]),
        )
        for row in findings.inboxes
    ]
    faults = [
        (row["kind"], row["inbox"], row["id"], row["who"] or "", row["broker"] or "", _ms(row["latency_us"]))
        for row in findings.queue_faults
    ]
    return _table(("inbox", *numbers, "median", "95 %", "99 %", "longest"), body, text=(0,)) + (
        _table(("kind", "inbox", "id", "consumer", "broker", "latency"), faults, text=(0, 1, 2, 3, 4))
        if faults
        else ""
    )


def _links_lost(findings: Findings) -> str:
    if not findings.best_effort:
        return "<p>No broker reported best-effort events.</p>"
    shown = findings.best_effort[:MAX_BARS][::-1]
    figure, axes = _figure(9.6, 0.9 + 0.32 * len(shown))
    names = [f"{_called(findings, row['source'])} → {_called(findings, row['target'])}" for row in shown]
    axes.barh(names, [100 * row["loss"] for row in shown], color=BAD)
    for at, row in enumerate(shown):
        text = f"  {100 * row['loss']:.3g} %, {row['lost']:,} of {row['sent']:,}"
        axes.text(100 * row["loss"], at, text, va="center", fontsize=9, color=INK)
    axes.set_xlim(0, max(1.0, *(140 * row["loss"] for row in shown)))
    axes.set_xlabel("share of events lost on the link, in %")
    return _svg(figure)


def _called(findings: Findings, broker: str) -> str:
    return findings.places[broker].name if broker in findings.places else broker


def _best_effort_table(findings: Findings) -> str:
    body = [
        (
            *(_called(findings, row["source"]), _called(findings, row["target"])),
            *(row["sent"], row["received"], row["lost"], f"{100 * row['loss']:.3g} %"),
        )
        for row in findings.best_effort
    ]
    return _table(("from", "to", "sent", "received", "lost", "loss"), body, text=(0, 1))


def _repairs_text(repairs: Sequence[Mapping[str, Any]]) -> str:
    detected, recovered = (sum(row[name] for row in repairs) for name in ("detected", "recovered"))
    if not detected:
        return "<p>No subscriber reported losses.</p>"
    share = _percent(100 * recovered / detected)
    return f"<p>{share} of {detected:,} losses that subscribers found were repaired.</p>"


def _repairs_table(findings: Findings) -> str:
    numbers = ("received", "detected", "requests", "recovered", "given_up", "duplicates")
    body = [
        (
            *(row["subscriber"], _called(findings, row["broker"])),
            *(row[name] for name in numbers),
            *(_percent(100 * row["repaired"]), _ms(row["slowest_us"])),
        )
        for row in findings.repairs
    ]
    head = ("subscriber", "at", *numbers, "repaired", "slowest")
    return _table(head, body, text=(0, 1))


def audited_modes(
    inboxes: Sequence[Mapping[str, Any]],
    links: Sequence[Mapping[str, Any]],
    receivers: Sequence[Mapping[str, Any]],
) -> str:
    """What the command says of queues and best effort, "" if there is none."""
    said = ""
    if inboxes:
        faults = sum(row[kind] for row in inboxes for kind in QUEUE_KINDS)
        accepted, kept = (sum(row[name] for row in inboxes) for name in ("accepted", "kept"))
        said += f"; queues: {accepted:,} accepted of {kept:,} kept, {faults:,} faults"
    if links:
        lost, sent = (sum(row[name] for row in links) for name in ("lost", "sent"))
        said += f"; best effort: {lost:,} of {sent:,} lost on links"
    if receivers:
        recovered, detected = (sum(row[name] for row in receivers) for name in ("recovered", "detected"))
        said += f", {recovered:,} of {detected:,} losses repaired"
    return said


def _storage_table(storage: Sequence[tuple[str, int, int, int]]) -> str:
    body = [
        (table, files, rows, f"{size / 1e6:,.3f} MB", f"{size / rows:,.1f}" if rows else "")
        for table, files, rows, size in storage
    ]
    return _table(("table", "files", "rows", "size", "bytes a row"), body, text=(0,))


def _moment(at_us: int) -> datetime:
    return datetime.fromtimestamp(at_us / SECOND_US, UTC)


def _clock(at_us: int) -> str:
    return f"{_moment(at_us):%Y-%m-%d %H:%M:%S.%f}"[:-3]


def _ms(value_us: int | None) -> str:
    return "" if value_us is None else f"{value_us / MILLISECOND_US:,.1f} ms"
