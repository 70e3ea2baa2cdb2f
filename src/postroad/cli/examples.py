"""An example of each command, which its --help ends with."""

from __future__ import annotations

from typing import Final

import typer

EXAMPLES: Final[dict[str, str]] = {
    "up": "--name b2 --listen 127.0.0.1:7422 --data b2-data --link 127.0.0.1:7420",
    "pub": "orders/eu '{\"n\": 1}' --attr price=120 --durable",
    "sub": "'orders/#' --where 'price > 100' --durable billing",
    "cache": "--topic 'orders/#'",
    "subs": "billing --json",
    "send": "inventory 'reserve A1' --from shop --kind transactional",
    "inbox": "inventory --count 1",
    "queues": "--json",
    "queues dead": "inventory",
    "queues again": "inventory --count 10",
    "queues delete": "inventory",
    "queues own": "inventory --principal bob",
    "queues rescue": "--yes",
    "queues found": "",
    "trace": "0000002a-00000007-0193c1d2e3f4-0001",
    "status": "--network",
    "clients": "--network",
    "discover": "--bdn localhost:7430 --json",
    "bdn": "--listen 127.0.0.1:7430",
    "context add": "prod --broker b1.example.org:7420 --token-file ~/prod.token",
    "context use": "prod",
    "context list": "",
    "context remove": "prod",
    "certs authority": "",
    "certs broker": "b1 --host b1.example.org",
    "certs client": "alice",
    "top": "--broker localhost:7420",
    "page": "--broker localhost:7420 --open",
    "doctor": "--config broker.toml --broker localhost:7420",
    "backup": "/backups/b1-monday --broker localhost:7420",
    "restore": "/backups/b1-monday --data ./postroad-data",
    "demo": "--brokers 5 --seconds 30",
    "sim": "--seed 7",
    "plan tracking": "--accuracy 0.99999 --rate 5000",
    "plan repair": "--loss 0.01",
    "pipeline land": "--lake lake --once",
    "pipeline trace": "--lake lake --ids ids.txt --out paths",
    "pipeline compact": "--lake lake",
    "pipeline audit": "--lake lake",
    "pipeline plan": "--lake lake",
    "pipeline sweep": "--out worlds --brokers 3,5",
    "pipeline migrate": "--lake lake",
    "bench fanout": "--json",
    "bench durable": "--json",
    "bench queues": "--json",
    "bench latency": "--json",
    "bench topics": "--json",
    "bench memory": "--json",
    "bench besteffort": "--json",
    "bench match": "--json",
    "bench tracking": "--json",
    "bench pipeline": "--json",
    "bench hostile": "--json",
    "lab list": "",
    "lab run": "durable-scaling --json",
}


def add_examples(app: typer.Typer, path: str = "") -> None:
    """Give each command of an application its example."""
    for command in app.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__.replace("_", "-")
        command.epilog = _example(f"{path} {name}".strip())
    for group in app.registered_groups:
        name = f"{path} {group.name}".strip()
        if name in EXAMPLES:
            group.epilog = _example(name)
        if group.typer_instance is not None:
            add_examples(group.typer_instance, name)


def _example(path: str) -> str | None:
    arguments = EXAMPLES.get(path)
    return None if arguments is None else f"Example: postroad {path} {arguments}".rstrip()
