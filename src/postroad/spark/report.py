"""The audit as one HTML page that needs nothing else: plots inside as SVG, the numbers below each (P7)."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib import import_module
from math import floor
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
WITHIN: Final = ("half within", "95 % within", "99 % within")
LINES: Final = (
    ("#2a9d8f", "-", "o"),
    ("#c77d0a", "--", "s"),
    ("#c0392b", ":", "^"),
)  # of these, in their order
WIDE, NARROW = 9.6, 4.4  # inches of a plot: on a screen, and on a telephone
_STYLE: Final = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2d3d; background: #f4f6f8; margin: 0; }
main { max-width: 1040px; margin: 0 auto; padding: 32px 20px 60px; }
h1 { font-size: 28px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 0 0 10px; }
p.sub { color: #66758a; margin: 0 0 22px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
.tiles { margin-bottom: 20px; }
.tile, section { background: #fff; border-radius: 10px; box-shadow: 0 1px 3px rgba(20, 40, 60, .12); }
.tile { padding: 14px 16px; }
.tile b { display: block; font-size: 24px; line-height: 1.2; white-space: nowrap; }
.tile span { color: #66758a; font-size: 13px; } .bad b { color: #d1495b; } .good b { color: #2a9d8f; }
section { padding: 18px 20px; margin-bottom: 18px; } svg { max-width: 100%; height: auto; }
.scroll { overflow-x: auto; } .narrow { display: none; }
.wide svg, .narrow svg { display: block; width: 100%; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 8px; border-bottom: 1px solid #e6eaef; white-space: nowrap; }
th { color: #66758a; font-weight: 600; } th.t, td.t { text-align: left; }
p.warn { background: #fdf0ed; border-left: 4px solid #d1495b; padding: 10px 14px; border-radius: 6px; }
details { margin-top: 10px; } summary { cursor: pointer; color: #3a6ea5; font-size: 13px; }
@media (max-width: 640px) {
  main { padding: 18px 10px 40px; } section { padding: 14px 12px; } h1 { font-size: 24px; }
  .wide { display: none; } .narrow { display: block; }
  .tiles { grid-template-columns: repeat(2, 1fr); } .tile { padding: 10px 12px; } .tile b { font-size: 21px; }
  th:first-child, td:first-child { position: sticky; left: 0; background: #fff; }
}
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
        ("Busiest paths", _map(findings.places, links), _links_table(findings, links)),
        ("Losses and repairs", _losses(findings), _losses_table(findings.losses)),
        ("Faults", _faults_text(findings), _faults_table(findings)),
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


def _plot(draw: Callable[[float], Figure]) -> str:
    """The same figure twice, since text that is made for a screen cannot be read on a telephone."""
    wide, narrow = _svg(draw(WIDE)), _svg(draw(NARROW))
    return f"<div class='wide'>{wide}</div><div class='narrow'>{narrow}</div>"


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _completeness(summary: Sequence[Mapping[str, Any]]) -> str:
    worst = sorted(summary, key=lambda row: (_share(row), row["subscriber"]))[:MAX_BARS][::-1]
    names = [row["subscriber"] for row in worst]
    shares = [100 * _share(row) for row in worst]

    def draw(width: float) -> Figure:
        figure, axes = _figure(width, 0.9 + 0.32 * len(worst))
        axes.barh(names, [100.0] * len(worst), color="#eceff3")
        axes.barh(names, shares, color=[GOOD if share >= 100 else BAD for share in shares])
        for at, (row, share) in enumerate(zip(worst, shares, strict=True)):
            missing = f"  {row['missing']:,} missing" if row["missing"] else ""
            axes.text(101, at, f"{_percent(share)}{missing}", va="center", fontsize=9, color=INK)
        axes.set_xlim(0, 125 if width == WIDE else 190)
        axes.set_xticks([0, 50, 100])
        axes.set_xlabel("% of what was due arrived")
        return figure

    return _plot(draw)


def _dates(axes: Axes, times: Sequence[datetime], width: float) -> None:
    """Times below an axis, and the days they are of."""
    dates: Any = import_module("matplotlib.dates")  # which has no types
    # With one tick for the least, each unit begins where steps of the smaller one would be too many.
    locator = dates.AutoDateLocator(minticks=1, maxticks=8 if width == WIDE else 4, tz=UTC)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator, tz=UTC, show_offset=False))
    first, last = (f"{moment:%Y-%m-%d}" for moment in (times[0], times[-1]))
    axes.set_xlabel(f"{first}, UTC" if first == last else f"{first} to {last}, UTC")


def _latency(timeline: Sequence[Mapping[str, Any]]) -> str:
    from matplotlib.ticker import LogLocator, NullLocator

    if not timeline:
        return ""
    times: Any = [_moment(row["at"]) for row in timeline]

    def draw(width: float) -> Figure:
        figure, axes = _figure(width, 3.2)
        # The slowest first and thickest: where lines meet, each is still to be seen.
        for at, (color, dash, marker) in reversed(list(enumerate(LINES))):
            values = [max(row["latency_us"][at], 1) / MILLISECOND_US for row in timeline]
            style: dict[str, Any] = {
                "linestyle": dash,
                "linewidth": 1.4 + 0.9 * at,
                "marker": marker,
                "markersize": 3 + 1.5 * at,
            }
            axes.plot(
                times, values, color=color, label=WITHIN[at], markevery=max(1, len(times) // 12), **style
            )
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylabel("milliseconds")
        axes.grid(axis="y", color="#e6eaef")
        _legend(axes, width)
        _dates(axes, times, width)
        return figure

    return _plot(draw)


def _legend(axes: Axes, width: float) -> None:
    columns = 7 if width == WIDE else 3
    axes.legend(
        frameon=False, ncols=columns, loc="lower left", bbox_to_anchor=(0, 1), fontsize=9, columnspacing=1.0
    )


def _rate(timeline: Sequence[Mapping[str, Any]]) -> str:
    if not timeline:
        return ""
    times: Any = [_moment(row["at"]) for row in timeline]
    rates = [row["deliveries"] * SECOND_US / row["step_us"] for row in timeline]

    def draw(width: float) -> Figure:
        figure, axes = _figure(width, 2.6)
        axes.fill_between(times, rates, color=GOOD, alpha=0.25)
        axes.plot(times, rates, color=GOOD, linewidth=1.8)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("deliveries a second")
        axes.grid(axis="y", color="#e6eaef")
        _dates(axes, times, width)
        return figure

    return _plot(draw)


def _losses(findings: Findings) -> str:
    """What went wrong above the axis, what was made good below."""
    shown = [kind for kind in LOSSES if any(row[kind] for row in findings.losses)]
    if not shown:
        return "<p>Nothing was lost, late or out of order, and nothing had to be sent again.</p>"
    step: Any = timedelta(microseconds=findings.timeline[0]["step_us"] if findings.timeline else SECOND_US)
    times: Any = [_moment(row["at"]) for row in findings.losses]
    ends = [*times, *(_moment(row["at"]) for row in findings.timeline)]

    def draw(width: float) -> Figure:
        figure, axes = _figure(width, 3.0)
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
        _dates(axes, sorted(ends), width)
        axes.set_xlim(min(ends), max(ends) + step)
        _legend(axes, width)
        return figure

    return _plot(draw)


def _storage(storage: Sequence[tuple[str, int, int, int]]) -> str:
    tables = [row[0] for row in storage][::-1]
    sizes = [row[-1] for row in storage][::-1]

    def draw(width: float) -> Figure:
        figure, axes = _figure(width, 0.7 + 0.32 * len(storage))
        axes.barh(tables, sizes, color=GOOD)
        for at, size in enumerate(sizes):
            axes.text(size, at, f"  {_size(size)}", va="center", fontsize=9, color=INK)
        axes.set_xlim(0, max([*sizes, 1]) * (1.15 if width == WIDE else 1.4))
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.xaxis.set_major_formatter(lambda value, _: _size(round(value)))
        axes.set_xlabel("on disk")
        return figure

    from matplotlib.ticker import MaxNLocator

    return _plot(draw)


def _map(topology: Mapping[str, Place], links: Mapping[tuple[str, str], int]) -> str:
    if not topology:
        return "<p>No broker has told its links yet.</p>"
    drawn = sorted(
        {
            (min(left, right), max(left, right))
            for left in topology
            for right in topology[left].links
            if right in topology
        }
    )
    places = _spread(sorted(topology), drawn)
    rows = 1 + len({round(y, 1) for _, y in places.values()})
    lowest = min(y for _, y in places.values())
    busiest = max([*links.values(), 1])

    def draw(width: float) -> Figure:
        figure, axes = _figure(width, min(5.2, 0.4 + 0.75 * rows))
        for left, right in drawn:
            load = links.get((left, right), 0)
            (x1, y1), (x2, y2) = places[left], places[right]
            line = 1 + 9 * load / busiest
            axes.plot([x1, x2], [y1, y2], color=BAD if load else SOFT, alpha=0.75, linewidth=line, zorder=1)
            if load:
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
                middle = ((x1 + x2) / 2, (y1 + y2) / 2)
                axes.text(
                    *middle, f"{load:,}", fontsize=9, color=INK, ha="center", va="center", bbox=box, zorder=4
                )
        for broker, (x, y) in places.items():
            frame = {"boxstyle": "round,pad=0.5", "facecolor": "white", "edgecolor": INK, "linewidth": 1.4}
            name = called(topology, broker)
            axes.text(x, y, name, fontsize=9, ha="center", va="center", zorder=5, color=INK, bbox=frame)
        axes.set_axis_off()
        axes.set_xlim(-0.14, 1.14)
        axes.set_ylim(min(lowest, 0) - 0.2, 1.2)
        return figure

    return _plot(draw)


def _spread(brokers: Sequence[str], links: Sequence[tuple[str, str]]) -> dict[str, tuple[float, float]]:
    """Places in a square of side 1. The largest part that is linked has all of it, others a row below."""
    number = {broker: at for at, broker in enumerate(brokers)}
    hops = _hops(len(brokers), [(number[left], number[right]) for left, right in links])
    reached = hops < len(brokers)
    largest = reached[reached.sum(axis=1).argmax()]
    together = [broker for broker in brokers if largest[number[broker]]]
    apart = [broker for broker in brokers if not largest[number[broker]]]
    places = dict(zip(together, _scaled(hops[largest][:, largest]), strict=True))
    row = {broker: ((at + 0.5) / len(apart), -0.45) for at, broker in enumerate(apart)}
    return places | row


def _hops(count: int, links: Sequence[tuple[int, int]]) -> Any:
    """Between all; `count` where there is no way."""
    import numpy as np

    hops = np.full((count, count), float(count))
    np.fill_diagonal(hops, 0)
    for left, right in links:
        hops[left, right] = hops[right, left] = 1
    for middle in range(count):
        hops = np.minimum(hops, hops[:, [middle]] + hops[[middle], :])
    return np.minimum(hops, count)


def _scaled(hops: Any) -> list[tuple[float, float]]:
    """Classical scaling of hop counts: the two directions in which they differ most, both in full."""
    import numpy as np

    count = len(hops)
    if count == 1:
        return [(0.5, 0.5)]
    centre = np.eye(count) - 1 / count
    values, vectors = np.linalg.eigh(-0.5 * centre @ (hops**2) @ centre)
    axes = vectors[:, ::-1][:, :2] * np.sqrt(np.maximum(values[::-1][:2], 0))
    spread = axes.max(axis=0) - axes.min(axis=0)
    flat = spread < 0.05 * spread[0]  # a line has no second direction
    scaled = np.where(flat, 0.5, (axes - axes.min(axis=0)) / np.where(flat, 1, spread))
    return [(float(x), float(y)) for x, y in scaled]


# ---- text and tables


def _subtitle(findings: Findings) -> str:
    said = "No deliveries were reported."
    if findings.timeline:
        first, last = (
            findings.timeline[0]["at"],
            findings.timeline[-1]["at"] + findings.timeline[-1]["step_us"],
        )
        said = f"{_moment(first):%Y-%m-%d %H:%M:%S} to {_moment(last):%Y-%m-%d %H:%M:%S} UTC"
    warning = unseen_text(findings.unseen, findings.places)
    return f"<p class='sub'>{said}</p>" + (f"<p class='warn'>{html.escape(warning)}</p>" if warning else "")


def unseen_text(unseen: Sequence[Mapping[str, Any]], places: Mapping[str, Place]) -> str:
    """A warning, if the lake does not have everything."""
    reports, spans = (sum(row[name] for row in unseen) for name in ("reports", "spans"))
    if not reports and not spans:
        return ""
    where = ", ".join(called(places, row["broker"]) for row in unseen)
    return (
        f"The lake is not complete: {reports:,} delivery reports and {spans:,} spans of time of brokers"
        f" {where} never came to it. What seems missing there may have been delivered."
    )


def _share(row: Mapping[str, Any]) -> float:
    return 1 - row["missing"] / row["due"] if row["due"] else 1.0


def _percent(share: float) -> str:
    """Rounded down: only what is whole is 100 %. Near that four places count, below it one."""
    places = 1e4 if share >= 99.9 else 10
    return f"{floor(share * places) / places:g} %"


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


def called(places: Mapping[str, Place], broker: str) -> str:
    """A broker's name; its number where it has none, and behind the name where another has the same."""
    name = places[broker].name if broker in places else ""
    same = [other for other, place in places.items() if place.name == name]
    return f"{name} ({broker})" if name and len(same) > 1 else name or broker


def _pubend(places: Mapping[str, Place], pubend: str) -> str:
    """Where it is; and which, where a broker has several."""
    broker, _, number = pubend.partition("-")
    return called(places, broker) + (f" #{int(number, 16)}" if number.strip("0") else "")


def _table(head: Sequence[str], body: Sequence[Sequence[object]], *, text: Sequence[int]) -> str:
    def cell(tag: str, at: int, value: object) -> str:
        shown = f"{value:,}" if isinstance(value, int) else str(value)
        return f"<{tag}{' class=t' if at in text else ''}>{html.escape(shown)}</{tag}>"

    rows = ["".join(cell("th", at, value) for at, value in enumerate(head))]
    rows += ["".join(cell("td", at, value) for at, value in enumerate(row)) for row in body]
    return "<div class='scroll'><table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table></div>"


def _summary_table(summary: Sequence[Mapping[str, Any]]) -> str:
    numbers = ("due", "delivered", *KINDS, "pending", "gaps", "redelivered")
    head = ("subscription", "topic", "condition", *numbers, *WITHIN, "longest")
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
    return _table(("from, UTC", "deliveries", *WITHIN), body, text=(0,))


def _links_table(findings: Findings, links: Mapping[tuple[str, str], int]) -> str:
    def ranked(loads: Mapping[tuple[str, str], int]) -> list[tuple[str, str, int]]:
        order = sorted(loads.items(), key=lambda item: (-item[1], item[0]))
        return [
            (_called(findings, source), _called(findings, target), load) for (source, target), load in order
        ]

    over = _table(("link between", "and", "deliveries"), ranked(links), text=(0, 1))
    ends = _table(("published at", "delivered at", "deliveries"), ranked(findings.flows), text=(0, 1))
    return over + ends


def _losses_table(losses: Sequence[Mapping[str, Any]]) -> str:
    body = [(_clock(row["at"]), *(row[kind] for kind in LOSSES)) for row in losses]
    return _table(("from, UTC", *LOSSES), body, text=(0,))


def _faults_text(findings: Findings) -> str:
    count = sum(row[kind] for row in findings.summary for kind in KINDS)
    if not count:
        return "<p>None found.</p>"
    listed = f", {len(findings.faults):,} of them listed" if count > len(findings.faults) else ""
    late = _ms(findings.late_us)
    return f"<p>{count:,} found{listed}. Late means more than {late} after publication.</p>"


def _faults_table(findings: Findings) -> str:
    head = ("kind", "subscriber", "id", "published at", "on, UTC", "delivered at", "latency")
    body = [
        (
            *(row["kind"], row["subscriber"], row["id"], _pubend(findings.places, row["pubend"])),
            f"{_moment(row['tick']):%Y-%m-%d %H:%M:%S.%f}",  # a tick is its pubend's clock
            *(_called(findings, row["broker"]) if row["broker"] else "", _ms(row["latency_us"])),
        )
        for row in findings.faults
    ]
    return _table(head, body, text=(0, 1, 2, 3, 4, 5))


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
        (
            *(row["kind"], row["inbox"], row["id"], row["who"] or ""),
            *(_called(findings, row["broker"]) if row["broker"] else "", _ms(row["latency_us"])),
        )
        for row in findings.queue_faults
    ]
    return _table(("inbox", *numbers, *WITHIN, "longest"), body, text=(0,)) + (
        _table(("kind", "inbox", "id", "consumer", "broker", "latency"), faults, text=(0, 1, 2, 3, 4))
        if faults
        else ""
    )


def _links_lost(findings: Findings) -> str:
    if not findings.best_effort:
        return "<p>No broker reported best-effort events.</p>"
    shown = findings.best_effort[:MAX_BARS][::-1]
    names = [f"{_called(findings, row['source'])} → {_called(findings, row['target'])}" for row in shown]

    def draw(width: float) -> Figure:
        figure, axes = _figure(width, 0.9 + 0.32 * len(shown))
        axes.barh(names, [100 * row["loss"] for row in shown], color=BAD)
        for at, row in enumerate(shown):
            text = f"  {100 * row['loss']:.2g} %, {row['lost']:,} of {row['sent']:,}"
            axes.text(100 * row["loss"], at, text, va="center", fontsize=9, color=INK)
        room = 140 if width == WIDE else 220
        axes.set_xlim(0, max(1.0, *(room * row["loss"] for row in shown)))
        axes.set_xlabel("% of events lost on the link")
        return figure

    return _plot(draw)


def _called(findings: Findings, broker: str) -> str:
    return called(findings.places, broker)


def _best_effort_table(findings: Findings) -> str:
    body = [
        (
            *(_called(findings, row["source"]), _called(findings, row["target"])),
            *(row["sent"], row["received"], row["lost"], f"{100 * row['loss']:.2g} %"),
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
        (table, files, rows, _size(size), _size(size // rows) if rows else "")
        for table, files, rows, size in storage
    ]
    return _table(("table", "files", "rows", "size", "of a row"), body, text=(0,))


def _moment(at_us: int) -> datetime:
    return datetime.fromtimestamp(at_us / SECOND_US, UTC)


def _clock(at_us: int) -> str:
    return f"{_moment(at_us):%Y-%m-%d %H:%M:%S.%f}"[:-3]


def _ms(value_us: int | None) -> str:
    """Three figures: nobody acts on a fourth."""
    if value_us is None:
        return ""
    if value_us >= 10 * SECOND_US:
        return f"{value_us / SECOND_US:,.0f} s"
    if value_us >= SECOND_US:
        return f"{value_us / SECOND_US:.3g} s"
    value = value_us / MILLISECOND_US
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"


def _size(value: float) -> str:
    """Two figures: a lake grows while it is read."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 9.95 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"
