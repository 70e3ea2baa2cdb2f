"""A broker: the rooms, and the turn that passes through them."""
