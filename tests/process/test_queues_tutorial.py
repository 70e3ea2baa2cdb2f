"""docs/tutorial/queues.md does what it says: its tutorial is typed here, with one kill -9."""

from __future__ import annotations

import re

from tests.worlds.pages import Desk, blocks
from tests.worlds.process_clients import linked, run

PAGE = "docs/tutorial/queues.md"


def test_the_tutorial(desk: Desk) -> None:
    started, sent, received = (block for block in blocks(PAGE) if block.language == "sh")
    desk.type(started)
    run(linked(*desk.brokers.all))
    desk.type(sent)
    before = desk.printed
    assert before.startswith("inventory  2 messages, oldest ")
    responsible = re.findall(r" at (\w+) \(", before)[0]
    epoch = int(before.split()[-1])
    next(broker for broker in desk.brokers.all if broker.name == responsible).kill()
    # The tutorial names two brokers to receive at; the third is there too, whoever was killed.
    inbox, queues = received.text.replace("127.0.0.1:7422", "127.0.0.1:7422,127.0.0.1:7424").splitlines()
    assert desk.command(inbox) == "shop  reserve A1\nshop  reserve A2\n"
    after = desk.command(queues)
    assert after.startswith("inventory  0 messages  ")
    assert f" at {responsible} (" not in after
    assert int(after.split()[-1]) > epoch


def test_the_programs(desk: Desk) -> None:
    for block in blocks(PAGE):
        if block.language != "sh":
            desk.type(block)
