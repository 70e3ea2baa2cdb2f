"""Requests find caches by content alone (spec B5, paper 3.2): who may have the event hears them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from postroad.client.repair.session import FOLDS, MAX_BITS, MAX_MASKS, ROOT, _as_attributes, _as_condition
from postroad.events import Value
from postroad.selectors import Selector
from postroad.selectors.tags import event_bits, matched, selector_masks

NAMES = st.sampled_from([f"a{at}" for at in range(40)])
EVENTS = st.tuples(
    st.sampled_from(["t", "t/u", "t/u/v"]), st.dictionaries(NAMES, st.integers(0, 3), max_size=40)
)
CONJUNCTIONS = st.lists(st.builds("{} = {}".format, NAMES, st.integers(0, 3)), min_size=1, max_size=3).map(
    " AND ".join
)
CONDITIONS = st.lists(CONJUNCTIONS, max_size=3).map(" OR ".join)


@settings(deadline=None)
@given(event=EVENTS, where=CONDITIONS, pattern=st.sampled_from(["#", "t/#", "t/u"]))
def test_a_cache_hears_requests_for_whatever_its_subscription_matches(
    event: tuple[str, dict[str, Value]], where: str, pattern: str
) -> None:
    """B5."""
    subscription = Selector.parse(pattern, where)
    masks = selector_masks(subscription)
    assert len(masks) <= MAX_MASKS
    bits, condition = event_bits(*event), _as_condition([mask.bits for mask in masks])
    attributes = _as_attributes(bits)
    level = int(next(iter(attributes))[1:].split("_")[0])
    assert len(attributes) <= max(MAX_BITS, FOLDS[-1])
    if condition is None:
        assert not subscription.matches(*event), "it contradicts itself"
        return
    heard = Selector.parse(f"{ROOT}/ask/+", condition).matches(f"{ROOT}/ask/00", attributes)
    if subscription.matches(*event):
        assert heard
    if level == 0:
        assert heard == matched(bits, masks), "of a filter that is not folded, by no more than its bits"


def test_a_filter_with_too_many_ones_is_folded() -> None:
    few, many = ({f"a{at}": at for at in range(count)} for count in (3, 40))
    assert {name.split("_")[0] for name in _as_attributes(event_bits("t", few))} == {"b0"}
    assert {name.split("_")[0] for name in _as_attributes(event_bits("t", many))} != {"b0"}
