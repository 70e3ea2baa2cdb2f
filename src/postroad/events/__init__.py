"""What travels: events, batches and topics."""
