"""The ring of brokers: Pastry."""
