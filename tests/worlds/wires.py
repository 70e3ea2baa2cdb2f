"""A switch between network namespaces that delays and loses packets: not every kernel has netem.

`wires.py whole INTERFACE` has the interface make whole checksums and no packets longer than its MTU.
`wires.py switch [[[DELAY_MS, ...], ...], LOSS]` carries packets between the interfaces w1, w2, ... of its
namespace: from one to another after that delay, but for the share that it loses.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import json
import random
import select
import socket
import struct
import sys
import time

SIOCETHTOOL = 0x8946
OFFLOADS = (0x17, 0x1F, 0x24)  # ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGSO
ETH_P_ALL = 3
OUTGOING = 4
MAX_PACKET = 65_535


def make_whole(interface: str) -> None:
    import array

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for command in OFFLOADS:
            value = array.array("B", struct.pack("=II", command, 0))
            address, _ = value.buffer_info()
            fcntl.ioctl(sock, SIOCETHTOOL, struct.pack("16sP16x", interface.encode(), address))


def switch(delays: list[list[float]], loss: float) -> None:
    ports: list[socket.socket] = []
    for number in range(1, len(delays) + 1):
        port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        port.bind((f"w{number}", 0))
        port.setblocking(False)
        ports.append(port)
    flight: list[tuple[float, int, int, bytes]] = []
    order = itertools.count()
    chance = random.Random(7420)
    print("ready", flush=True)  # noqa: T201 -- whoever started it waits for it
    while True:
        wait = max(0.0, flight[0][0] - time.monotonic()) if flight else None
        readable, _, _ = select.select(ports, [], [], wait)
        now = time.monotonic()
        for port in readable:
            data, source = port.recvfrom(MAX_PACKET)
            if source[2] == OUTGOING:
                continue
            here = ports.index(port)
            # The sites' addresses end with their numbers; all others are for everybody.
            to = [data[5] - 1] if data[:5] == b"\x02\0\0\0\0" else range(len(ports))
            for there in to:
                if there != here and there < len(ports) and chance.random() >= loss:
                    due = now + delays[here][there] / 1000
                    heapq.heappush(flight, (due, next(order), there, data))
        while flight and flight[0][0] <= now:
            _, _, there, data = heapq.heappop(flight)
            ports[there].send(data)


if __name__ == "__main__":
    if sys.argv[1] == "whole":
        make_whole(sys.argv[2])
    else:
        switch(*json.loads(sys.argv[2]))
