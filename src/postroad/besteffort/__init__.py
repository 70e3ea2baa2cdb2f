"""The datagram path of brokers. Repair is the clients' (`client.repair`)."""
