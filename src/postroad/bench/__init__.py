"""Benchmarks people can believe: Postroad and the brokers people know, in one run on one machine.

Every system is driven by packets encoded beforehand over raw sockets, by separate load processes, so that
no client library is what is measured. All get the same payload, the same bursts, the same number of
events in flight and the same connections; nothing may be dropped, every delivery is counted. Rounds
alternate between the systems, and the figures are medians with the smallest and largest beside them.
Broker processor time, read from /proc, stands beside every rate: on a small shared machine it is the
steadier figure.
"""
