"""The audit as one HTML page that needs nothing else: plots inside as SVG, the numbers below each (P7)."""

from __future__ import annotations

import heapq
import html
import io
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from postroad.errors import StorageError, UnavailableError
from postroad.spark.audit import KINDS, Audit, as_rows
from postroad.spark.lake import SCHEMAS, Lake
from postroad.units import MILLISECOND_US, SECOND_US

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_FAULTS: Final = 500  # listed on the page; the tables have all
MAX_BARS: Final = 30  # subscriptions in a plot, the worst first
INK, GOOD, BAD, SOFT = "#1f2d3d", "#2a9d8f", "#e76f51", "#8d99ae"
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
details { margin-top: 10px; } summary { cursor: pointer; color: #3a6ea5; font-size: 13px; }
"""


def write_report(path: Path, lake: Lake, audit: Audit, *, late_us: int) -> None:
    """The page appears whole or not at all."""
    page = render(lake, audit, late_us=late_us)
    aside = path.with_name(f".{path.name}.aside")
    try:
        aside.write_text(page, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from None


def render(lake: Lake, audit: Audit, *, late_us: int) -> str:
    summary, timeline = as_rows(audit.summary), as_rows(audit.timeline)
    faults = as_rows(audit.faults.orderBy("kind", "subscriber", "tick").limit(MAX_FAULTS))
    topology = latest_topology(as_rows(lake.read("topology")))
    flows = {(row["origin"], row["broker"]): row["count"] for row in as_rows(audit.flows)}
    links = link_loads(topology, flows)
    parts = [
        _tiles(summary),
        _section("Completeness", _completeness(summary), _summary_table(summary)),
        _section("Latency over time", _latency(timeline), _timeline_table(timeline)),
        _section("Deliveries over time", _rate(timeline), _timeline_table(timeline)),
        _section("Busiest paths", _map(topology, links), _links_table(topology, links, flows)),
        _section(
            "Faults",
            f"<p>Late means more than {_ms(late_us)} after publication.</p>"
            if faults
            else "<p>None found.</p>",
            _table(
                ("kind", "subscriber", "id", "pubend", "tick", "broker", "latency"),
                [
                    (
                        *(row["kind"], row["subscriber"], row["id"], row["pubend"], row["tick"]),
                        *(row["broker"] or "", _ms(row["latency_us"])),
                    )
                    for row in faults
                ],
                text=(0, 1, 2, 3, 5),
            ),
        ),
        _section("Storage", "", _storage(lake)),
        "<p class='sub'>Brokers do not report queues, nor losses and repairs of best-effort links, yet.</p>",
    ]
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>Postroad audit</title>"
        f"<style>{_STYLE}</style></head><body><main><h1>Delivery audit</h1>{_subtitle(timeline)}"
        + "".join(parts)
        + "</main></body></html>\n"
    )


# ---- the topology


def latest_topology(rows: Iterable[Mapping[str, Any]]) -> dict[str, tuple[str, dict[str, int]]]:
    """broker -> (name, its links with their costs), as each last said."""
    found: dict[str, tuple[str, dict[str, int]]] = {}
    for row in sorted(rows, key=lambda row: (row["at_us"], row["number"])):
        links = {link["broker"]: link["cost"] for link in row["links"]}
        found[row["broker"]] = (row["name"], links)
    return found


def link_loads(
    topology: Mapping[str, tuple[str, Mapping[str, int]]], flows: Mapping[tuple[str, str], int]
) -> dict[tuple[str, str], int]:
    """Deliveries that went over each link, along the cheapest paths from origins to delivering brokers."""
    loads: dict[tuple[str, str], int] = {}
    for origin in sorted({origin for origin, _ in flows}):
        parents = _cheapest(topology, origin)
        for (source, target), count in sorted(flows.items()):
            if source != origin:
                continue
            here = target
            while here in parents:
                link = (min(here, parents[here]), max(here, parents[here]))
                loads[link] = loads.get(link, 0) + count
                here = parents[here]
    return loads


def _cheapest(topology: Mapping[str, tuple[str, Mapping[str, int]]], origin: str) -> dict[str, str]:
    parents: dict[str, str] = {}
    costs = {origin: 0}
    queue = [(0, origin)]
    while queue:
        cost, here = heapq.heappop(queue)
        if cost > costs[here] or here not in topology:
            continue
        for other, step in sorted(topology[here][1].items()):
            if other not in costs or cost + step < costs[other]:
                costs[other] = cost + step
                parents[other] = here
                heapq.heappush(queue, (cost + step, other))
    return parents


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
        axes.text(101, at, f"{share:.4g} %{missing}", va="center", fontsize=9, color=INK)
    axes.set_xlim(0, 125)
    axes.set_xticks([0, 25, 50, 75, 100])
    axes.set_xlabel("share of what was due that arrived, in %")
    return _svg(figure)


def _latency(timeline: Sequence[Mapping[str, Any]]) -> str:
    figure, axes = _figure(9.6, 3.2)
    times: Any = [datetime.fromtimestamp(row["at"] / SECOND_US, UTC) for row in timeline]
    for at, (name, color) in enumerate(LINES):
        values = [max(row["latency_us"][at], 1) / MILLISECOND_US for row in timeline]
        axes.plot(times, values, color=color, label=name, linewidth=1.8, marker=".", markersize=4)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_ylabel("milliseconds")
    axes.grid(axis="y", color="#e6eaef")
    if timeline:
        axes.legend(frameon=False, ncols=3, loc="upper left", fontsize=9)
    figure.autofmt_xdate(rotation=0, ha="center")
    return _svg(figure)


def _rate(timeline: Sequence[Mapping[str, Any]]) -> str:
    figure, axes = _figure(9.6, 2.6)
    times: Any = [datetime.fromtimestamp(row["at"] / SECOND_US, UTC) for row in timeline]
    rates = [row["deliveries"] * SECOND_US / row["step_us"] for row in timeline]
    axes.fill_between(times, rates, color=GOOD, alpha=0.25)
    axes.plot(times, rates, color=GOOD, linewidth=1.8)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("deliveries a second")
    axes.grid(axis="y", color="#e6eaef")
    figure.autofmt_xdate(rotation=0, ha="center")
    return _svg(figure)


def _map(topology: Mapping[str, tuple[str, Mapping[str, int]]], links: Mapping[tuple[str, str], int]) -> str:
    from math import cos, pi, sin

    if not topology:
        return "<p>No broker has told its links yet.</p>"
    figure, axes = _figure(7.2, 5.2)
    brokers = sorted(topology)
    places = {
        broker: (cos(2 * pi * at / len(brokers)), sin(2 * pi * at / len(brokers)))
        for at, broker in enumerate(brokers)
    }
    drawn = {(min(one, two), max(one, two)) for one in brokers for two in topology[one][1] if two in places}
    busiest = max([*links.values(), 1])
    for one, two in sorted(drawn):
        load = links.get((one, two), 0)
        (x1, y1), (x2, y2) = places[one], places[two]
        width = 1 + 9 * load / busiest
        axes.plot([x1, x2], [y1, y2], color=BAD if load else SOFT, alpha=0.75, linewidth=width, zorder=1)
        if load:
            x, y = (x1 + x2) / 2, (y1 + y2) / 2
            box = {"facecolor": "white", "edgecolor": "none", "pad": 2}
            axes.text(x, y, f"{load:,}", fontsize=9, color=INK, ha="center", va="center", bbox=box, zorder=4)
    for broker, (x, y) in places.items():
        axes.scatter([x], [y], s=620, color="#ffffff", edgecolors=INK, linewidths=1.5, zorder=2)
        axes.text(
            x, y, topology[broker][0] or broker, fontsize=9, ha="center", va="center", zorder=3, color=INK
        )
    axes.set_axis_off()
    axes.margins(0.15)
    return _svg(figure)


# ---- text and tables


def _subtitle(timeline: Sequence[Mapping[str, Any]]) -> str:
    if not timeline:
        return "<p class='sub'>No deliveries were reported.</p>"
    first = datetime.fromtimestamp(timeline[0]["at"] / SECOND_US, UTC)
    last = datetime.fromtimestamp((timeline[-1]["at"] + timeline[-1]["step_us"]) / SECOND_US, UTC)
    return f"<p class='sub'>{first:%Y-%m-%d %H:%M:%S} to {last:%Y-%m-%d %H:%M:%S} UTC</p>"


def _share(row: Mapping[str, Any]) -> float:
    return 1 - row["missing"] / row["due"] if row["due"] else 1.0


def _tiles(summary: Sequence[Mapping[str, Any]]) -> str:
    total = {name: sum(row[name] for row in summary) for name in ("due", "delivered", "pending", *KINDS)}
    share = _share(total) * 100
    tiles = [("good" if share >= 100 else "bad", f"{share:.6g} %", "of what was due arrived")]
    tiles.append(("", f"{total['delivered']:,}", f"deliveries to {len(summary)} subscriptions"))
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

    rows = ["".join(cell("th", at, one) for at, one in enumerate(head))]
    rows += ["".join(cell("td", at, one) for at, one in enumerate(row)) for row in body]
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"


def _summary_table(summary: Sequence[Mapping[str, Any]]) -> str:
    numbers = ("due", "delivered", *KINDS, "pending", "gaps", "redelivered")
    head = ("subscription", "topic", "condition", *numbers, "median", "95 %", "99 %", "longest")
    body = [
        (
            *(row["subscriber"], row["topic"], row["where"]),
            *(row[name] for name in numbers),
            *(_ms(one) for one in row["latency_us"] or (None, None, None)),
            _ms(row["latency_max_us"]),
        )
        for row in summary
    ]
    return _table(head, body, text=(0, 1, 2))


def _timeline_table(timeline: Sequence[Mapping[str, Any]]) -> str:
    body = [
        (
            f"{datetime.fromtimestamp(row['at'] / SECOND_US, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3],
            row["deliveries"],
            *(_ms(one) for one in row["latency_us"]),
        )
        for row in timeline
    ]
    return _table(("from", "deliveries", "median", "95 %", "99 %"), body, text=(0,))


def _links_table(
    topology: Mapping[str, tuple[str, Mapping[str, int]]],
    links: Mapping[tuple[str, str], int],
    flows: Mapping[tuple[str, str], int],
) -> str:
    def name(broker: str) -> str:
        return topology[broker][0] if broker in topology else broker

    ranked = sorted(links.items(), key=lambda item: (-item[1], item[0]))
    over = _table(
        ("link", "", "deliveries"), [(name(one), name(two), load) for (one, two), load in ranked], text=(0, 1)
    )
    ends = sorted(flows.items(), key=lambda item: (-item[1], item[0]))
    return over + _table(
        ("published at", "delivered at", "deliveries"),
        [(name(one), name(two), load) for (one, two), load in ends],
        text=(0, 1),
    )


def _storage(lake: Lake) -> str:
    body = []
    for table in SCHEMAS:
        files = [
            path
            for segment in lake.segments(table)
            for path in (lake.path / table / f"segment={segment}").rglob("*.parquet")
        ]
        size = sum(path.stat().st_size for path in files)
        body.append((table, len(lake.segments(table)), len(files), f"{size / 1e6:,.3f} MB"))
    return _table(("table", "segments", "files", "size"), body, text=(0,))


def _ms(value_us: int | None) -> str:
    return "" if value_us is None else f"{value_us / MILLISECOND_US:,.1f} ms"
