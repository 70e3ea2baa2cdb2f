"""docs/queues.md does what it says: its tutorial is typed here, with one kill -9."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.worlds.process_clients import cli, linked, run
from tests.worlds.processes import Brokers

TEXT = (Path(__file__).parents[2] / "docs" / "queues.md").read_text()


def test_the_tutorial(brokers: Brokers) -> None:
    tutorial = TEXT.split("## Tutorial")[1].split("## From Python")[0]
    started, sent, received = re.findall(r"^```\n(.*?)^```$", tutorial, re.MULTILINE | re.DOTALL)
    addresses: dict[str, str] = {}
    for line in started.splitlines():
        words = shlex.split(line.removesuffix("&"))
        flags = dict(zip(words[2::2], words[3::2], strict=True))
        links = [addresses[flags["--link"]]] if "--link" in flags else []
        addresses[flags["--listen"]] = brokers.start(flags["--name"], *links).address
    run(linked(*brokers.all))

    def type_all(text: str) -> list[str]:
        printed = []
        for line in text.splitlines():
            words = shlex.split(line)[1:]
            at = words.index("--broker") if "--broker" in words else len(words)
            named = words[at + 1].split(",") if at < len(words) else ["127.0.0.1:7420"]
            done = cli(",".join(addresses[one] for one in named), *words[:at], *words[at + 2 :])
            assert done.returncode == 0, done.stderr
            printed.append(done.stdout)
        return printed

    *ids, before = type_all(sent)
    assert len({*ids}) == 2
    assert before.startswith("inventory  2 messages, oldest ")
    responsible = re.findall(r" at (\w+) \(", before)[0]
    epoch = int(before.split()[-1])
    next(broker for broker in brokers.all if broker.name == responsible).kill()
    # The tutorial names two brokers to receive at; the third is there too, whoever was killed.
    received = received.replace("127.0.0.1:7422", "127.0.0.1:7422,127.0.0.1:7424")
    messages, after = type_all(received)
    assert messages == "shop  reserve A1\nshop  reserve A2\n"
    assert after.startswith("inventory  0 messages  ")
    assert f" at {responsible} (" not in after
    assert int(after.split()[-1]) > epoch
