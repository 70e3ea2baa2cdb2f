"""The rows of a benchmark as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

# Every figure a row may have: its heading, divisor and format. Others stay in the JSON.
COLUMNS: Final[dict[str, tuple[str, float, str]]] = {
    "deliveries_per_s": ("thousand\ndeliveries/s", 1e3, ",.0f"),
    "cpu_us_per_delivery": ("broker CPU\nus/delivery", 1, ".2f"),
    "cpu_us_per_event": ("broker CPU\nus/event", 1, ".1f"),
    "catchup_1_s": ("catch-up\nof 1, s", 1, ".2f"),
    "catchup_1_events_per_s": ("thousand\nevents/s", 1e3, ",.0f"),
    "catchup_25_s": ("catch-up\nof 25, s", 1, ".2f"),
    "catchup_25_events_per_s": ("thousand\nevents/s", 1e3, ",.0f"),
    "disk_bytes_per_event": ("disk bytes/\nevent", 1, ",.0f"),
    "p50_us": ("p50 us", 1, ",.0f"),
    "p99_us": ("p99 us", 1, ",.0f"),
    "p99_us_over_none_percent": ("p99 over\nnone %", 1, "+.1f"),
    "beside_p99_us": ("p99 us,\nside by side", 1, ",.0f"),
    "beside_p99_over_none_percent": ("over\nnone %", 1, "+.1f"),
    "cpu_us_per_event_over_none_percent": ("CPU over\nnone %", 1, "+.1f"),
    "stored_bits_per_key": ("stored bits/\nmessage", 1, ".1f"),
    "rows_per_s": ("thousand\nrows/s", 1e3, ",.0f"),
    "cpu_us_per_row": ("CPU us/\nrow", 1, ".2f"),
    "ids_per_s_per_core": ("thousand ids/s\nper core", 1e3, ",.1f"),
    "cpu_us_per_id": ("CPU us/\nid", 1, ".2f"),
    "shuffled_bytes_per_id": ("shuffled\nbytes/id", 1, ",.1f"),
    "stored_bytes_per_id": ("stored\nbytes/id", 1, ",.1f"),
    "seconds": ("seconds", 1, ".2f"),
    "growth_exponent": ("growth\nexponent", 1, ".2f"),
    "lost": ("lost", 1, ".0f"),
    "broker_cores": ("broker\ncores", 1, ".2f"),
    "load_cores": ("load\ncores", 1, ".2f"),
    "bytes_per_connection": ("bytes/\nconnection", 1, ",.0f"),
    "start_bytes": ("at start\nMiB", 1 << 20, ",.1f"),
    "us_per_event": ("us/event", 1, ".3f"),
    "matches_per_event": ("matches/\nevent", 1, ".2f"),
    "add_us": ("add us", 1, ".1f"),
    "remove_us": ("remove us", 1, ".1f"),
    "bytes_per_subscription": ("bytes/\nsubscription", 1, ",.0f"),
}


def cell(row: dict[str, Any], figure: str) -> str:
    """The median, and below it the smallest and largest."""
    if figure not in row:
        return ""
    _, divisor, form = COLUMNS[figure]
    text = format(row[figure] / divisor, form)
    spread = row.get("spread", {}).get(figure)
    if spread is None or row["rounds"] == 1:
        return text
    return f"{text}\n{spread[0] / divisor:{form}}-{spread[1] / divisor:{form}}"


def show(name: str, rows: Sequence[dict[str, Any]], settings: dict[str, Any], console: Console) -> None:
    figures = [figure for figure in COLUMNS if any(figure in row for row in rows)]
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    common = f": {workloads[0]}" if len(workloads) == 1 else ""
    table = Table(title=f"bench {name}{common}", caption="medians, below them the smallest and the largest")
    table.add_column("system")
    if not common:
        table.add_column("workload", overflow="fold")
    for figure in figures:
        table.add_column(COLUMNS[figure][0], justify="right")
    for row in rows:
        names = (row["system"],) if common else (row["system"], row["workload"])
        table.add_row(*names, *(cell(row, figure) for figure in figures))
    console.print(table)
    for row in rows:
        if "error" in row:
            console.print(f"{row['system']}, {row['workload']}: {row['error']}", style="red", markup=False)
    for system in dict.fromkeys(row["system"] for row in rows):
        row = next(row for row in rows if row["system"] == system)
        if "version" in row:
            text = f"{system} {row['version']}: {row['settings']}; on disk before the answer: {row['syncs']}"
            console.print(text, markup=False, highlight=False)
    said = ", ".join(f"{key} {value}" for key, value in settings.items())
    console.print(said, markup=False, highlight=False)
