"""What each metric means and when to be alarmed by it: the HELP lines of /metrics.

"Alarm" says for which values somebody should look; "No alarm" that the figure only explains others.
"""

from __future__ import annotations

from typing import Final

_LOAD: Final = "No alarm: it is load, for capacity planning."
_GROWS: Final = "Alarm: it grows."
_BOUND: Final = "No alarm: it is bounded."

ABOUT: Final[dict[str, str]] = {
    # load
    "events_in_total": f"Events that clients published at this broker. {_LOAD}",
    "publish_frames_total": f"Frames that these events came in. {_LOAD}",
    "duplicate_events_total": (
        "Events that a client sent again and the broker took once."
        " No alarm: clients do so after a broken connection."
    ),
    "rejected_publishes_total": (
        "Publishes that the broker refused. Alarm: any; the log says who may not, or what is too large."
    ),
    "deliveries_total": f"Events handed to plain subscribers of this broker. {_LOAD}",
    "delivery_frames_total": f"Frames that these deliveries went in. {_LOAD}",
    "events_forwarded_total": f"Events sent to linked brokers. {_LOAD}",
    "frames_in_total": f"Frames handled. {_LOAD}",
    "bytes_in_total": f"Bytes of these frames. {_LOAD}",
    "refused_frames_total": (
        "Frames that broke a rule of the protocol. Alarm: it grows; some peer is faulty or hostile."
    ),
    "turns_total": f"Turns of the event loop. {_LOAD}",
    "turn_inputs_total": f"What came in with these turns; per turn it is the size of batches. {_LOAD}",
    "socket_bytes_in_total": f"Bytes read from all connections. {_LOAD}",
    "socket_bytes_out_total": f"Bytes written to all connections. {_LOAD}",
    # connections and network
    "clients": "Clients connected. Alarm: far from what is usual.",
    "links": "Links to other brokers that are up. Alarm: fewer than configured.",
    "brokers_reachable": (
        "Brokers of the network that this one reaches, itself included. Alarm: fewer than there are."
    ),
    "direct_peers": "Brokers connected directly, beside the links. No alarm: they come and go with use.",
    "direct_dials_total": "How often such a broker was dialled. No alarm: they are dialled when needed.",
    "direct_unknown_rooms_total": (
        "What direct peers said to a part that this broker lacks."
        " Alarm: any, after all brokers have one version."
    ),
    "refused_datagrams_total": (
        "Datagrams that could not be read. Alarm: it grows fast; somebody sends rubbish."
    ),
    "ring_nodes": "Brokers of the ring of queues that this one knows. Alarm: fewer than there are.",
    "ring_leaves": "Brokers next to this one in the ring. Alarm: 0 where there are other brokers.",
    "ring_messages_total": f"Messages sent about the ring. {_LOAD}",
    "queue_arcs": (
        "Arcs of the ring that this broker has to do with. No alarm: it follows the number of brokers."
    ),
    "queue_arcs_served": (
        "Arcs that this broker is responsible for. Alarm: 0 for minutes where there are queues."
    ),
    "queue_views_total": "Changes of who keeps which arc. Alarm: it grows while no broker comes or goes.",
    "queue_replicas": "Arcs of which this broker has a copy. No alarm: it follows the number of brokers.",
    "queue_replicas_behind": (
        "Copies elsewhere that wait for writes of this broker. Alarm: above 0 for minutes."
    ),
    "queue_inboxes": "Inboxes that this broker is responsible for. No alarm: applications make them.",
    "queue_depth": "Messages in these inboxes. Alarm: it grows for longer than receivers are ever away.",
    "queue_depth_bytes": "Bytes of these messages. Alarm: near `[queues] arc_bytes`.",
    "queue_dead_letters": (
        "Messages that were rejected too often or expired. Alarm: above 0; see `postroad queues`."
    ),
    "queue_consumers": "Consumers of these inboxes. Alarm: 0 where messages wait.",
    "queue_memory_bytes": f"Bytes of queue messages in memory, of all copies here. {_BOUND}",
    "queue_spilled_bytes": (
        "Bodies of queue messages that are on disk for lack of memory. Alarm: it grows for long."
    ),
    "queue_spilled_bytes_total": f"What was moved to disk so. {_LOAD}",
    "queue_oldest_timestamp_seconds": (
        "When the oldest waiting message was sent, in seconds since 1970, 0 without one."
        " Alarm: longer ago than your receivers promise."
    ),
    "queue_kept_total": f"Messages kept on the disks of their replicas. {_LOAD}",
    "queue_accepted_total": f"Messages that consumers accepted. {_LOAD}",
    "queue_rejected_total": "Messages that consumers rejected. Alarm: its share of accepted ones grows.",
    "queue_handed_total": f"Messages given to consumers, again or not. {_LOAD}",
    "queue_express_total": f"Express messages passed on. {_LOAD}",
    "queue_express_bytes": f"Bytes of express messages in memory. {_BOUND}",
    "queue_quota_refusals_total": "Sends and inboxes that were over a quota. Alarm: it grows.",
    "queue_stalls_total": "Writes that a replica did not keep for 5 s. Alarm: it grows; a disk is slow.",
    "queue_full_total": (
        "Messages refused since an inbox or arc was full. Alarm: it grows; receivers are too slow."
    ),
    "queue_writes_total": f"Writes to replicas. {_LOAD}",
    "queue_disk_failures_total": "What the disk refused of queues. Alarm: any; look at the disk.",
    "queue_errands": f"Tasks for other brokers, on behalf of clients here, that are not answered. {_GROWS}",
    "queue_errand_bytes": f"Bytes of these tasks. {_GROWS}",
    "queue_errands_total": f"All such tasks. {_LOAD}",
    "queue_errands_repeated_total": "Tasks sent again. Alarm: it grows while no broker comes or goes.",
    "socket_connections": "Open connections. Alarm: near `max_connections`.",
    "socket_connections_opened_total": (
        "Connections accepted and dialled. Alarm: it grows fast; clients reconnect in a loop."
    ),
    "socket_connections_refused_total": f"Connections turned away: too many, or broken bytes. {_GROWS}",
    "socket_connections_overflowed_total": (
        "Connections closed since they did not read. Alarm: it grows; some client is stuck."
    ),
    "socket_unsent_bytes": (
        "Bytes that wait in sockets to be taken. Alarm: high for long; peers read too slowly."
    ),
    "socket_held_bytes": (
        "These, and frames that have not come whole or wait for a turn. Alarm: near `delivery.total_bytes`."
    ),
    "stalled_connections": "Clients that wait for credit: they do not read. Alarm: above 0 for minutes.",
    "feeds_blocked": (
        "Streams to neighbours that wait for credit. Alarm: above 0 for minutes; a link is too slow."
    ),
    "dial_failures_total": (
        "Attempts to link that failed. Alarm: it grows; a broker is down or an address is wrong."
    ),
    "principals": "Principals that are connected or have subscriptions. No alarm: it follows your users.",
    "quota_refusals_total": (
        "What was refused for a quota. Alarm: it grows; a client misbehaves or its quota is small."
    ),
    "quota_stored_bytes": (
        "Bytes of durable events in the log, of all principals. Alarm: near the disk's size."
    ),
    "quota_stored_bytes_most": (
        "Of these, those of the principal with most. Alarm: near `quotas.stored_bytes`."
    ),
    "frames_waiting": (
        "Frames of clients that wait for their share of a turn."
        " Alarm: high for long; one client asks too much."
    ),
    "best_effort_published_total": f"Best-effort events of clients here. {_LOAD}",
    "best_effort_received_total": f"Best-effort events of neighbours. {_LOAD}",
    "best_effort_forwarded_total": f"Best-effort events sent to neighbours. {_LOAD}",
    "best_effort_delivered_total": f"Best-effort events sent to clients here. {_LOAD}",
    "best_effort_dropped_total": (
        "Best-effort events without room or way. Alarm: its share of received ones grows."
    ),
    "best_effort_limited_total": (
        "Best-effort events above a client's rate. Alarm: it grows; raise the rate or find the client."
    ),
    "best_effort_refused_total": (
        "Datagrams not sealed as they must be. Alarm: it grows; somebody forges them."
    ),
    "best_effort_paths": (
        "Peers that hear our datagrams. Alarm: fewer than links; datagrams do not pass a firewall."
    ),
    "repair_subscriptions": "Subscriptions of clients here that repair. No alarm: clients choose it.",
    "repair_received": f"Events that came to these as they were first sent. {_LOAD}",
    "repair_losses_detected": (
        "Losses that these found. Alarm: its share of received ones grows; the network drops."
    ),
    "repair_requests": f"Requests that they sent for these. {_LOAD}",
    "repair_recovered": f"Losses that were repaired. {_LOAD}",
    "repair_given_up": "Losses that were not repaired in time. Alarm: above 0; readers got gaps.",
    "repair_duplicates_suppressed": (
        "Events that came once more and were dropped. No alarm: repair causes some."
    ),
    "repair_recovery_seconds": (
        "How long all recoveries took together. Alarm: divided by `repair_recovered` it grows."
    ),
    "repair_repairs_sent": f"Repairs that clients and caches here sent. {_LOAD}",
    "repair_cache_asked": f"Requests of others for repairs. {_LOAD}",
    "repair_cache_hits": f"Of these, those for what was there. {_LOAD}",
    "repair_cache_messages": f"Events in caches of clients here. {_BOUND}",
    "datagrams_in_total": f"UDP datagrams read. {_LOAD}",
    "datagrams_out_total": f"UDP datagrams sent. {_LOAD}",
    "datagram_groups": "Multicast groups joined. Alarm: 0 where discovery by multicast is used.",
    "datagrams_foreign_total": "Datagrams dropped at once: not ours, or too long. Alarm: it grows fast.",
    "datagrams_overrun_total": f"Datagrams that the kernel dropped, since the broker was too busy. {_GROWS}",
    "datagrams_unsent_total": f"Datagrams not sent since the socket was full. {_GROWS}",
    "datagrams_failed_total": "Datagrams to addresses without a way. Alarm: it grows; a route is missing.",
    "discovery_requests_total": f"Requests of those who look for brokers. {_LOAD}",
    "discovery_responses_total": f"Answers to these. {_LOAD}",
    "discovery_spread_total": f"Requests passed on to neighbours. {_LOAD}",
    "discovery_cookies_total": f"Cookies sent to those who ask first. {_LOAD}",
    "discovery_refused_total": (
        "Requests that are not to be answered. Alarm: it grows; somebody lacks the token."
    ),
    "discovery_malformed_total": "Datagrams of discovery that could not be read. Alarm: it grows fast.",
    "discovery_dropped_total": (
        "Requests over the limit of a second. Alarm: it grows; too many look for brokers."
    ),
    "discovery_searches_total": (
        "Searches of this broker for others to link with. Alarm: it grows while links are up."
    ),
    "clock_corrections_total": (
        "Ids whose time was far from this broker's clock. Alarm: it grows; a clock is wrong."
    ),
    # subscribers
    "subscriptions": "Plain subscriptions of clients here. No alarm: it follows your clients.",
    "subscriptions_unconfirmed": "Those that wait for brokers far away. Alarm: above 0 for minutes.",
    "delivery_buffered_bytes": "What waits for slow consumers. Alarm: near `delivery.total_bytes`.",
    "delivery_shortened_total": "How often the longest queues paid since all were too long. Alarm: any.",
    "dropped_deliveries_total": (
        "Events that slow subscribers did not get. Alarm: it grows; they were told gaps."
    ),
    "delivery_gaps_total": f"Gaps that these were told. {_GROWS}",
    "slow_consumer_disconnects_total": f"Subscribers disconnected for being slow. {_GROWS}",
    "interest_subscriptions": (
        "Subscriptions of this broker that others are told of. No alarm: it follows clients."
    ),
    "interest_selectors": "Different selectors among these. No alarm: it follows clients.",
    "interest_advertised": (
        "Selectors told to others, without those that wider ones cover. No alarm: it follows clients."
    ),
    "interest_owners": "Brokers whose interest is known. Alarm: fewer than `brokers_reachable` for minutes.",
    "interest_entries_held": "Entries of their interest. No alarm: it follows their clients.",
    "interest_waiting": "Updates of interest that are taken in piece by piece. Alarm: above 0 for minutes.",
    # streams and memory
    "streams": "Publishing ends that this broker follows. No alarm: it follows the number of brokers.",
    "streams_with_gaps": "Streams with repairs under way. Alarm: above 0 for minutes; a link loses frames.",
    "nacks_sent_total": "Repairs asked for. Alarm: it grows fast; a link loses frames.",
    "nacks_received_total": "Repairs asked of this broker. Alarm: it grows fast.",
    "lost_spans_total": "Spans of events that nobody had any more. Alarm: any; readers were told gaps.",
    "ticks_ahead_total": (
        "Ticks a day ahead that were not believed. Alarm: any; a clock is wrong or a broker lies."
    ),
    "plain_bytes": f"Memory of plain events published here. {_BOUND}",
    "cache_bytes": f"Memory of events that came from others. {_BOUND}",
    "publishers_remembered": f"Publishers whose repeated events are recognised. {_BOUND}",
    # durable events and the disk
    "durable_events_total": f"Durable events that are in the log here. {_LOAD}",
    "durable_deliveries_total": f"Events handed to durable subscribers of this broker. {_LOAD}",
    "durable_failures_total": (
        "Durable publishes that could not be stored. Alarm: any; look at the disk and the log."
    ),
    "durable_frames_waiting": "Publishes on their way to disk. Alarm: high for long; the disk is slow.",
    "durable_kept_bytes": "Bytes of durable events that are kept. Alarm: near what `[durable]` allows.",
    "durable_subscriptions": (
        "Durable subscriptions that this broker keeps."
        " Alarm: it grows without end; delete those that nobody reads."
    ),
    "durable_subscriptions_connected": "Of these, those with a reader. Alarm: fewer than your consumers.",
    "durable_rejected_total": (
        "Attempts of consumers of shared subscriptions that failed. Alarm: its rate grows."
    ),
    "durable_dead_letters_total": (
        "Events that failed too often and are dead letters. Alarm: any; read their topic."
    ),
    "durable_catchup_streams": (
        "Streams that subscribers catch up with. Alarm: above 0 for long; they are too slow."
    ),
    "durable_switchovers_total": "Subscribers that have caught up. No alarm: it happens after each absence.",
    "log_bytes": "The log on disk. Alarm: near the disk's size.",
    "log_live_bytes": "What of it is still needed. Alarm: it grows; some subscription does not acknowledge.",
    "log_segments": "Files of the log. No alarm: it follows `log_bytes`.",
    "log_streams": "Streams in the log. No alarm: it follows pubends and arcs.",
    "log_commits_total": f"Group commits. {_LOAD}",
    "log_short": "1 while the disk is full and durable events are refused. Alarm: 1.",
    "history_events_total": f"Events that the broker published about itself. {_LOAD}",
    "history_dropped_total": (
        "Such events that it could not publish. Alarm: any; traces of the past have holes."
    ),
    "history_pending_bytes": f"Such events that wait for the disk. {_GROWS}",
    # tracking
    "tracking_keys_total": f"Message ids that were noted. {_LOAD}",
    "tracking_histories": f"Histories that are being written. {_BOUND}",
    "tracking_memory_bytes": f"Their memory. {_BOUND}",
    "tracking_stored_filters_total": f"Filters written to disk. {_LOAD}",
    "tracking_stored_bytes_total": f"Bytes of these filters. {_LOAD}",
    "tracking_dropped_total": (
        "What a full, slow or failing disk did not take. Alarm: any; traces have holes."
    ),
    "tracking_kept_filters": "Filters still kept. No alarm: retention bounds them.",
    "tracking_kept_bytes": "Bytes of these. Alarm: near what `[tracking]` allows.",
    "tracking_attachments": f"Clients and neighbours that came and went, as remembered. {_BOUND}",
    "traces": "Traces under way here. Alarm: above 0 for minutes.",
    "trace_questions_waiting": "Questions of traces that wait for an answer. Alarm: above 0 for minutes.",
    # the process
    "kernel_compiled": "1 if the compiled kernel is used. Alarm: 0; the broker is slow.",
    "uptime_started_seconds": "When the process started, in seconds since 1970. Alarm: it changes unasked.",
}
