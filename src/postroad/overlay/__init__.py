"""Links, topology, spanning trees, who wants what where."""
