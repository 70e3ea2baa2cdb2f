"""Publish prices and read the dear ones: the async client in one file.

postroad up                      # in another terminal
python examples/prices.py [HOST:PORT]
"""

import asyncio
import sys

import postroad

HIGHEST = 100


async def read(client: postroad.Client, ready: asyncio.Event) -> None:
    async with client.subscribe("prices/#", where="price > 90 AND currency = 'EUR'") as events:
        ready.set()
        async for event in events:
            if isinstance(event, postroad.Gap):
                sys.stdout.write(f"missed something: {event}\n")
                continue
            sys.stdout.write(f"{event.published_at:%H:%M:%S}  {event.topic}  {event.payload.decode()}\n")
            if event.attributes["price"] == HIGHEST:
                return


async def main(address: str) -> None:
    async with postroad.connect(address, name="prices") as client:
        ready = asyncio.Event()
        reading = asyncio.create_task(read(client, ready))
        await ready.wait()
        for price in range(0, HIGHEST + 1, 5):
            await client.publish(
                "prices/eu/tea", f"tea at {price}", attributes={"price": price, "currency": "EUR"}
            )
        await client.flush()  # everything above is accepted by the broker
        await reading


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "localhost:7420"))
