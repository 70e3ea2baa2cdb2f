"""Inboxes: how responsibility for an arc of the ring is agreed and replicated, and what an inbox holds."""
