"""One peer: handshake, authentication, access, keepalive, credit, dialling."""
