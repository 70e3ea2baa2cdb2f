"""The rows of a benchmark as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

# Every figure of a row that is shown: its heading, divisor and format. Others stay in the JSON.
FIGURES: Final[dict[str, tuple[str, float, str]]] = {
    "deliveries_per_s": ("thousand deliveries/s", 1e3, ",.0f"),
    "cpu_us_per_delivery": ("broker CPU us/delivery", 1, ".2f"),
    "cpu_us_per_event": ("broker CPU us/event", 1, ".1f"),
    "messages_per_s": ("messages/s", 1, ",.0f"),
    "cpu_us_per_message": ("CPU us/message, all brokers", 1, ".1f"),
    "down_there_s": ("without service, client at the broker that died, s", 1, ".2f"),
    "down_elsewhere_s": ("without service, client at another, s", 1, ".2f"),
    "down_silent_s": ("without service, the broker falls silent, client at another, s", 1, ".2f"),
    "catchup_1_s": ("catch-up of 1, s", 1, ".2f"),
    "catchup_1_events_per_s": ("catch-up of 1, thousand events/s", 1e3, ",.0f"),
    "catchup_25_s": ("catch-up of 25, s", 1, ".2f"),
    "catchup_25_events_per_s": ("catch-up of 25, thousand events/s", 1e3, ",.0f"),
    "disk_bytes_per_event": ("disk bytes/event", 1, ",.0f"),
    "p50_us": ("p50 us", 1, ",.0f"),
    "p99_us": ("p99 us", 1, ",.0f"),
    "p99_us_over_none_percent": ("p99 over none, %", 1, "+.1f"),
    "beside_p99_us": ("p99 us, side by side", 1, ",.0f"),
    "beside_p99_over_none_percent": ("p99 over none, side by side, %", 1, "+.1f"),
    "cpu_us_per_event_over_none_percent": ("CPU over none, %", 1, "+.1f"),
    "beside_cpu_us_per_event_over_none_percent": ("CPU over none, side by side, %", 1, "+.1f"),
    "stored_bits_per_key": ("stored bits/message", 1, ".1f"),
    "rows_per_s": ("thousand rows/s", 1e3, ",.0f"),
    "cpu_us_per_row": ("CPU us/row", 1, ".2f"),
    "stored_bytes_per_row": ("stored bytes/row", 1, ",.1f"),
    "ids_per_s_per_core": ("thousand ids/s per core", 1e3, ",.1f"),
    "cpu_us_per_id": ("CPU us/id", 1, ".2f"),
    "shuffled_bytes_per_id": ("shuffled bytes/id", 1, ",.1f"),
    "stored_bytes_per_id": ("stored bytes/id", 1, ",.1f"),
    "seconds": ("seconds", 1, ".2f"),
    "growth_exponent": ("growth exponent", 1, ".2f"),
    "lost": ("lost", 1, ".0f"),
    "broker_cores": ("broker cores", 1, ".2f"),
    "load_cores": ("load cores", 1, ".2f"),
    "bytes_per_connection": ("bytes/connection", 1, ",.0f"),
    "start_bytes": ("at start MiB", 1 << 20, ",.1f"),
    "us_per_event": ("us/event", 1, ".3f"),
    "matches_per_event": ("matches/event", 1, ".2f"),
    "add_us": ("add us", 1, ".1f"),
    "remove_us": ("remove us", 1, ".1f"),
    "bytes_per_subscription": ("bytes/subscription", 1, ",.0f"),
}


def cells(row: dict[str, Any], figure: str) -> list[str]:
    """The median, the smallest and the largest."""
    _, divisor, form = FIGURES[figure]
    spread = row.get("spread", {}).get(figure, ()) if row.get("rounds", 1) > 1 else ()
    return [format(value / divisor, form) for value in (row[figure], *spread)]


def show(name: str, rows: Sequence[dict[str, Any]], settings: dict[str, Any], console: Console) -> None:
    """Figure by figure, so that those to be compared are below each other."""
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    common = f": {workloads[0]}" if len(workloads) == 1 else ""
    table = Table(title=f"bench {name}{common}", title_justify="left")
    table.add_column("")
    for column in ("median", "smallest", "largest"):
        table.add_column(column, justify="right")
    for figure, (heading, _, _) in FIGURES.items():
        having = [row for row in rows if figure in row]
        if having:
            table.add_section()
            table.add_row(f"[bold]{heading}")
        for row in having:
            label = row["system"] if common else f"{row['system']}, {row['workload']}"
            table.add_row(f"  {label}", *cells(row, figure))
    console.print(table)
    for row in rows:
        if "error" in row:
            console.print(f"{row['system']}, {row['workload']}: {row['error']}", style="red", markup=False)
    for system in dict.fromkeys(row["system"] for row in rows):
        row = next(row for row in rows if row["system"] == system)
        if "version" in row:
            text = f"{system} {row['version']}: {row['settings']}; on disk before the answer: {row['syncs']}"
            console.print(text, markup=False, highlight=False)
    for key, value in settings.items():
        console.print(f"{key}: {value}", markup=False, highlight=False)
