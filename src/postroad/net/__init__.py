"""The asyncio driver: sockets, TLS, time, HTTP and signals around the broker core."""
