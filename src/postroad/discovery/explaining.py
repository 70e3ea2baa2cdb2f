"""The result of a search, for people and programs."""

from __future__ import annotations

from typing import Any

from postroad.discovery.search import SearchResult
from postroad.discovery.selection import is_near
from postroad.units import MILLISECOND_US


def as_rows(result: SearchResult) -> dict[str, Any]:
    """Everything about it, fit for JSON."""
    return {
        "chosen": result.chosen.response.name,
        "address": result.chosen.address,
        "why": why(result),
        "responses": [
            {
                "broker": row.response.name,
                "address": row.address,
                "delay_ms": row.delay_us / MILLISECOND_US,
                "weight": round(row.weight, 6),
                "ping_ms": None if row.round_trip_us is None else row.round_trip_us / MILLISECOND_US,
                "pinged": number < result.pinged,
                "connections": row.response.usage.connections,
                "links": row.response.usage.links,
                "cpu_share": row.response.usage.cpu_share,
                "memory_free_bytes": row.response.usage.memory_free_bytes,
            }
            for number, row in enumerate(result.candidates)
        ],
        "phases_ms": {name: took / MILLISECOND_US for name, took in result.phases_us.items()},
    }


def why(result: SearchResult) -> str:
    """Why the chosen broker was chosen."""
    trips = [row.round_trip_us for row in result.candidates if row.round_trip_us is not None]
    if not trips:
        return "the heaviest: nobody answered a ping"
    near = sum(is_near(trip, min(trips)) for trip in trips)
    return "the nearest" if near == 1 else f"drawn among {near} that are equally near, by how busy they are"
