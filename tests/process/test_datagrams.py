"""The real driver's UDP sockets: one turn with frames, bounds, refusals, bad addresses, groups."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from tests.worlds.echo import ANSWER, ASK, EchoNode
from tests.worlds.node_server import Caller, run, serving, until

from postroad.errors import UsageError
from postroad.net.datagrams import MAX_GROUPS, MAX_PER_TURN
from postroad.net.listen import bind_both
from postroad.seam.datagrams import Datagram, JoinGroup, LeaveGroup, SendTo
from postroad.seam.effects import Effect
from postroad.seam.inputs import Opened, Received
from postroad.wire.datagrams import MAX_DATAGRAM_BYTES, pack
from postroad.wire.frames import Ping, encode

GROUP = ("239.255.74.20", 17_420)
ROOT = Path(__file__).parents[2]


async def perform(core: EchoNode, port: int, *effects: Effect) -> None:
    """Have the core ask for these in a turn of its own."""
    core.wanted += effects
    with Caller() as nobody:
        nobody.send(pack(ANSWER, b"a turn"), "127.0.0.1", port)
        await until(lambda: not core.wanted)


@pytest.mark.parametrize(
    ("listen", "host"),
    [("127.0.0.1:0", "127.0.0.1"), ("[::1]:0", "::1"), ("[::]:0", "::1"), ("[::]:0", "127.0.0.1")],
)
def test_a_datagram_is_answered_from_the_port_of_the_connections(listen: str, host: str) -> None:
    async def test() -> None:
        core = EchoNode()
        async with serving(core, listen) as (_, port):
            with Caller(host) as caller:
                caller.send(pack(ASK, b"hello"), host, port)
                assert await caller.receive() == (pack(ANSWER, b"hello"), (host, port))
                assert core.of(Datagram) == [Datagram((host, caller.endpoint[1]), pack(ASK, b"hello"))]
            reader, writer = await asyncio.open_connection(host, port)
            (opened,) = await core.saw(Opened)
            assert opened.host == host  # as of its datagrams, also where the socket serves both kinds
            writer.close()
            del reader

    run(test())


def test_datagrams_and_frames_of_one_moment_are_one_turn() -> None:
    async def test() -> None:
        core = EchoNode()
        async with serving(core) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await core.saw(Opened)
            frame = encode(Ping(time_us=1))
            with Caller() as caller, socket.socket() as second:
                second.connect(("127.0.0.1", port))
                await core.saw(Opened, 2)
                for _ in range(20):
                    caller.send(pack(ASK, b"x"), "127.0.0.1", port)
                second.send(frame)
                time.sleep(0.05)  # noqa: ASYNC251 -- nothing is read before all of it is there
                await core.saw(Datagram, 20)
                await core.saw(Received)
            kinds = [{type(one) for one in turn} for turn in core.turns]
            assert {Datagram, Received} in kinds
            writer.close()
            del reader

    run(test())


def test_what_is_not_ours_is_dropped_before_the_core_has_a_turn() -> None:
    async def test() -> None:
        core = EchoNode()
        async with serving(core) as (server, port):
            turns = len(core.turns)
            with Caller() as caller:
                for data in (b"", b"x", b"pr\x01", b"pr\x02\x01", b"M-SEARCH * HTTP/1.1", bytes(1400)):
                    caller.send(data, "127.0.0.1", port)
                caller.send(pack(ASK, bytes(MAX_DATAGRAM_BYTES)), "127.0.0.1", port)
                await until(lambda: server.metrics()["datagrams_in_total"] == 7)
            assert server.metrics()["datagrams_foreign_total"] == 7
            assert len(core.turns) == turns

    run(test())


def test_a_flood_is_read_in_bounded_parts_and_the_kernel_drops_the_rest() -> None:
    async def test() -> None:
        core = EchoNode()
        async with serving(core) as (server, port):
            sent = 20_000
            with Caller() as caller:
                for _ in range(sent):
                    caller.send(pack(ANSWER, bytes(200)), "127.0.0.1", port)

                def settled() -> bool:
                    figures = server.metrics()
                    return figures["datagrams_in_total"] + figures["datagrams_overrun_total"] == sent

                await until(settled)
            figures = server.metrics()
            assert figures["datagrams_overrun_total"] > 0
            read = [sum(type(one) is Datagram for one in turn) for turn in core.turns]
            assert max(read) == MAX_PER_TURN

    run(test())


def test_bad_addresses_and_ports_where_nobody_listens_harm_nothing() -> None:
    async def test() -> None:
        core = EchoNode()
        with Caller() as gone:
            nobody = gone.endpoint
        async with serving(core) as (server, port):
            bad = [("no.such.host.invalid", 1), ("127.0.0.1", 0), ("::1", 7), ("", 5), ("127.0.0.1", 70_000)]
            data = pack(ANSWER, b"x")
            await perform(core, port, *(SendTo(endpoint, data) for endpoint in bad))
            assert server.metrics()["datagrams_failed_total"] == len(bad)
            elsewhere = ("240.0.0.1", 9)  # where the system sends nothing from a loopback address
            for _ in range(3):
                await perform(core, port, SendTo(nobody, data), SendTo(elsewhere, data))
            assert server.metrics()["datagrams_failed_total"] == len(bad) + 3
            with Caller() as caller:
                caller.send(pack(ASK, b"still there?"), "127.0.0.1", port)
                assert (await caller.receive())[0] == pack(ANSWER, b"still there?")

    run(test())


def test_port_0_takes_a_port_that_is_free_for_both() -> None:
    found = [bind_both("127.0.0.1:0") for _ in range(20)]
    for listener, datagrams in found:
        assert listener.getsockname() == datagrams.getsockname()
        listener.close()
        datagrams.close()


def test_a_port_whose_datagrams_are_taken_is_refused_with_advice() -> None:
    listener, datagrams = bind_both("127.0.0.1:0")
    port = listener.getsockname()[1]
    listener.close()  # that port is free for TCP now, and taken for UDP
    with datagrams:
        taken = rf"cannot take datagrams \(UDP\) on 127.0.0.1:{port}: .* --listen "
        with pytest.raises(UsageError, match=taken):
            bind_both(f"127.0.0.1:{port}")


def test_every_node_of_a_machine_hears_a_group_until_it_leaves() -> None:
    async def test() -> None:
        first, second = EchoNode([GROUP]), EchoNode([GROUP])
        async with serving(first) as (one, port), serving(second) as (_, other):
            data = pack(ANSWER, b"anybody?")
            await perform(first, port, SendTo(GROUP, data))
            by_group = Datagram(("127.0.0.1", port), data, GROUP)
            await until(lambda: by_group in second.of(Datagram) and by_group in first.of(Datagram))
            assert one.metrics()["datagram_groups"] == 1
            await perform(second, other, LeaveGroup(GROUP))
            await perform(first, port, SendTo(GROUP, data))
            await until(lambda: first.of(Datagram).count(by_group) == 2)
            await perform(second, other)
            assert second.of(Datagram).count(by_group) == 1

    run(test())


def test_a_group_that_cannot_be_joined_is_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        core = EchoNode()
        async with serving(core) as (server, port):
            await perform(core, port, JoinGroup(("127.0.0.1", 5)), JoinGroup(("x", 5)), JoinGroup(("::1", 5)))
            assert server.metrics()["datagram_groups"] == 0
            many = [JoinGroup((f"239.255.74.{number}", 17_421)) for number in range(MAX_GROUPS + 1)]
            await perform(core, port, *many)
            assert server.metrics()["datagram_groups"] == MAX_GROUPS
            await perform(core, port, JoinGroup(many[0].group))  # again: nothing
            assert server.metrics()["datagram_groups"] == MAX_GROUPS

    run(test())
    assert "cannot join 127.0.0.1: it is not a multicast address" in caplog.text
    assert f"{MAX_GROUPS} groups is the limit" in caplog.text


def in_namespace(setup: str, script: str) -> str:
    """What a Python script prints in a network of its own."""

    def shell(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["unshare", "-rn", "sh", "-ec", text, "sh", *arguments]
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, cwd=ROOT)

    prepared = shell(setup)
    if prepared.returncode:
        pytest.skip(f"this system lets nobody make such a network: {prepared.stderr.strip()}")
    done = shell(f'{setup}\nexec "$@"', sys.executable, "-c", textwrap.dedent(script))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_full_socket_drops_and_counts() -> None:
    """On a link of a thousand bytes a second the socket's buffer fills at once."""
    slow = "ip link set lo up; tc qdisc add dev lo root tbf rate 8kbit burst 2000 limit 100000000"
    script = """
        import asyncio
        from postroad.seam.datagrams import SendTo
        from postroad.wire.datagrams import pack
        from tests.worlds.echo import EchoNode
        from tests.worlds.node_server import run, serving

        async def test():
            core = EchoNode()
            core.wanted = [SendTo(("127.0.0.1", 9), pack(2, bytes(1000))) for _ in range(2000)]
            async with serving(core) as (server, port):
                figures = server.metrics()
                print(figures["datagrams_out_total"], figures["datagrams_unsent_total"])

        run(test())
    """
    sent, dropped = map(int, in_namespace(slow, script).split())
    assert sent + dropped == 2000
    assert sent > 10
    assert dropped > 1000


def test_an_ipv6_group_on_the_interface_that_its_address_names() -> None:
    script = """
        import asyncio
        from postroad.seam.datagrams import Datagram, SendTo
        from postroad.wire.datagrams import pack
        from tests.worlds.echo import EchoNode
        from tests.worlds.node_server import run, serving

        GROUP = ("ff12::7420%v0", 17420)

        async def test():
            hearer, sender = EchoNode([GROUP]), EchoNode()
            async with serving(hearer, "[::]:0"):
                sender.wanted = [SendTo(GROUP, pack(1, b"anybody?"))]
                async with serving(sender, "[::]:0") as (_, port):
                    (came,) = await hearer.saw(Datagram)
                    (answer,) = await sender.saw(Datagram)  # also if the source is of that interface alone
                    print((came.source[1], came.group) == (port, GROUP), answer.data[4:].decode())

        run(test())
    """
    setup = (
        "ip link set lo up; ip link add v0 type veth peer name v1; ip link set v0 up; ip link set v1 up;"
        " ip -6 address add fd00::5/64 dev v0 nodad"
    )
    assert in_namespace(setup, script) == "True anybody?\n"
