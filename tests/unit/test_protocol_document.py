"""docs/reference/protocol.md says what the code does: kinds, fields, layout, limits, examples."""

from __future__ import annotations

import re
import typing
from pathlib import Path
from types import GenericAlias
from typing import Any

import msgspec
import pytest

from postroad import errors, ids
from postroad.client import core as client
from postroad.clients import publishing
from postroad.config import DEFAULT_PORT
from postroad.durable.publisher import releasing
from postroad.events import EventBatch, topic_number
from postroad.events.attributes import encode_attributes
from postroad.events.batch import HEADER_DTYPE
from postroad.ids import MessageId, parse_pubend
from postroad.kernel import layout
from postroad.links import handshake, links, resuming
from postroad.links.connection import TAKES, LinkSettings, Phase
from postroad.links.handshake import MIN_LIMITS
from postroad.overlay import interest, topology
from postroad.streams import streams
from postroad.streams.delivery import CONNECTION_BUFFERS
from postroad.streams.settings import DeliveryConfig, StreamConfig
from postroad.units import MIB, SECOND_US
from postroad.wire import frames
from postroad.wire.frames import BATCH_KINDS, CONTROL, DEFAULT_LIMITS, Kind, Limits

TEXT = (Path(__file__).parents[2] / "docs" / "reference" / "protocol.md").read_text()
Row = dict[str, str]


def rows_after(start: int) -> list[Row]:
    """The first table after this place in the document."""
    lines = iter(TEXT[start:].splitlines())
    found: list[list[str]] = []
    for line in lines:
        if line.startswith("|"):
            found.append([cell.strip() for cell in line.strip().strip("|").split("|")])
        elif found:
            break
    names, dashes, *rows = found
    assert set("".join(dashes)) == {"-"}
    assert all(len(row) == len(names) for row in rows), names
    return [dict(zip(names, row, strict=True)) for row in rows]


def table(name: str) -> list[Row]:
    return rows_after(TEXT.index(f"<!-- table: {name} -->"))


def fields(name: str) -> list[Row]:
    return rows_after(TEXT.index(f"\n### {name}\n"))


def number(text: str) -> int:
    return int(text.replace(",", ""), 0)


def example(name: str) -> bytes:
    """The bytes of a worked example; the offset in front of every line must be right."""
    block = re.search(rf'```hex title="{name}"\n(.*?)```', TEXT, re.DOTALL)
    assert block is not None
    data = b""
    for line in block[1].splitlines():
        found = re.fullmatch(r"([0-9a-f]{3}): ((?:[0-9a-f]{2} ?)+)(?:  .*)?", line)
        assert found is not None, line
        assert int(found[1], 16) == len(data), line
        data += bytes.fromhex(found[2])
    return data


# ---- frames


def test_the_prefix_and_its_version() -> None:
    assert [(row["offset"], row["size"], row["field"]) for row in table("prefix")] == [
        ("0", "4", "length"),
        ("4", "1", "kind"),
        ("5", "1", "version"),
        ("6", "2", "flags"),
    ]
    assert frames.FRAME_PREFIX_BYTES == 8
    assert f"above {frames.MAX_CONTROL_BYTES:,} for a control frame" in TEXT
    assert TEXT.startswith(f"# The wire protocol, version {frames.PROTOCOL_VERSION}\n")


def test_every_kind_with_its_number_and_body() -> None:
    found = [(number(row["number"]), row["kind"], row["body"]) for row in table("kinds")]
    assert found == [(kind, kind.name, "batch" if kind in BATCH_KINDS else "control") for kind in Kind]


def test_who_may_send_what_when() -> None:
    def kinds(column: str, letter: str) -> set[Kind]:
        return {Kind[row["kind"]] for row in table("kinds") if letter in row[column].split()}

    assert kinds("before up", "d") == TAKES[Phase.ACCEPTED]
    assert kinds("before up", "a") == TAKES[Phase.DIALLED]
    assert kinds("when up", "c") == TAKES[Phase.CLIENT]
    assert kinds("when up", "n") == TAKES[Phase.BROKER]
    assert kinds("when up", "p") == TAKES[Phase.DIRECT]
    kind_of = {message: kind for kind, message in CONTROL.items()}
    taken = {kind_of[message] for state, message in client._MESSAGES if state is client.State.UP}
    queues = {Kind.SENT, Kind.RECEIVING, Kind.MESSAGES, Kind.SETTLED}
    assert kinds("when up", "b") == taken | {Kind.DELIVERY, Kind.BEST_EFFORT} | queues


# ---- control messages

PARTS: dict[str, type[msgspec.Struct]] = {
    "Limits": Limits,
    "Advertisement": frames.Advertisement,
    "InterestEntry": frames.InterestEntry,
    "InterestClaim": frames.InterestClaim,
    "Posting": frames.Posting,
    "QueueMessage": frames.QueueMessage,
}
MESSAGES: dict[str, type[msgspec.Struct]] = {kind.name: message for kind, message in CONTROL.items()} | PARTS


def type_text(kind: Any) -> str:
    """A type as the document writes it."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"[{type_text(arguments[0])}]"
    if origin is tuple:
        return f"({', '.join(map(type_text, arguments))})"
    if origin is dict:
        return f"{{{type_text(arguments[0])}: {type_text(arguments[1])}}}"
    assert not isinstance(kind, GenericAlias)
    return {int: "int", str: "text", bytes: "bytes"}.get(kind) or str(kind.__name__)


def default_text(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    if field.default_factory is not msgspec.NODEFAULT:
        return repr(field.default_factory())
    return repr(field.default).replace("'", '"')


@pytest.mark.parametrize("name", MESSAGES)
def test_fields_of_control_messages(name: str) -> None:
    found = [(number(row["#"]), row["field"], row["type"], row["default"]) for row in fields(name)]
    expected = [
        (at, field.name, type_text(field.type), default_text(field))
        for at, field in enumerate(msgspec.structs.fields(MESSAGES[name]))
    ]
    assert found == expected


def test_only_trailing_fields_have_defaults() -> None:
    for message in MESSAGES.values():
        required = [field.required for field in msgspec.structs.fields(message)]
        assert required == sorted(required, reverse=True)


def test_how_arrays_are_read() -> None:
    """Trailing defaults may be left out, surplus elements are skipped, no type stands in for another."""

    def read(kind: Kind, body: Any, behind: bytes = b"") -> frames.Message:
        data = msgspec.msgpack.encode(body) + behind
        prefix = (8 + len(data)).to_bytes(4, "little") + bytes((kind, 1, 0, 0))
        return frames.decode(prefix + data)

    limits = list(msgspec.structs.astuple(DEFAULT_LIMITS))
    assert read(Kind.HELLO, [1, "client", "", "", [*limits, 9], 65536, 0]) == frames.Hello(
        version=1, role="client", name="", token="", limits=DEFAULT_LIMITS, window=65536, time_us=0
    )
    assert read(Kind.CREDIT, [5, "later"]) == frames.Credit(size=5)
    for body in ([], [5.0], [True], ["5"], {"size": 5}):
        with pytest.raises(errors.PeerError):
            read(Kind.CREDIT, body)
    with pytest.raises(errors.PeerError):
        read(Kind.CREDIT, [5], b"\0")
    with pytest.raises(errors.PeerError):
        read(Kind.REFUSE, [b"code", "reason"])


# ---- batches

SIZES = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "i64": 8}
FORMATS = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "i64": "q", "bytes": "16s"}


@pytest.mark.parametrize(
    ("name", "expected", "size"),
    [
        ("frame header", layout.FRAME_HEADER, layout.FRAME_HEADER_BYTES),
        ("event header", layout.EVENT_HEADER, layout.EVENT_HEADER_BYTES),
    ],
)
def test_layout(name: str, expected: Any, size: int) -> None:
    offset = 0
    written = "<"
    for row in table(name):
        assert number(row["offset"]) == offset, row
        assert number(row["size"]) == SIZES.get(row["type"], 16), row
        offset += number(row["size"])
        written += FORMATS[row["type"]]
    assert offset == size
    assert written == expected.format


def test_names_of_event_header_fields() -> None:
    names = HEADER_DTYPE.names
    assert names is not None
    assert [row["field"] for row in table("event header")] == list(names)


def test_attribute_types() -> None:
    found = {row["name"]: number(row["type"]) for row in table("attribute types")}
    assert found == {
        "text": layout.TEXT,
        "integer": layout.INTEGER,
        "float": layout.FLOAT,
        "boolean": layout.BOOLEAN,
    }
    values: dict[str, layout.Value] = {"b": True, "f": 1.5, "i": -2, "t": "é"}
    assert encode_attributes(values, DEFAULT_LIMITS).hex(" ") == (
        "01 62 03 01 01 66 02 00 00 00 00 00 00 f8 3f 01 69 01 fe ff ff ff ff ff ff ff 01 74 00 02 00 c3 a9"
    )


def test_rules_and_their_order() -> None:
    found = {number(row["rule"]): row["text in the reason"] for row in table("rules")}
    assert found == {int(rule): text for rule, text in layout.RULE_TEXT.items()}


def test_worked_publish() -> None:
    data = example("publish")
    batch = EventBatch.parse(data, DEFAULT_LIMITS, expect=Kind.PUBLISH)
    event = batch.event(0)
    assert (batch.count, batch.channel) == (1, 1)
    assert event.id == MessageId.parse("0000002a-00000007-0193c1d2e3f4-0001")
    assert (event.topic, event.payload) == ("orders/eu", b'{"n":1}')
    assert event.attributes == {"price": 120, "urgent": True}
    assert list(event.attributes) == sorted(event.attributes)


def test_worked_gap() -> None:
    batch = EventBatch.parse(example("gap"), DEFAULT_LIMITS, expect=Kind.DELIVERY)
    assert (batch.count, batch.lost, batch.channel) == (0, True, 3)
    assert (batch.pubend, batch.start, batch.end) == (parse_pubend("00000007-80000001"), 100, 250)


def test_worked_subscribe() -> None:
    wanted = frames.Subscribe(number=3, topic="orders/#", where="price > 100")
    data = example("subscribe")
    assert int.from_bytes(data[:4], "little") == len(data)
    assert frames.decode(data) == wanted


# ---- numbers


def test_topic_numbers() -> None:
    found = table("topic numbers")
    assert len(found) >= 5
    for row in found:
        assert topic_number(row["topic"].strip("`").encode()) == number(row["number"]), row


def test_limits() -> None:
    found = table("limits")
    assert [row["field"] for row in found] == list(Limits.__struct_fields__)
    for row in found:
        assert number(row["default of a broker"]) == getattr(DEFAULT_LIMITS, row["field"])
        assert number(row["least allowed"]) == getattr(MIN_LIMITS, row["field"])


def test_times() -> None:
    for row in table("times"):
        settings = LinkSettings() if hasattr(LinkSettings(), row["setting"]) else StreamConfig()
        assert getattr(settings, row["setting"]) == round(float(row["seconds"]) * SECOND_US), row


SENTENCES = [
    f"port {DEFAULT_PORT} by default",
    f"at most {ids.MAX_NAME} bytes, printable",
    f"1 to {ids.MAX_NAME} bytes, printable",
    f"at most {handshake.MAX_TOKEN:,} characters",
    f"{handshake.MIN_WINDOW:,} to {handshake.MAX_WINDOW:,}",
    f"a control frame of at most {frames.HANDSHAKE_BYTES:,} bytes",
    f"cut to about {errors.MAX_MESSAGE:,} characters",
    f"at most {handshake.MAX_KEY_BYTES} bytes",
    f"1 to {topology.MAX_COST:,}",
    f"its node id, {topology.NODE_BYTES} bytes",
    f"at most {streams.MAX_NACK_SPANS} |",
    f"At most {releasing.MAX_RELEASES:,} |",
    f"The receiver keeps the {streams.MAX_STAMPS:,} newest",
    f"at most {interest._MAX_PARTS:,} |",
    f"at most {interest.TOPIC_BYTES:,} bytes |",
    f"at most {interest.WHERE_BYTES:,} bytes |",
    f"At most {interest.ENTRIES_PER_OWNER:,} entries",
    f"and {interest.TEXT_BYTES_PER_OWNER // MIB} MiB of text",
    f"by increasing broker, at most {topology.MAX_NEIGHBOURS:,}",
    f"increasing, at most {topology.MAX_PUBENDS:,}",
    f"At most {topology.MAX_BROKERS:,} brokers",
    f"and every {topology.EXPIRE_US // topology._SWEEPS_PER_EXPIRY // SECOND_US} s",
    f"longest unused beyond {resuming.MAX_PUBLISHERS:,}",
    f"latest {publishing.MAX_PUBLISHERS:,} publishers",
    f"(0: {DeliveryConfig().buffer_bytes // MIB} MiB;",
    f"{StreamConfig().plain_bytes // MIB} MiB by\ndefault",
]


@pytest.mark.parametrize("sentence", SENTENCES)
def test_numbers_in_sentences(sentence: str) -> None:
    assert sentence in TEXT


def test_numbers_in_words() -> None:
    assert links._CREDIT_SHARE == 4
    assert "when that reaches W / 4" in TEXT
    assert CONNECTION_BUFFERS == 4
    assert "never more than four times" in TEXT
    assert topology.EXPIRE_US == 3_600 * SECOND_US
    assert "unreachable for an hour is forgotten" in TEXT
    assert handshake.MAX_TIME_US == topology.MAX_SEQUENCE == (1 << 62) - 1
    assert TEXT.count("0 to 2^62-1") == 2


def test_error_codes() -> None:
    def codes(kind: type[errors.PostroadError]) -> set[str]:
        return {kind.code}.union(*(codes(child) for child in kind.__subclasses__()))

    assert {row["code"] for row in table("codes")} == codes(errors.PostroadError)


def test_links_inside_the_document_lead_somewhere() -> None:
    headings = {
        re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower()).replace(" ", "-")
        for line in TEXT.splitlines()
        if line.startswith("#")
    }
    assert set(re.findall(r"\]\(#([\w-]+)\)", TEXT)) <= headings
