"""Which experiments there are. Each gives figures of ours and of the paper under the same flat names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from postroad.errors import UsageError
from postroad.lab import (
    discovery_multicast,
    discovery_security,
    discovery_topologies,
    durable_autoack,
    durable_crash,
    durable_disconnect,
    durable_pfs,
    durable_scaling,
    queues_delivery,
    repair,
    tracking_table2,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    name: str
    about: str
    seconds: float  # default, of each measurement
    run: Callable[[float, Path | None, Callable[[str], None]], tuple[dict[str, float], dict[str, float]]]
    notes: tuple[str, ...] = field(default=())  # what to know when comparing


EXPERIMENTS: Final = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            name="tracking-table2",
            about="Jun and Astley, section 5: latency and storage of the 21 rows of Table 2; figures 1, 3-5",
            seconds=tracking_table2.SECONDS,
            run=tracking_table2.run,
            notes=tracking_table2.NOTES,
        ),
        Experiment(
            name="durable-scaling",
            about="Bhola et al., 5.1: peak rate with 1, 2 and 4 SHBs, also with disconnections; figure 4",
            seconds=durable_scaling.SECONDS,
            run=durable_scaling.run,
            notes=durable_scaling.NOTES,
        ),
        Experiment(
            name="durable-disconnect",
            about="Bhola et al., 5.1.1: latestDelivered(p) and released(p) under disconnections; figure 6",
            seconds=durable_disconnect.SECONDS,
            run=durable_disconnect.run_rates,
            notes=durable_disconnect.NOTES_RATES,
        ),
        Experiment(
            name="durable-catchup",
            about="Bhola et al., 5.1.1: how long subscribers take to catch up; figure 5",
            seconds=durable_disconnect.SECONDS,
            run=durable_disconnect.run_catchup,
            notes=durable_disconnect.NOTES_CATCHUP,
        ),
        Experiment(
            name="durable-pfs",
            about="Bhola et al., 5.1.2: persistent filtering against a log of events per subscriber",
            seconds=durable_pfs.SECONDS,
            run=durable_pfs.run,
            notes=durable_pfs.NOTES,
        ),
        Experiment(
            name="durable-autoack",
            about="Bhola et al., 5.2: tokens kept by the broker, every event acknowledged by itself",
            seconds=durable_autoack.SECONDS,
            run=durable_autoack.run,
            notes=durable_autoack.NOTES,
        ),
        Experiment(
            name="durable-crash",
            about="Bhola et al., 5.3: an SHB with 40 subscribers crashes for 25 s; figures 7 and 8",
            seconds=durable_crash.SECONDS,
            run=durable_crash.run,
            notes=durable_crash.NOTES,
        ),
        Experiment(
            name="queues-scale",
            about="Selim et al., 4.1: delay and round trip from 64 to 1,024 brokers; figure 6, Table 2",
            seconds=queues_delivery.SECONDS,
            run=queues_delivery.run_scale,
            notes=queues_delivery.NOTES,
        ),
        Experiment(
            name="queues-traffic",
            about="Selim et al., 4.2: messages on the wire from 64 to 1,024 brokers; figure 7",
            seconds=queues_delivery.SECONDS,
            run=queues_delivery.run_traffic,
            notes=queues_delivery.NOTES,
        ),
        Experiment(
            name="queues-distance",
            about="Selim et al., 4.3: areas with 10 to 60 ms between the farthest brokers; figure 8",
            seconds=queues_delivery.SECONDS,
            run=queues_delivery.run_distance,
            notes=queues_delivery.NOTES,
        ),
        Experiment(
            name="queues-10000",
            about="beyond Selim et al.: delays and messages with 10,000 brokers (takes some minutes)",
            seconds=queues_delivery.SECONDS,
            run=queues_delivery.run_many,
            notes=queues_delivery.NOTES,
        ),
        Experiment(
            name="discovery-topologies",
            about="Pallickara et al., 9: five brokers unconnected, in a star, in a line; figures 2 to 11",
            seconds=discovery_topologies.SECONDS,
            run=discovery_topologies.run,
            notes=discovery_topologies.NOTES,
        ),
        Experiment(
            name="discovery-multicast",
            about="Pallickara et al., 9: discovery by multicast only; figure 12",
            seconds=discovery_multicast.SECONDS,
            run=discovery_multicast.run,
            notes=discovery_multicast.NOTES,
        ),
        Experiment(
            name="discovery-security",
            about="Pallickara et al., 9.1: checking certificates, signing, encrypting; figures 13 and 14",
            seconds=discovery_security.SECONDS,
            run=discovery_security.run,
            notes=discovery_security.NOTES,
        ),
        Experiment(
            name="repair-12",
            about="Malekpour et al., section 4: 12 brokers that lose 1% on each link; figures 2 and 5 to 11",
            seconds=repair.SECONDS,
            run=repair.run_small,
            notes=repair.NOTES,
        ),
        Experiment(
            name="repair-46",
            about="Malekpour et al., section 4: 46 brokers that lose 1% on each link; figures 2 and 5 to 11",
            seconds=repair.SECONDS,
            run=repair.run_large,
            notes=repair.NOTES,
        ),
    )
}


def experiment(name: str) -> Experiment:
    known = EXPERIMENTS.get(name)
    if known is None:
        raise UsageError(f"unknown experiment {name!r}; known are {', '.join(EXPERIMENTS)}")
    return known
