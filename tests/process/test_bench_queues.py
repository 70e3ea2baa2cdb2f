"""`postroad bench queues` on ours: what it counts is checked by itself, and a kill is survived."""

from __future__ import annotations

import pytest

from postroad.bench import queues
from postroad.bench.queue_senders import PostroadSender
from postroad.bench.queues import QUEUE_SYSTEMS, Cluster, Workload, kill_and_wait, measure
from postroad.bench.systems import serving
from postroad.errors import PeerError


def test_every_message_that_is_confirmed_is_there_and_a_kill_is_survived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workload = Workload("2 queues", 2, 8)
    monkeypatch.setattr(queues, "WORKLOADS", (workload,))
    monkeypatch.setattr(queues, "MAX_MESSAGES", 100)
    with serving(QUEUE_SYSTEMS["postroad"], queues.BROKERS) as running:
        cluster = Cluster(QUEUE_SYSTEMS["postroad"], running)
        figures = measure(cluster, workload, 30.0)
        assert set(figures) == {"messages_per_s", "p50_us", "p99_us", "cpu_us_per_message"}
        assert 0 < figures["p50_us"] <= figures["p99_us"]
        sender = PostroadSender(running.addresses[0], "w0q0")
        assert sender.depth() == 101, "a hundred, and the one that made the queue"
        monkeypatch.setattr(queues, "READY_S", 0.1)
        with pytest.raises(PeerError, match="102 were confirmed"):
            queues._check_depth(sender, 102)
        monkeypatch.setattr(queues, "READY_S", 60.0)
        sender.close()
        assert 0 < kill_and_wait(cluster, there=True) < queues.GONE_S
