"""What a hostile peer does to a broker, one attack at a time, in a process of its own (`bench hostile`).

Each attack goes on until its time is over. It speaks raw frames: nothing of our client holds it back.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import sys
import time
from collections.abc import Callable
from typing import Final, TypeVar

from postroad.errors import BugError
from postroad.events.batch import BatchBuilder
from postroad.ids import SESSION_BYTES, IdSource
from postroad.wire import discovery
from postroad.wire.frames import (
    DEFAULT_LIMITS,
    Ack,
    Ended,
    Hello,
    Kind,
    Message,
    Posting,
    Receive,
    Reply,
    Request,
    Send,
    Splitter,
    Subscribe,
    Subscribed,
    Welcome,
    decode,
    encode,
    frame_kind,
)

M = TypeVar("M", bound=Message)
TOPIC: Final = "attack/a"
HONEST: Final = "honest"  # the durable name of the honest one
WINDOW: Final = 64 << 20
PAYLOAD: Final = bytes(100_000)
CHUNK: Final = 1 << 16
SESSION: Final = bytes(SESSION_BYTES)


class Attacker:
    """One connection of the hostile client."""

    def __init__(self, address: str, token: str) -> None:
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=2)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, CHUNK)
        self._splitter = Splitter(DEFAULT_LIMITS.batch_bytes)
        self._sequence = 0
        self.say(
            Hello(
                version=1,
                role="client",
                name="attacker",
                token=token,
                limits=DEFAULT_LIMITS,
                window=WINDOW,
                time_us=0,
            )
        )
        welcome = self.wait_for(Welcome)
        self._ids = IdSource(welcome.publisher, welcome.broker)

    def say(self, *messages: Message) -> None:
        self.socket.sendall(b"".join(map(encode, messages)))

    def take(self, *asked: Subscribe) -> None:
        """Subscribe. Where the broker refuses, the attack shows nothing, and fails."""
        self.say(*asked)
        for _ in asked:
            answer = self.wait_for(Subscribed, Ended)
            if isinstance(answer, Ended):
                raise BugError(f"no attack: subscription {answer.number} is refused, {answer.reason}")

    def wait_for(self, *kinds: type[M]) -> M:
        while True:
            data = self.socket.recv(CHUNK)
            if not data:
                raise ConnectionError("closed")
            for frame in self._splitter.feed(data):
                if frame_kind(frame) != Kind.DELIVERY and isinstance(message := decode(frame), kinds):
                    return message

    def publish(self, payload: bytes, **attributes: str | int) -> None:
        builder = BatchBuilder()
        now_ms = time.time_ns() // 1_000_000
        builder.add(self._ids.next(now_ms), TOPIC, attributes, payload, DEFAULT_LIMITS)
        self._sequence += 1
        self.socket.sendall(builder.finish(channel=self._sequence))


class Place:
    """The broker that is attacked, and until when."""

    def __init__(self, address: str, http: str, token: str, seconds: float) -> None:
        self.address, self.http, self.token = address, http, token
        self._end = time.monotonic() + seconds
        self._connected: list[socket.socket] = []

    @property
    def going_on(self) -> bool:
        return time.monotonic() < self._end

    def client(self) -> Attacker:
        made = Attacker(self.address, self.token)
        self._connected.append(made.socket)
        return made

    def socket(self, address: str) -> socket.socket:
        host, port = address.rsplit(":", 1)
        made = socket.create_connection((host, int(port)), timeout=2)
        self._connected.append(made)
        return made

    def rest(self) -> None:
        while self.going_on:
            time.sleep(0.02)


def silent(place: Place) -> None:
    for _ in range(300):
        place.socket(place.address)
    place.rest()


def slow_http(place: Place) -> None:
    for _ in range(200):
        place.socket(place.http).sendall(b"GET /metrics HTTP/1.1\r\nA: ")
    place.rest()


def scraping(place: Place) -> None:
    while place.going_on:
        with place.socket(place.http) as connected:
            connected.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            while connected.recv(CHUNK):
                pass


def garbage(place: Place) -> None:
    chance = random.Random(1)
    while place.going_on:
        with place.socket(place.address) as connected:
            connected.sendall(chance.randbytes(4096))


def greetings(place: Place) -> None:
    while place.going_on:
        place.client().socket.close()


def datagrams(place: Place) -> None:
    host, port = place.address.rsplit(":", 1)
    chance, sent = random.Random(1), [bytes([kind]) for kind in range(256)]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as caller:
        while place.going_on:
            caller.sendto(chance.choice(sent) + chance.randbytes(900), (host, int(port)))


def discovering(place: Place) -> None:
    host, port = place.address.rsplit(":", 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as caller:
        number = 0
        while place.going_on:
            number += 1
            request = discovery.Request(
                uuid=number.to_bytes(16, "big"),
                attempt=1,
                sent_us=time.time_ns() // 1_000,
                padding=bytes(400),
            )
            caller.sendto(discovery.encode(request), (host, int(port)))


def requests(what: str, **arguments: str) -> Callable[[Place], None]:
    def flood(place: Place) -> None:
        frame = encode(Request(number=1, what=what, arguments=arguments)) * 1_000
        client = place.client()
        while place.going_on:
            client.socket.sendall(frame)

    return flood


def likes(place: Place) -> None:
    """Conditions of 4 KB, made of the longest patterns that are taken."""
    client = place.client()
    for number in range(4):
        where = " OR ".join(f"a LIKE '%{'_' * 245}{number}{term:x}%'" for term in range(15))
        client.take(Subscribe(number=number, topic=TOPIC, where=where))
    while place.going_on:
        client.publish(b"", a="x" * 60_000)
        time.sleep(0.01)


def arithmetic(place: Place) -> None:
    client = place.client()
    for number in range(200):
        where = f"a * {number + 2} + a / {number + 3} > a - 1"
        client.take(Subscribe(number=number, topic="#", where=where))
    while place.going_on:
        client.publish(b"", a=7)
        time.sleep(0.005)


def conditions(place: Place) -> None:
    client, number = place.client(), 0
    while place.going_on and number < 5_000:
        number += 1
        terms = " OR ".join(f"(k{number}_{term} > {term} AND b{term} = 'x{number}')" for term in range(10))
        asked = Subscribe(number=number, topic=f"attack/{number}", where=terms)
        client.take(asked) if number == 1 else client.say(asked)
    place.rest()


def names(place: Place) -> None:
    client, number = place.client(), 0
    while place.going_on and number < 20_000:
        number += 1
        asked = Subscribe(number=number, topic=TOPIC, where="", durable=f"attack-{number}", ack="manual")
        client.take(asked) if number == 1 else client.say(asked)
    place.rest()


def thefts(place: Place) -> None:
    """Of the honest one's durable name, from where the streams end."""
    client = place.client()
    client.say(Request(number=1, what="heads"))
    heads = json.dumps(json.loads(client.wait_for(Reply).body)["heads"])
    while place.going_on:
        for token in ("", heads):
            client.say(Subscribe(number=1, topic=TOPIC, where="", durable=HONEST, ack="manual", token=token))
            if isinstance(client.wait_for(Subscribed, Ended), Subscribed):
                raise BugError("another principal's durable name was taken")


def long_fields(place: Place) -> None:
    while place.going_on:
        key = "k" * 1_000_000
        asked = Subscribe(number=1, topic=TOPIC, where="", durable="attack", ack="auto", shared=True, key=key)
        client = place.client()
        client.say(asked)
        with contextlib.suppress(ConnectionError):
            client.wait_for(Subscribed)
            raise BugError("a key of a million characters was taken")


def readers(place: Place) -> None:
    client = place.client()
    client.say(Request(number=1, what="heads"))
    heads = json.loads(client.wait_for(Reply).body)["heads"]
    until = json.dumps({name: tick + 1_800_000_000 for name, tick in heads.items()})
    for number in range(1_024):
        asked = Subscribe(number=number, topic=TOPIC, where="", token=json.dumps(heads), until=until)
        client.take(asked) if number == 0 else client.say(asked)
    place.rest()


def small_frames(place: Place) -> None:
    client = place.client()
    client.take(Subscribe(number=1, topic=TOPIC, where="", durable="attack", ack="manual"))
    frames = encode(Ack(number=1, token="{}", ticket=1)) * 1_000
    while place.going_on:
        client.socket.sendall(frames)


def fanned_out(place: Place) -> None:
    client = place.client()
    client.take(Subscribe(number=0, topic=TOPIC, where=""))
    for number in range(1, 10_000):
        client.say(Subscribe(number=number, topic=TOPIC, where=""))
    while place.going_on:
        client.publish(b"")
        time.sleep(0.05)


def stalled(place: Place) -> None:
    for number in range(12):
        place.client().take(Subscribe(number=number, topic="attack/#", where=""))
    publisher = place.client()
    while place.going_on:
        publisher.publish(PAYLOAD)
        time.sleep(0.002)


def halves(place: Place) -> None:
    size = DEFAULT_LIMITS.batch_bytes
    beginning = size.to_bytes(4, "little") + bytes([Kind.PUBLISH]) + bytes(size - 6)
    for _ in range(60):
        with contextlib.suppress(OSError):
            place.client().socket.sendall(beginning)
    place.rest()


def small_halves(place: Place) -> None:
    """Each too small to be noticed alone."""
    beginning = (900_000).to_bytes(4, "little") + bytes([Kind.PUBLISH]) + bytes(200_000)
    for _ in range(1_500):
        if not place.going_on:
            break
        with contextlib.suppress(OSError):
            place.client().socket.sendall(beginning)
    place.rest()


def queued(place: Place) -> None:
    client, number = place.client(), 0
    while place.going_on:
        number += 1
        posting = Posting(inbox=f"attack-{number % 5_000}", id=number, payload=bytes(1_000), after=0)
        client.say(
            Send(number=number, source="attacker", session=SESSION, form="recoverable", messages=(posting,))
        )


def receiving(place: Place) -> None:
    for first in range(0, 10_000, 1_000):
        client = place.client()
        for number in range(first, first + 1_000):
            client.say(Receive(number=number, inbox=f"attack-{number}", consumer=SESSION, window=16))
    place.rest()


ATTACKS: Final[dict[str, Callable[[Place], None]]] = {
    "a stranger says nothing, 300 times": silent,
    "a stranger sends garbage": garbage,
    "a stranger sends datagrams": datagrams,
    "a stranger asks for brokers": discovering,
    "slow sockets at the HTTP port": slow_http,
    "metrics, over and over": scraping,
    "connections that come and go": greetings,
    "requests: subs": requests("subs"),
    "requests: status": requests("status"),
    "requests: heads": requests("heads"),
    "requests: queues": requests("queues"),
    "requests: trace": requests("trace", id="0000002a-00000007-0193c1d2e3f4-0001"),
    "conditions with LIKE and a long attribute": likes,
    "conditions with arithmetic": arithmetic,
    "5,000 conditions, each of its own": conditions,
    "20,000 durable names": names,
    "the honest one's durable name, again and again": thefts,
    "a key of a million characters": long_fields,
    "1,024 readers that wait for the future": readers,
    "acknowledgements, as many as fit": small_frames,
    "10,000 subscriptions to the same, and events": fanned_out,
    "12 consumers that do not read": stalled,
    "60 frames that never come whole": halves,
    "1,500 small frames that never come whole": small_halves,
    "messages to 5,000 inboxes": queued,
    "consumers at 10,000 inboxes": receiving,
}


def main() -> None:
    """NAME ADDRESS HTTP TOKEN SECONDS. Where the broker ends a connection, the attack begins anew. At the end
    it says how often it began."""
    name, address, http, token, seconds = sys.argv[1:]
    place = Place(address, http, token, float(seconds))
    begun = 0
    while place.going_on:
        begun += 1
        try:
            ATTACKS[name](place)
        except OSError:
            time.sleep(0.05)
    sys.stdout.write(f"{begun}\n")


if __name__ == "__main__":
    main()
