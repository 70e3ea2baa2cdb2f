"""One configuration from a TOML file and flags."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import typer

from postroad.cli import app, up
from postroad.config import NodeConfig, format_address, parse_address
from postroad.errors import UsageError
from postroad.net.configure import _node, _Table, configure, is_loopback

EVERYTHING = """
name = "b2"
listen = "127.0.0.1:7422"
data = "/var/lib/postroad"
links = ["10.0.0.1:7420", "[fd00::1]:7420"]
metrics = "off"
log = "debug"
max_connections = 500

[tls]
certificate = "b2.pem"
key = "b2.key"
ca = "ca.pem"
require_client_certificate = true

[auth]
token = "s3cret"
link_token = "between brokers"
anonymous = true
link_principals = ["b1", "b3"]
[auth.tokens]
alice = "%s"
[[auth.rules]]
principal = "alice"
allow = true
action = "publish"
topic = "orders/#"

[limits]
event_bytes = "64 KiB"
subscriptions = 7

[streams]
plain_bytes = "16 MiB"
silence = "250 ms"

[delivery]
buffer_bytes = 100000

[connections]
cost = 5
client_window = "1 MiB"
ping = "2 s"
""" % hashlib.sha256(b"alice's").hexdigest()  # noqa: UP031 -- braces belong to TOML


def write(folder: Path, text: str) -> Path:
    file = folder / "postroad.toml"
    file.write_text(text)
    return file


def refusal(folder: Path, text: str, **flags: object) -> str:
    with pytest.raises(UsageError) as caught:
        configure(flags, write(folder, text))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nothing_given_is_the_default() -> None:
    assert configure({}) == NodeConfig()


def test_a_file_says_everything(tmp_path: Path) -> None:
    node = configure({}, write(tmp_path, EVERYTHING))
    assert (node.name, node.listen, node.data) == ("b2", "127.0.0.1:7422", Path("/var/lib/postroad"))
    assert (node.metrics, node.log, node.max_connections) == ("off", "debug", 500)
    assert (node.tls.certificate, node.tls.key, node.tls.ca) == ("b2.pem", "b2.key", "ca.pem")
    broker = node.broker
    assert broker.dial == ("10.0.0.1:7420", "[fd00::1]:7420")
    assert broker.auth.certificates
    assert broker.auth.anonymous
    assert set(broker.auth.tokens.values()) == {"shared", "brokers", "alice"}
    assert broker.auth.link_principals == ("brokers", "b1", "b3")
    assert broker.auth.rules[0].topic == "orders/#"
    assert (broker.limits.event_bytes, broker.limits.subscriptions) == (65536, 7)
    assert (broker.streams.plain_bytes, broker.streams.silence_us) == (16 << 20, 250_000)
    assert broker.delivery.buffer_bytes == 100_000
    assert (broker.links.cost, broker.links.client_window, broker.links.ping_us) == (5, 1 << 20, 2_000_000)
    assert broker.links.token == "between brokers"


@pytest.mark.parametrize("nothing", ["0", '"0"'])
def test_what_may_be_nothing_is_said_either_way(tmp_path: Path, nothing: str) -> None:
    tracking = configure(
        {}, write(tmp_path, f'tracking.cache_bytes = {nothing}\ntracking.jitter = "0"')
    ).broker.tracking
    assert (tracking.cache_bytes, tracking.jitter_us) == (0, 0)


def test_flags_win(tmp_path: Path) -> None:
    flags = {"name": "b9", "links": ["h:1"], "auth.link_token": "other", "tls.ca": "x.pem", "log": None}
    node = configure(flags, write(tmp_path, EVERYTHING))
    assert (node.name, node.broker.dial, node.broker.links.token) == ("b9", ("h:1",), "other")
    assert (node.tls.ca, node.tls.certificate, node.log) == ("x.pem", "b2.pem", "debug")


def test_token_file(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("from the file\nnot this\n")
    by_flag = configure({"auth.token_file": str(token)}, write(tmp_path, 'auth.token = "in the file"'))
    assert by_flag.broker.links.token == "from the file"
    token.write_text("\n")
    assert "is empty" in refusal(tmp_path, "", **{"auth.token_file": str(token)})
    assert "cannot read" in refusal(tmp_path, 'auth.token_file = "/nonexistent"')


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('lisen = "x"', "unknown setting 'lisen'; did you mean 'listen'?"),
        ("limits.event_byte = 5", "unknown setting 'limits.event_byte'; did you mean 'limits.event_bytes'?"),
        ("connections.token = 'x'", "unknown setting 'connections.token'"),
        ("name = 5", "name: 5 is not a text"),
        ('name = "two words"', "without blanks"),
        ('listen = "7420:"', "is not an address"),
        ('listen = "7422"', "'7422' is a port without a host: write 127.0.0.1:7422"),
        ('links = "127.0.0.1:1"', "expected a list"),
        ('links = ["127.0.0.1:99999"]', "is not an address"),
        ('streams.silence = "soon"', "streams.silence: 'soon' is not a quantity"),
        ("streams.silence = 5", "streams.silence: 5 is not a duration"),
        ("limits.event_bytes = -1", "limits.event_bytes: -1 is not a size"),
        ('limits.event_bytes = "20 MiB"', "limits.batch_bytes must leave room"),
        ("limits.attributes = true", "not a positive whole number"),
        ("limits.attributes = 0", "0 is not a positive whole number"),
        (
            "tracking.bits = 99999999999999",
            "tracking.bits: 99999999999999 is too large: the most is 4294967296",
        ),
        (
            'limits.event_bytes = "1025 GiB"',
            "limits.event_bytes: '1025 GiB' is too large: the most is 1024 GiB",
        ),
        ('tracking.skew = "0 ms"', "tracking.skew: '0 ms' is not more than 0"),
        ('tracking.skew = "0"', "tracking.skew: '0' is not more than 0"),
        ('[durable]\nkeep = "1 s"', "durable.keep is at least 2 s: brokers need it to report"),
        ("limits = 5", "'limits' is a section: write [limits]"),
        ('log = "loud"', "'loud' is not one of debug"),
        ('tls.key = "k.pem"', "needs its certificate"),
        ("tls.require_client_certificate = true", "mutual TLS needs --tls-cert"),
        ('auth = {token = "a", token_file = "b"}', "not both"),
        ('auth.tokens.alice = "plain"', "SHA-256"),
        ('[[auth.rules]]\nprincipal = "a"', "'auth.rules[0].allow' is missing"),
        ('[[auth.rules]]\nprincipal = "a"\nallow = true\naction = "fly"', "'fly' is not one of publish"),
        ("[auth", "postroad.toml"),
        ('listen = "0.0.0.0:7420"', "without authentication a broker serves loopback only"),
        ('listen = "example.org:7420"', "without authentication a broker serves loopback only"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, complaint: str) -> None:
    assert complaint in refusal(tmp_path, text)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        configure({}, tmp_path / "none.toml")


def test_authentication_opens_other_addresses() -> None:
    assert configure({"listen": "0.0.0.0:7420", "auth.token": "t"}).broker.auth.configured


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("localhost", ("localhost", 7420)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[::1]:99", ("::1", 99)),
        ("[::1]", ("::1", 7420)),
        (" h:1 ", ("h", 1)),
    ],
)
def test_addresses(text: str, parsed: tuple[str, int]) -> None:
    assert parse_address(text) == parsed
    assert parse_address(format_address(*parsed)) == parsed


@pytest.mark.parametrize("text", ["", ":", ":5", "h:", "h:x", "h:65536", "h:-1", "h:²", "http://h:5", "h/a"])
def test_not_addresses(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not an address such as 127.0.0.1:7420"):
        parse_address(text)


@pytest.mark.parametrize("text", ["::1:5", "fe80::1", "::ffff:1.2.3.4"])
def test_ipv6_addresses_are_written_in_brackets(text: str) -> None:
    with pytest.raises(UsageError, match=r"write an IPv6 one as \[::1\]:7420"):
        parse_address(text)


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "::", "example.org", "localhost.example.org")))


def test_the_documented_file_is_valid_and_says_the_defaults() -> None:
    """docs/reference/configuration.md: every setting is there, with its default where it has one."""
    text = (Path(__file__).parents[2] / "docs" / "reference" / "configuration.md").read_text()
    example = tomllib.loads(text.split("```toml\n")[1].split("```")[0])
    example["auth"].pop("token_file")
    node, default = _node(_Table(example, "")), NodeConfig()
    assert node.broker.limits == default.broker.limits
    assert node.broker.streams == default.broker.streams
    assert node.broker.delivery == default.broker.delivery
    assert node.broker.links == default.broker.links
    assert node.broker.durable == default.broker.durable
    assert node.broker.quotas == default.broker.quotas
    sections = {
        "limits": node.broker.limits,
        "streams": node.broker.streams,
        "delivery": node.broker.delivery,
        "durable": node.broker.durable,
        "quotas": node.broker.quotas,
    }
    for name, section in sections.items():
        names = [one.name for one in fields(section)] if is_dataclass(section) else section.__struct_fields__
        assert list(example[name]) == [one.removesuffix("_us") for one in names]
    assert "connections" in example


def test_every_flag_has_a_key_in_the_document() -> None:
    """docs/reference/configuration.md: whatever `postroad up` takes as a flag, a file may say."""
    text = (Path(__file__).parents[2] / "docs" / "reference" / "configuration.md").read_text()
    rows = dict(re.findall(r"^\| `(--[a-z-]+).*?\| `([a-z_.]+)", text, re.MULTILINE))
    command = typer.main.get_command(app)
    options = {option for one in getattr(command, "commands")["up"].params for option in one.opts}  # noqa: B009
    assert rows.keys() == options - {"--config"}
    tree = ast.parse(Path(up.__file__).read_text())
    passed = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    keys = [key.value for node in passed for key in node.keys if isinstance(key, ast.Constant)]
    assert sorted(keys) == sorted(rows.values())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "b9"),
        ("listen", "127.0.0.1:7422"),
        ("data", "elsewhere"),
        ("links", ["127.0.0.1:7420", "127.0.0.1:7424"]),
        ("metrics", "off"),
        ("log", "debug"),
        ("auth.token", "s3cret"),
        ("tls.ca", "ca.pem"),
        ("tracking.strategy", "exact"),
    ],
)
def test_a_flag_and_its_key_mean_the_same(tmp_path: Path, key: str, value: object) -> None:
    file = write(tmp_path, f"{key} = {json.dumps(value)}\n")
    assert configure({key: value}) == configure({}, file) != configure({})
