"""What a verdict leaves behind at the responsible broker and at the consumer's entry (responsibility 7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.worlds.queue_networks import QueueNetwork, address_of
from tests.worlds.turns import Turns

from postroad.broker.core import Broker
from postroad.queues.inbox import Answer, Message
from postroad.queues.queues import Queues
from postroad.queues.talk import (
    Deliver,
    Done,
    JoinTask,
    LeaveTask,
    PutTask,
    Said,
    SettleTask,
    Work,
    encode,
)
from postroad.queues.transactions import Transactions
from postroad.seam.turn import Turn
from postroad.sim.judge.queues import QueueLedger
from postroad.sim.people.queue_users import QueueSource, _User
from postroad.units import SECOND_US
from postroad.wire import frames

INBOX = "stock"


class Sender(_User):
    """Sends what and when a test says, and waits to hear what becomes of it."""

    def __init__(self, network: QueueNetwork, broker: str) -> None:
        super().__init__(network.world, network.network, "sender", [address_of(broker)])
        self.states: list[str] = []

    def welcomed(self) -> None:
        """It begins when the test says so."""

    def heard(self, message: frames.Message) -> None:
        if isinstance(message, frames.Sent):
            self.states.append(message.state or message.code)

    def send(self, number: int, form: str = "recoverable", expires_us: int = 0) -> None:
        posting = frames.Posting(inbox=INBOX, id=number, after=0, payload=b"x", expires_us=expires_us)
        self.say(
            frames.Send(
                number=number, source="shop", session=b"s" * 8, form=form, messages=(posting,), confirm=True
            )
        )


class Hand(_User):
    """A consumer that settles what and when a test says."""

    def __init__(self, network: QueueNetwork, name: str, broker: str, window: int = 8) -> None:
        super().__init__(network.world, network.network, name, [address_of(broker)])
        self._window = window
        self.came: list[frames.QueueMessage] = []
        self.outcomes: list[tuple[str, ...]] = []

    def welcomed(self) -> None:
        consumer = self.name.encode().ljust(8)[:8]
        self.say(frames.Receive(number=1, inbox=INBOX, consumer=consumer, window=self._window))

    def heard(self, message: frames.Message) -> None:
        if isinstance(message, frames.Messages):
            self.came += message.messages
        elif isinstance(message, frames.Settled):
            self.outcomes.append(message.outcomes)

    def settle(self, message: frames.QueueMessage, verdict: str) -> None:
        ticket = len(self.outcomes) + 1
        self.say(frames.Settle(number=1, ticket=ticket, keys=(message.key,), verdict=verdict))


def network_of_two(replicas: int = 2) -> tuple[QueueNetwork, str, str]:
    """With the names of the responsible broker and of the other one."""
    network = QueueNetwork({"a": (), "b": ("a",)}, arcs=1, replicas=replicas)
    network.start("a", "b")
    network.run(5 * SECOND_US)
    (first,) = [name for name in ("a", "b") if queues_of(network.broker(name)).arcs.serves(0)]
    return network, first, "b" if first == "a" else "a"


def queues_of(broker: Broker) -> Queues:
    return broker._rooms.queues


def send(network: QueueNetwork, count: int) -> None:
    source = QueueSource(
        network.world,
        network.network,
        "shop",
        [address_of("a")],
        inboxes=[INBOX],
        pause_us=3_600 * SECOND_US,
        ledger=QueueLedger(),
    )
    network.run(SECOND_US)
    for _ in range(count):
        source.send()
    network.run(SECOND_US)


def test_an_answer_that_a_later_delivery_overtook_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two brokers may have two connections. With `again` the client forgets what is behind that message: it
    may not forget what was brought after that."""
    network, _, entry = network_of_two()
    send(network, 2)
    hand = Hand(network, "hand", entry)
    network.run(SECOND_US)
    assert [message.attempt for message in hand.came] == [1, 1]
    hear: Callable[..., None] = Queues._hear
    late: list[tuple[bytes, Done]] = []
    delivered: list[Deliver] = []

    def reorder(self: Queues, turn: Turn, sender: bytes, said: Said) -> None:
        if self is not queues_of(network.broker(entry)):
            hear(self, turn, sender, said)
        elif isinstance(said, Done) and said.answers == (Answer("again"),) and not late:
            late.append((sender, said))
        else:
            hear(self, turn, sender, said)
            if isinstance(said, Deliver) and late and not delivered:
                delivered.append(said)
                hear(self, turn, *late[0])

    monkeypatch.setattr(Queues, "_hear", reorder)
    hand.settle(hand.came[0], "again")
    network.run(SECOND_US)
    assert delivered
    assert hand.outcomes == [("again",)]
    brought = [(message.id, message.attempt) for message in hand.came[2:]]
    first, second = (message.id for message in hand.came[:2])
    assert brought == [(first, 2), (second, 1)] * 2, "behind the answer that counts, all of it comes again"


def test_an_express_message_goes_to_another_consumer_though_one_before_it_was_rejected() -> None:
    network, _, entry = network_of_two()
    first = Hand(network, "first", entry, window=2)
    network.run(SECOND_US)
    for number, form in ((1, "recoverable"), (2, "express")):
        posting = frames.Posting(inbox=INBOX, id=number, after=0, payload=b"x")
        first.say(frames.Send(number=number, source="shop", session=b"s" * 8, form=form, messages=(posting,)))
    network.run(SECOND_US)
    (rejected,) = [message for message in first.came if message.form == "recoverable"]
    assert len(first.came) == 2
    first.settle(rejected, "again")
    network.run(SECOND_US)
    second = Hand(network, "second", entry)
    network.run(SECOND_US)
    first.say(frames.Unreceive(number=1))
    network.run(SECOND_US)
    assert sorted(message.form for message in second.came) == ["express", "recoverable"]


def test_who_waits_to_hear_of_a_delivery_hears_that_there_will_be_none() -> None:
    """Q6: the message has expired, or its consumer does not want it."""
    network, _, entry = network_of_two()
    sender = Sender(network, entry)
    network.run(SECOND_US)
    sender.send(1, expires_us=SECOND_US)
    network.run(4 * SECOND_US)
    assert sender.states == ["kept", "dead"]
    hand = Hand(network, "hand", entry)
    sender.send(2)
    sender.send(3)
    network.run(SECOND_US)
    for message, verdict in zip(hand.came, ("dead", "accept"), strict=True):
        hand.settle(message, verdict)
        network.run(SECOND_US)
    assert sorted(sender.states[2:]) == ["dead", "delivered", "kept", "kept"]
    assert queues_of(network.broker(entry))._confirming == {}


def test_who_waits_to_hear_of_a_delivery_hears_of_it_from_the_next_responsible_broker() -> None:
    """It is asked with the names of the messages, and keeps no body until then."""
    network = QueueNetwork({"a": (), "b": ("a",), "c": ("a", "b")}, arcs=1)
    network.start("a", "b", "c")
    network.run(5 * SECOND_US)
    (first,) = [name for name in "abc" if queues_of(network.broker(name)).arcs.serves(0)]
    entry = next(name for name in "abc" if name != first)
    sender = Sender(network, entry)
    network.run(SECOND_US)
    for number in range(1, 4):
        sender.send(number)
    network.run(SECOND_US)
    hand = Hand(network, "hand", entry)
    network.crash(first)
    network.run(5 * SECOND_US)
    assert len(hand.came) == 3
    for message in hand.came:
        hand.settle(message, "accept")
        network.run(SECOND_US)
    assert sorted(sender.states) == ["delivered"] * 3 + ["kept"] * 3


def test_who_waits_to_hear_of_an_express_message_hears_that_it_is_lost_with_its_broker() -> None:
    network = QueueNetwork({"a": (), "b": ("a",), "c": ("a", "b")}, arcs=1)
    network.start("a", "b", "c")
    network.run(5 * SECOND_US)
    (first,) = [name for name in "abc" if queues_of(network.broker(name)).arcs.serves(0)]
    sender = Sender(network, next(name for name in "abc" if name != first))
    network.run(SECOND_US)
    sender.send(1, form="express")
    network.run(SECOND_US)
    network.crash(first)
    network.run(5 * SECOND_US)
    assert sender.states == ["kept", "dead"]


def test_what_a_consumer_gives_back_untouched_was_not_tried() -> None:
    """It left in good order; of what a lost one had, the first of each sender may have been what ended it."""
    network, _, entry = network_of_two()
    send(network, 3)
    for name in ("one", "two", "three"):
        hand = Hand(network, name, entry)
        network.run(SECOND_US)
        assert [message.attempt for message in hand.came] == [1, 1, 1]
        hand.say(frames.Unreceive(number=1))
        network.run(SECOND_US)
    lost = Hand(network, "lost", entry)
    network.run(SECOND_US)
    lost.stopped, lost._addresses = True, ["nowhere:1"]
    lost.leave()
    network.run(10 * SECOND_US)
    hand = Hand(network, "last", entry)
    network.run(SECOND_US)
    assert [message.attempt for message in hand.came] == [2, 1, 1]


def test_an_express_message_that_is_rejected_comes_later_and_not_for_ever() -> None:
    network, _, entry = network_of_two()
    sender = Sender(network, entry)
    hand = Hand(network, "hand", entry)
    network.run(SECOND_US)
    sender.send(1, form="express")
    network.run(SECOND_US)
    hand.say(
        frames.Settle(number=1, ticket=1, keys=(hand.came[0].key,), verdict="again", delay_us=5 * SECOND_US)
    )
    network.run(4 * SECOND_US)
    assert len(hand.came) == 1
    for attempt in range(2, network.config.attempts + 1):
        network.run(2 * SECOND_US)
        assert [message.attempt for message in hand.came] == list(range(1, attempt + 1))
        hand.settle(hand.came[-1], "again")
    network.run(2 * SECOND_US)
    assert hand.outcomes[-1] == ("dead",)
    assert sender.states == ["kept", "dead"]


def test_express_messages_of_all_inboxes_have_one_bound_and_give_their_room_back() -> None:
    network = QueueNetwork({"a": ()}, arcs=2, memory_bytes=20_000)
    network.start("a")
    sender = Sender(network, "a")
    network.run(SECOND_US)
    for number in range(1, 60):
        posting = frames.Posting(
            inbox=f"inbox{number}", id=number, after=0, payload=bytes(1_000), expires_us=30 * SECOND_US
        )
        sender.say(
            frames.Send(number=number, source="s", session=b"s" * 8, form="express", messages=(posting,))
        )
    network.run(SECOND_US)
    kept = sender.states.count("kept")
    assert (kept, sender.states.count("full")) == (20_000 // 1_256, 59 - 20_000 // 1_256)
    assert len(list(queues_of(network.broker("a")).serving.rows())) == kept
    network.run(60 * SECOND_US)
    assert queues_of(network.broker("a")).serving.express_bytes == 0
    assert list(queues_of(network.broker("a")).serving.rows()) == []


def begin_transaction(network: QueueNetwork) -> dict[int, str]:
    """Of two messages for two arcs of one broker, where they are staged from then on: inboxes by arc."""
    network.start("a")
    sender = Sender(network, "a")
    network.run(SECOND_US)
    arcs = queues_of(network.broker("a")).arcs
    names = {arcs.index(f"inbox{number}"): f"inbox{number}" for number in range(100)}
    two = {arc: names[arc] for arc in sorted(names)[:2]}
    views = [view for arc in two if (view := arcs.view(arc)) is not None]
    postings = tuple(
        frames.Posting(inbox=name, id=number, after=0, payload=b"x", chain=encode(view.chain))
        for number, (name, view) in enumerate(zip(two.values(), views, strict=True), 1)
    )
    sender.say(
        frames.Send(
            number=1, source="s", session=b"s" * 8, form="transactional", messages=postings, together=True
        )
    )
    network.run(SECOND_US)
    assert [len(arcs.machine(arc).staged) for arc in two] == [1, 1]
    return two


@pytest.mark.parametrize("step", ["_staged", "_decided"])
def test_a_transaction_whose_entry_dies_blocks_nobody_for_long(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its arcs ask its home, also where nothing else makes them look at the time."""
    monkeypatch.setattr(Transactions, step, lambda *_arguments: None)
    network = QueueNetwork({"a": ()}, arcs=4)
    names = begin_transaction(network)
    arcs = queues_of(network.broker("a")).arcs
    network.run(30 * SECOND_US)
    assert [len(arcs.machine(arc).staged) for arc in names] == [0, 0]
    depths = {arcs.machine(arc).depth(name) for arc, name in names.items()}
    assert depths == ({1} if step == "_decided" else {0}), "as its home decided"


def test_a_transaction_is_given_up_later_where_too_much_waits_for_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is no room for a question to its home then."""
    monkeypatch.setattr(Transactions, "_staged", lambda *_arguments: None)
    network = QueueNetwork({"a": ()}, arcs=4)
    names = begin_transaction(network)
    queues = queues_of(network.broker("a"))
    with monkeypatch.context() as full:
        full.setattr(queues.errands, "_max_bytes", 0)
        network.run(30 * SECOND_US)
    assert [len(queues.arcs.machine(arc).staged) for arc in names] == [1, 1]
    network.run(30 * SECOND_US)
    assert [len(queues.arcs.machine(arc).staged) for arc in names] == [0, 0]


def test_what_comes_with_the_write_that_deletes_its_inbox_is_handed_out_when_it_is_kept() -> None:
    network, first, _ = network_of_two()
    sender = Sender(network, first)
    network.run(SECOND_US)
    for number in (1, 2, 3):
        sender.send(number)
    network.run(SECOND_US)
    serving = queues_of(network.broker(first)).serving
    ((arc, served),) = serving._served.items()
    assert served.visible[INBOX] == 4
    view = queues_of(network.broker(first)).arcs.view(arc)
    assert view is not None
    put = PutTask(
        (Message(INBOX, view.chain, "00" * 8 + "till", 1, False, b"x"),), "recoverable", False, False
    )
    manage = serving._manage

    def together(turn: Turn, *arguments: Any) -> None:
        manage(turn, *arguments)
        serving.work(turn, view.responsible, Work(1, arc, put))

    serving._manage = together  # type: ignore[method-assign]
    sender.say(frames.Request(number=1, what="queues.delete", arguments={"inbox": INBOX}))
    network.run(SECOND_US)
    assert queues_of(network.broker(first)).arcs.machine(arc).depth(INBOX) == 1
    assert served.visible[INBOX] == 2


def test_a_consumer_is_gone_though_its_entry_had_no_room_to_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what it had would wait for it for ever."""
    network, _, entry = network_of_two()
    send(network, 2)
    hand = Hand(network, "hand", entry)
    network.run(SECOND_US)
    assert len(hand.came) == 2
    with monkeypatch.context() as full:
        full.setattr(queues_of(network.broker(entry)).errands, "_max_bytes", 0)
        hand.say(frames.Unreceive(number=1))
        network.run(3 * SECOND_US)
    network.run(2 * SECOND_US)
    other = Hand(network, "other", entry)
    network.run(SECOND_US)
    assert [message.id for message in other.came] == [message.id for message in hand.came]


def test_a_consumer_that_came_by_another_way_is_not_lost_with_the_first_one() -> None:
    network, first, entry = network_of_two()
    hand = Hand(network, "hand", first)
    network.run(SECOND_US)
    served = next(iter(queues_of(network.broker(first)).serving._served.values()))
    (seat,) = served.seats[INBOX].values()
    queues = queues_of(network.broker(entry))
    queues.errands.ask(
        Turns().turn(network.world.now_us),
        0,
        LeaveTask(INBOX, next(iter(served.seats[INBOX])), True),
        lambda *_arguments: None,
    )
    network.run(2 * SECOND_US)
    assert not queues.errands.metrics()["queue_errands"]
    assert hand.outcomes == []
    assert (served.seats[INBOX], seat.until_us) == ({hand.name.encode().ljust(8).hex()[:16]: seat}, None)


def test_an_inbox_that_is_deleted_begins_anew_and_its_senders_hear_of_it() -> None:
    network, first, entry = network_of_two()
    sender = Sender(network, entry)
    network.run(SECOND_US)
    for number in (1, 2, 3):
        sender.send(number)
    network.run(SECOND_US)
    served = next(iter(queues_of(network.broker(first)).serving._served.values()))
    assert served.visible[INBOX] == 4
    sender.say(frames.Request(number=1, what="queues.delete", arguments={"inbox": INBOX}))
    network.run(SECOND_US)
    assert sorted(sender.states) == ["dead"] * 3 + ["kept"] * 3
    assert INBOX not in served.visible, "what comes next is handed out when it is kept, and not before"
    sender.send(4)
    network.run(SECOND_US)
    assert served.visible[INBOX] == 2
    hand = Hand(network, "hand", entry)
    network.run(SECOND_US)
    assert [message.id for message in hand.came] == [4]
    hand.settle(hand.came[0], "accept")
    network.run(SECOND_US)
    assert sender.states[-1] == "delivered"


def test_the_log_says_once_who_answers_for_an_arc_and_that_replicas_are_missing() -> None:
    network = QueueNetwork({"a": ()}, arcs=1)
    notes: list[str] = []
    note = network.world.note

    def listen(who: str, what: str, **more: Any) -> None:
        notes.append(what)
        note(who, what, **more)

    network.world.note = listen  # type: ignore[method-assign]
    network.start("a")
    network.run(30 * SECOND_US)
    view = queues_of(network.broker("a")).arcs.view(0)
    assert view is not None
    told = [what for what in notes if "answers for arcs" in what]
    assert told == [
        f"notes info: this broker answers for arcs of queues now: 0 (epoch {view.epoch});"
        " 1 with fewer than 2 replicas"
    ]


def test_nobody_waits_to_hear_of_what_its_own_broker_did_not_keep() -> None:
    """Where the entry is the responsible broker, an answer is there before the question is out."""
    network = QueueNetwork({"a": ()}, arcs=1, memory_bytes=1_000)
    network.start("a")
    sender = Sender(network, "a")
    network.run(SECOND_US)
    for number in range(1, 6):
        sender.send(number, form="express")
    network.run(SECOND_US)
    assert sorted(sender.states) == ["full", "full", "kept", "kept", "kept"]
    queues = queues_of(network.broker("a"))
    (client,) = queues._clients.values()
    assert (client.confirming, client.sends, len(queues._confirming)) == (3, 0, 3)
    assert all(confirming.messages for confirming in queues._confirming.values())


def test_a_verdict_of_a_consumer_that_was_given_up_and_comes_back_is_not_taken_for_anothers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The two brokers do not hear each other for a while. What has no answer is said again, so the verdict
    may come both before the consumer has joined again, and after it."""
    network, first, entry = network_of_two(replicas=1)
    hand = Hand(network, "hand", entry)
    send(network, 2)
    assert len(hand.came) == 2
    network.network.block("a", "b", network.world.now_us + 5 * SECOND_US)
    network.network.cut("a", "b", (0, 0))
    hand.settle(hand.came[0], "accept")
    network.run(4 * SECOND_US)
    assert not queues_of(network.broker(first)).arcs.machine(0).inboxes[INBOX].consumers, "it is given up"
    hear: Callable[..., None] = Queues._hear
    joins: list[Work] = []

    def reorder(self: Queues, turn: Turn, sender: bytes, said: Said) -> None:
        if isinstance(said, Work) and isinstance(said.task, JoinTask) and not joins:
            joins.append(said)
            return
        hear(self, turn, sender, said)
        if isinstance(said, Work) and isinstance(said.task, SettleTask) and len(joins) == 1:
            hear(self, turn, sender, joins[0])
            hear(self, turn, sender, said)
            joins.append(joins[0])

    monkeypatch.setattr(Queues, "_hear", reorder)
    network.run(8 * SECOND_US)
    assert len(joins) == 2
    assert hand.outcomes == [("accepted",)]
    hand.settle(hand.came[1], "accept")
    network.run(SECOND_US)
    assert hand.outcomes == [("accepted",)] * 2
