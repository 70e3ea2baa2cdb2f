"""How fast one publisher and one reader go through a broker, in whole batches.

postroad up                      # in another terminal
python examples/throughput.py [HOST:PORT [EVENTS]]
"""

import asyncio
import sys
import time

import uvloop

import postroad

EVENTS = int(sys.argv[2]) if len(sys.argv) > 2 else 500_000


async def read(reader: postroad.Client, ready: asyncio.Event) -> None:
    seen = 0
    async with reader.subscribe("load/#") as events:
        ready.set()
        async for batches in events.batches():
            # A batch gives its rows as arrays and bytes; nothing is decoded that is not asked for.
            seen += sum(batch.count for batch in batches if isinstance(batch, postroad.EventBatch))
            if seen >= EVENTS:
                return


async def main(address: str) -> None:
    async with postroad.connect(address) as reader, postroad.connect(address) as writer:
        ready = asyncio.Event()
        reading = asyncio.create_task(read(reader, ready))
        await ready.wait()
        started = time.perf_counter()
        await writer.publish_many(("load/a", b"x" * 250) for _ in range(EVENTS))
        await writer.flush()
        await reading
        sys.stdout.write(f"{EVENTS / (time.perf_counter() - started):,.0f} events a second\n")


uvloop.run(main(sys.argv[1] if len(sys.argv) > 1 else "localhost:7420"))
