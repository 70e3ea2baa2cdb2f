"""The asyncio driver: sockets, TLS, supervision."""
