"""A shop that reserves goods: two applications that send to each other, one of them slow to start.

postroad up                      # in another terminal
python examples/orders.py [HOST:PORT]
"""

import asyncio
import sys

import postroad

GOODS = ("tea", "rice", "salt")


async def shop(client: postroad.Client) -> None:
    """Nobody receives yet, and no queue was declared: the messages are kept nevertheless."""
    application = client.application("shop")
    for name in GOODS:
        await application.send("inventory", f"reserve {name}", attributes={"amount": 2})
    async with application.transaction() as together:  # both of these, or none
        together.send("billing", "charge 6")
        together.send("mail", "thank you")


async def inventory(client: postroad.Client) -> None:
    left = len(GOODS)
    async with client.application("inventory").inbox() as inbox:
        async for message in inbox:
            if message.attempt == 1 and message.payload == b"reserve rice":
                await message.reject(reason="out of rice, look again")
                continue
            await message.accept()  # work counts from here on
            sys.stdout.write(f"{message.source}: {message.payload.decode()}, attempt {message.attempt}\n")
            left -= 1
            if not left:
                return


async def take_one(client: postroad.Client, name: str) -> None:
    async with client.application(name).inbox() as inbox:
        message = await anext(inbox)
        await message.accept()
        sys.stdout.write(f"{name}: {message.payload.decode()}\n")


async def main(address: str) -> None:
    async with postroad.connect(address) as client:
        await shop(client)
        await inventory(client)
        await take_one(client, "billing")
        await take_one(client, "mail")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "localhost:7420"))
