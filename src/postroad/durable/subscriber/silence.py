"""Silence: tokens advance although there is nothing for their subscribers (durable paper, 4.1; spec D7).

A subscription that matches nothing would hold storage for ever if its token stayed where it was. Subscribers
that keep their own token are told how far there was nothing. A token kept here is moved on without a message:
of a subscriber that is connected when all that it was sent is acknowledged; of one that is away as long as
the persistent filtering subsystem proves that there was nothing for it. What lies before that subsystem knew
the subscription, and was not gone through when it left, is held for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from postroad.durable.subscriber.cursor import Cursor
from postroad.durable.subscriber.followed import Followed
from postroad.durable.subscriber.outputs import Deliver, Output
from postroad.durable.subscriber.subscriptions import Subscriptions


def tell_silence(
    subscriptions: Subscriptions,
    pubends: Mapping[int, Followed],
    *,
    room: Callable[[int], bool],
    spend: Callable[[int, int], object],
) -> list[Output]:
    """Silence messages to those who keep their token and have everything else."""
    out: list[Output] = []
    for pubend, held in pubends.items():
        live = held.constream.live
        for number in list(held.constream.members):
            one = subscriptions.by_id(number)
            cursor = one.cursors[pubend]
            if not one.kept_here and cursor.told < live and room(number):
                silence = Deliver(subscribers=(number,), pubend=pubend, start=cursor.told, end=live)
                spend(number, silence.size)
                cursor.heard(live)
                out.append(silence)
    return out


def advance_kept(subscriptions: Subscriptions, pubends: Mapping[int, Followed]) -> int:
    """Move tokens that are kept here over silence, as far as it is on disk. How many moved: each is a row."""
    advanced = 0
    for one in subscriptions:
        if not one.kept_here or one.moved_at is not None:
            continue
        for pubend, cursor in one.cursors.items():
            held = pubends.get(pubend)
            if held is None or not held.filtering.recovered:
                continue
            end = _silent_to(held, one.id, cursor)
            if end > cursor.released:
                cursor.heard(end)
                subscriptions.release(one, pubend, end)
                advanced += 1
    return advanced


def _silent_to(held: Followed, number: int, cursor: Cursor) -> int:
    """Up to here all that the subscription has not acknowledged is silence."""
    latest = held.constream.latest_delivered
    if number in held.constream:
        return latest if cursor.released >= cursor.last_event else cursor.released
    if number in held.catchups:
        return cursor.released
    settled = cursor.settled
    silent = settled >= cursor.since and held.filtering.silent(number, settled)
    return latest if silent else min(settled, latest)
