"""What travels: Event, EventBatch and its codec, topics."""

from postroad.events.attributes import Value
from postroad.events.batch import TTL, BatchBuilder, Event, EventBatch, Gap, GapError, empty_frame
from postroad.events.topics import check_pattern, check_topic, pattern_matches, topic_number

__all__ = [
    "TTL",
    "BatchBuilder",
    "Event",
    "EventBatch",
    "Gap",
    "GapError",
    "Value",
    "check_pattern",
    "check_topic",
    "empty_frame",
    "pattern_matches",
    "topic_number",
]
