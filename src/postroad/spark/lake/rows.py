"""From what brokers publish to rows of the lake's tables (`lake.SCHEMAS`), as Arrow tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from postroad.history.bulletins import (
    BestEffort,
    Deliveries,
    LinkCount,
    Links,
    RepairCount,
    Spans,
    broker_text,
)
from postroad.ids import ID_BYTES, MessageId, pubend_text
from postroad.seam.reports import QueueEvents
from postroad.spark.columns import EVENTS, MAX_DAY, fixed_texts, id_characters
from postroad.tracking.attachment_log import Change, Promise
from postroad.tracking.keys import PUBLISH
from postroad.tracking.record import FilterMeta
from postroad.units import MILLISECOND_US

_EPOCH: Final = date(1970, 1, 1)
_DAY_MS: Final = 86_400_000
_SPAN: Final = pa.struct([("lo_ms", pa.int64()), ("hi_ms", pa.int64())])
_PROMISE: Final = pa.struct([(name, pa.int64()) for name in Promise.__struct_fields__])
_LINK: Final = pa.struct([("broker", pa.string()), ("cost", pa.int64())])
SCHEMAS: Final = {
    "events": EVENTS,
    "filters": pa.schema(
        [
            *(("broker", pa.string()), ("name", pa.string()), ("sequence", pa.int64())),
            *(("kind", pa.string()), ("neighbour", pa.string()), ("subscriber", pa.string())),
            *(("m", pa.int64()), ("n", pa.int64()), ("k", pa.int32()), ("count", pa.int64())),
            *(("lo_ms", pa.int64()), ("hi_ms", pa.int64()), ("singles", pa.list_(_SPAN))),
            *(("opened_us", pa.int64()), ("stored_us", pa.int64()), ("replaces", pa.int64())),
            *(("final", pa.bool_()), ("record", pa.binary())),
            *(("date", pa.date32()), ("origin", pa.string())),
        ]
    ),
    "attachments": pa.schema(
        [
            *(("broker", pa.string()), ("name", pa.string()), ("number", pa.int64())),
            *(("position", pa.int32()), ("whole", pa.bool_()), ("what", pa.string())),
            *(("at_us", pa.int64()), ("kind", pa.string()), ("who", pa.string())),
            *(("until_us", pa.int64()), ("noted_us", pa.int64()), ("promise", _PROMISE)),
            ("date", pa.date32()),
        ]
    ),
    "topology": pa.schema(
        [
            *(("broker", pa.string()), ("name", pa.string()), ("number", pa.int64())),
            *(("boot", pa.int64()), ("at_us", pa.int64()), ("links", pa.list_(_LINK))),
            *(("skew_us", pa.int64()), ("jitter_us", pa.int64()), ("routing", pa.string())),
            ("date", pa.date32()),
        ]
    ),
    "deliveries": pa.schema(
        [
            *(("what", pa.string()), ("id", pa.string()), ("subscriber", pa.string())),
            *(("session", pa.int64()), ("pubend", pa.string()), ("tick", pa.int64())),
            *(("start_tick", pa.int64()), ("broker", pa.string()), ("at_us", pa.int64())),
            *(("number", pa.int64()), ("position", pa.int32())),
            *(("date", pa.date32()), ("origin", pa.string())),
        ]
    ),
    "queue_events": pa.schema(
        [
            *(("what", pa.string()), ("id", pa.string()), ("inbox", pa.string()), ("who", pa.string())),
            *(("form", pa.string()), ("at_us", pa.int64()), ("expires_us", pa.int64())),
            *(("broker", pa.string()), ("number", pa.int64()), ("position", pa.int32())),
            ("date", pa.date32()),
        ]
    ),
    "best_effort_links": pa.schema(
        [
            *(("broker", pa.string()), ("neighbour", pa.string()), ("boot", pa.int64())),
            *(("at_us", pa.int64()), ("sent", pa.int64()), ("received", pa.int64())),
            *(("number", pa.int64()), ("date", pa.date32())),
        ]
    ),
    "repairs": pa.schema(
        [
            *(("broker", pa.string()), ("subscriber", pa.string()), ("boot", pa.int64())),
            *(("at_us", pa.int64()), ("received", pa.int64()), ("detected", pa.int64())),
            *(("requests", pa.int64()), ("recovered", pa.int64()), ("given_up", pa.int64())),
            *(("duplicates", pa.int64()), ("slowest_us", pa.int64()), ("number", pa.int64())),
            ("date", pa.date32()),
        ]
    ),
    "subscriptions": pa.schema(
        [
            *(("name", pa.string()), ("topic", pa.string()), ("where", pa.string())),
            *(("shared", pa.bool_()), ("since_us", pa.int64())),
        ]
    ),
    "landing": pa.schema(
        [
            *(("feed", pa.string()), ("subscription", pa.string()), ("batch", pa.int64())),
            *(("start", pa.string()), ("until", pa.string()), ("files", pa.string())),
            *(("waiting", pa.binary()), ("at_us", pa.int64())),
        ]
    ),
}


def day(time_ms: int) -> date:
    """The date, UTC, of a time; of one beyond the calendar, the calendar's last."""
    try:
        return _EPOCH + timedelta(days=time_ms // _DAY_MS)
    except OverflowError:
        return datetime.max.replace(tzinfo=UTC).date()


def typed(value: str | int | float | bool) -> dict[str, Any]:
    """An attribute's value as the struct it has in `events`."""
    kind = {bool: "boolean", int: "integer", float: "float"}.get(type(value), "text")
    return {"text": None, "integer": None, "float": None, "boolean": None, kind: value}


def events(
    rows: Iterable[tuple[MessageId, str, Mapping[str, str | int | float | bool], bytes, int, int]],
) -> pa.Table:
    """From (id, topic, attributes, payload, pubend, tick)."""
    return pa.Table.from_pylist(
        [
            {
                "id": str(identity),
                "publisher": f"{identity.publisher:08x}",
                "broker": broker_text(identity.broker),
                "time_ms": identity.time_ms,
                "topic": topic,
                "attributes": [(name, typed(value)) for name, value in attributes.items()],
                "payload": payload,
                "pubend": pubend_text(pubend),
                "tick": tick,
                "date": day(identity.time_ms),
                "origin": broker_text(pubend >> 32),
            }
            for identity, topic, attributes, payload, pubend, tick in rows
        ],
        SCHEMAS["events"],
    )


def filters(broker: int, name: str, records: Iterable[tuple[FilterMeta, bytes]]) -> pa.Table:
    """From stored records, each with its description."""
    return pa.Table.from_pylist(
        [
            {
                "broker": broker_text(broker),
                "name": name,
                "sequence": meta.sequence,
                "kind": meta.key.kind,
                # Its messages were published here, so it belongs with the others of this origin.
                "origin": broker_text(broker if meta.key.kind == PUBLISH else meta.key.origin),
                "neighbour": broker_text(meta.key.neighbour) if meta.key.neighbour else None,
                "subscriber": meta.key.subscriber or None,
                "m": meta.m,
                "n": meta.n,
                "k": meta.k,
                "count": meta.count,
                "lo_ms": meta.lo_ms,
                "hi_ms": meta.hi_ms,
                "singles": [{"lo_ms": lo, "hi_ms": hi} for lo, hi in meta.singles],
                "opened_us": meta.opened_us,
                "stored_us": meta.stored_us,
                "replaces": meta.replaces,
                "final": meta.final,
                "record": record,
                "date": day(meta.stored_us // MILLISECOND_US),
            }
            for meta, record in records
        ],
        SCHEMAS["filters"],
    )


def attachments(
    broker: int, name: str, number: int, changes: Sequence[Change], *, whole: bool = False
) -> pa.Table:
    """From one bulletin of the attachment map."""
    return pa.Table.from_pylist(
        [
            {
                "broker": broker_text(broker),
                "name": name,
                "number": number,
                "position": position,
                "whole": whole,
                "what": change.what,
                "at_us": change.at_us,
                "kind": change.kind,
                "who": change.who,
                "until_us": change.until_us,
                "noted_us": change.noted_us,
                "promise": None if change.promise is None else msgspec.structs.asdict(change.promise),
                "date": day(change.at_us // MILLISECOND_US),
            }
            for position, change in enumerate(changes)
        ],
        SCHEMAS["attachments"],
    )


def change(row: Mapping[str, Any]) -> Change:
    """What a row of `attachments` was made from; an older one does not tell all of it."""
    return Change(
        what=row["what"],
        at_us=row["at_us"],
        kind=row["kind"],
        who=row["who"],
        until_us=row["until_us"],
        noted_us=row["noted_us"] or 0,
        promise=None if row["promise"] is None else Promise(**row["promise"]),
    )


def topology(number: int, state: Links) -> pa.Table:
    """From one bulletin about a broker's links."""
    row = {
        "broker": state.broker,
        "name": state.name,
        "number": number,
        "boot": state.boot,
        "at_us": state.at_us,
        "links": [{"broker": link.broker, "cost": link.cost} for link in state.links],
        "skew_us": state.skew_us,
        "jitter_us": state.jitter_us,
        "routing": state.routing,
        "date": day(state.at_us // MILLISECOND_US),
    }
    return pa.Table.from_pylist([row], SCHEMAS["topology"])


def id_texts(ids: npt.NDArray[np.uint8]) -> pa.Array:
    """Ids, 16 bytes a row, as text."""
    return fixed_texts(id_characters(ids))


def deliveries(broker: int, number: int, report: Deliveries) -> pa.Table:
    """From one report: a row per event and receiver, per gap told, and per acknowledgement."""
    parts = [_delivered(report)]
    parts += [
        _spans_of("gap", report.names, report.gaps),
        _spans_of("ack", report.names, report.acknowledged),
    ]
    # In one piece: Spark takes an empty batch of an Arrow table for the table's end.
    table = pa.concat_tables(parts).combine_chunks()
    rows = table.num_rows
    table = table.append_column("broker", pa.array([broker_text(broker)] * rows, pa.string()))
    table = table.append_column("number", pa.array([number] * rows, pa.int64()))
    table = table.append_column("position", pa.array(np.arange(rows, dtype=np.int32)))
    return table.select(SCHEMAS["deliveries"].names)


def _delivered(report: Deliveries) -> pa.Table:
    rows = len(report)
    columns = {
        "what": pa.array(["event"] * rows, pa.string()),
        "id": id_texts(report.ids),
        "tick": pa.array(report.tick, pa.int64()),
        "start_tick": pa.nulls(rows, pa.int64()),
    }
    return pa.table(columns | _common(report.names, report))


def _spans_of(what: str, names: list[str], spans: Spans) -> pa.Table:
    rows = len(spans)
    columns = {
        "what": pa.array([what] * rows, pa.string()),
        "id": pa.nulls(rows, pa.string()),
        "tick": pa.array(spans.end, pa.int64()),
        "start_tick": pa.array(spans.start, pa.int64()),
    }
    return pa.table(columns | _common(names, spans))


def _common(names: list[str], rows: Deliveries | Spans) -> dict[str, pa.Array]:
    pubends, at = np.unique(rows.pubend, return_inverse=True)
    days = np.clip(rows.at_us // (MILLISECOND_US * _DAY_MS), 0, MAX_DAY)
    return {
        "subscriber": pa.array(names, pa.string()).take(pa.array(rows.subscriber)),
        "session": pa.array(rows.session.astype(np.int64)),
        "pubend": pa.array([pubend_text(int(pubend)) for pubend in pubends], pa.string()).take(pa.array(at)),
        "at_us": pa.array(rows.at_us, pa.int64()),
        "date": pc.cast(pa.array(days.astype(np.int32)), pa.date32()),
        "origin": pa.array([broker_text(int(pubend) >> 32) for pubend in pubends], pa.string()).take(
            pa.array(at)
        ),
    }


def queue_events(broker: int, number: int, reported: Sequence[QueueEvents]) -> pa.Table:
    """From one report: a row per message and what happened to it."""
    rows: list[dict[str, Any]] = []
    for report in reported:
        for at in range(0, len(report.ids), ID_BYTES):
            rows.append(
                {
                    "what": report.what,
                    "id": str(MessageId.from_bytes(report.ids[at : at + ID_BYTES])),
                    "inbox": report.inbox,
                    "who": report.who,
                    "form": report.form or None,
                    "at_us": report.at_us,
                    "expires_us": report.expires_us or None,
                    "broker": broker_text(broker),
                    "number": number,
                    "position": len(rows),
                    "date": day(report.at_us // MILLISECOND_US),
                }
            )
    return pa.Table.from_pylist(rows, SCHEMAS["queue_events"])


def best_effort_links(broker: int, number: int, state: BestEffort) -> pa.Table:
    return _counted("best_effort_links", broker, number, state, state.links)


def repairs(broker: int, number: int, state: BestEffort) -> pa.Table:
    return _counted("repairs", broker, number, state, state.receivers)


def _counted(
    table: str, broker: int, number: int, state: BestEffort, counts: Sequence[LinkCount | RepairCount]
) -> pa.Table:
    about = {
        "broker": broker_text(broker),
        "boot": state.boot,
        "at_us": state.at_us,
        "number": number,
        "date": day(state.at_us // MILLISECOND_US),
    }
    return pa.Table.from_pylist([about | msgspec.structs.asdict(count) for count in counts], SCHEMAS[table])
