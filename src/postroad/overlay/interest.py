"""Who wants what where: every broker's interest, shrunk by covering, versioned, held by all.

Content-based routing needs each broker to know what the brokers downstream want. Each broker owns one
table: the selectors of its local subscribers, of which it advertises only the maximal ones, since an
event that a covered selector matches is wanted already because of its coverer. Everybody holds
everybody's table, so that any broker can filter for any tree of the overlay.

A table is a sequence of versions, boot << 32 | n. Every change takes the table from one version to the
next, atomically; a receiver that does not hold the version a change starts from asks for the whole
table. Knowledge is filtered with named versions ("silence is relative to a filter", spec durable.md), so a
version must mean the same entries everywhere; that is why a change is applied whole or not at all.

A table also holds its owner's claims: the names of the durable subscriptions it hosts, each with an epoch
(spec D10) and the principal that it belongs to. They match nothing; they are here because they must be known
everywhere, like the selectors.

Covering is an economy, never a condition of correctness: what the search for a coverer overlooks is
advertised although it need not be (see `covering`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from postroad.errors import BugError, PeerError, UnavailableError, UsageError
from postroad.events.batch import EventBatch
from postroad.events.topics import RESERVED, pattern_matches
from postroad.ids import SubscriptionKey
from postroad.overlay.interest_entries import (
    TOPIC_BYTES,
    WHERE_BYTES,
    Claim,
    Entry,
    claims_in,
    entry_bytes,
    make_update,
    pack,
    parse_entries,
    text_bytes_of,
    wire_entry,
)
from postroad.overlay.topology import MAX_BROKERS
from postroad.selectors import Group, MatchIndex, Selector
from postroad.selectors.cost import taking_in_units
from postroad.selectors.cover_index import Covering, OwnSelector
from postroad.wire.frames import (
    DEFAULT_LIMITS,
    InterestClaim,
    InterestEntry,
    InterestUpdate,
    Limits,
)

ENTRIES_PER_OWNER: Final = 1_000_000
TEXT_BYTES_PER_OWNER: Final = 256 << 20
CLAIMS_PER_UNIT: Final = 32  # that are looked at in 100 us
_MAX_PARTS: Final = 4096
_MAX_CHANGES: Final = (1 << 32) - 1


class Heard(NamedTuple):
    """What an owner claims with a version of its table; None: no longer. `whole`: and nothing else."""

    owner: int
    version: int
    claims: dict[str, Claim | None]
    whole: bool


class _Change:
    """What one change of the own subscriptions does to the advertised table, net."""

    __slots__ = ("added", "removed")

    def __init__(self) -> None:
        self.added: dict[int, InterestEntry | InterestClaim] = {}  # by entry number, in the order made
        self.removed: list[int] = []

    def withdraw(self, entry: int) -> None:
        # An entry that was made by this very change never existed for anybody else.
        if self.added.pop(entry, None) is None:
            self.removed.append(entry)


class _Table:
    """Another broker's table as held here."""

    __slots__ = ("claims", "entries", "text_bytes", "version")

    def __init__(self, version: int) -> None:
        self.version = version
        self.claims: dict[str, int] = {}  # name -> entry number, the latest if there are two
        # Entry number -> (key in the index, selector), or (0, claim).
        self.entries: dict[int, tuple[int, Entry]] = {}
        self.text_bytes = 0


class _Assembly:
    """Parts of one whole table that are still incomplete."""

    __slots__ = ("entries", "indexed", "parts", "text_bytes", "version")

    def __init__(self, version: int, parts: int) -> None:
        self.version = version
        self.parts: list[bool] = [False] * parts  # which have come
        self.entries: dict[int, Entry] = {}
        self.indexed: list[Selector] = []  # those of them that the index holds until the table is whole
        self.text_bytes = 0


class Intake:
    """An update on its way in, so many of its entries at a time.

    What takes time about an entry is done here: its condition is read and put into the index, for nobody yet.
    `finish` then takes the update in as a whole. Until then, and if anything is wrong with it, nothing has
    changed for anybody.
    """

    __slots__ = (
        "_added",
        "_answer",
        "_at",
        "_claims_at",
        "_index",
        "_indexed",
        "_interest",
        "_limits",
        "_text_bytes",
        "_update",
    )

    def __init__(self, interest: Interest, index: MatchIndex, update: InterestUpdate, limits: Limits) -> None:
        self._interest = interest
        self._index = index
        self._update = update
        self._limits = limits
        self._added: dict[int, Entry] = {}
        self._text_bytes = 0
        self._indexed: list[Selector] = []  # those of `_added` that the index holds for this
        self._answer = interest.answer(update)  # unless its entries matter
        matter = self._answer is None
        self._at = 0 if matter else len(update.added)  # conditions looked at
        self._claims_at = 0 if matter else len(update.claims)  # claims looked at

    @property
    def complete(self) -> bool:
        """Every entry was looked at."""
        return self._at == len(self._update.added) and self._claims_at == len(self._update.claims)

    def step(self, units: int) -> int:
        """Look at more entries, at least one of those that are left, for so many units of 100 us; the units
        that it took."""
        took = 0
        try:
            while took < units and self._at < len(self._update.added):
                took += self._look_at(self._update.added[self._at])
                self._at += 1
            while took < units and self._claims_at < len(self._update.claims):
                took += 1
                claims = self._update.claims[self._claims_at : self._claims_at + CLAIMS_PER_UNIT]
                self._keep(make_update(self._update.owner, 0, self._update.version, claims, ()))
                self._claims_at += len(claims)
        except PeerError:
            self.abandon()
            raise
        return took

    def _look_at(self, entry: InterestEntry) -> int:
        single = make_update(self._update.owner, 0, self._update.version, (entry,), ())
        self._keep(single)
        selector = self._added[entry.entry]
        assert isinstance(selector, Selector)
        units = taking_in_units(selector.where, selector.boxes)
        self._index.hold(selector)
        self._indexed.append(selector)
        selector.forget()
        return units

    def _keep(self, part: InterestUpdate) -> None:
        parsed, text_bytes = parse_entries(part, self._limits)
        repeated = self._added.keys() & parsed.keys()
        if repeated:
            raise PeerError(f"interest of broker {part.owner} adds entry {min(repeated)} twice")
        self._added.update(parsed)
        self._text_bytes += text_bytes

    def finish(self) -> tuple[bool, bool]:
        """What `Interest.accept` answers."""
        if not self.complete:
            raise BugError(f"entries from {self._at}, claims from {self._claims_at} on were not looked at")
        try:
            # What was not looked at cannot be taken in, whatever has changed; what was may be old by now.
            answer = self._answer or self._interest.answer(self._update)
            if answer is None:
                answer = self._interest.apply(self._update, self._added, self._text_bytes)
            return answer
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Nothing of it is needed any more; what the index holds by now stays."""
        while self._indexed:
            self._index.release(self._indexed.pop())


class Interest:
    """The tables of all brokers, this one's included."""

    __slots__ = (
        "_assemblies",
        "_claims",
        "_covering",
        "_entries",
        "_heard",
        "_index",
        "_keys",
        "_last_entry",
        "_last_key",
        "_limits",
        "_me",
        "_own",
        "_own_text_bytes",
        "_reserved",
        "_tables",
        "_versions",
        "own_version",
        "reserved_changes",
    )

    def __init__(self, me: int, boot: int, limits: Limits = DEFAULT_LIMITS) -> None:
        if not 0 <= boot < 1 << 32:
            raise UsageError(f"boot {boot} is not an unsigned 32-bit number")
        self._me = me
        self._limits = limits  # those of every broker here: links refuse others
        self.own_version = boot << 32
        self._keys: dict[SubscriptionKey, OwnSelector] = {}  # every local subscription
        self._own: dict[Selector, OwnSelector] = {}  # the distinct selectors of `_keys`
        self._own_text_bytes = 0  # of `_own`
        self._entries: dict[int, OwnSelector] = {}  # those advertised, by entry number, which increases
        self._covering = Covering()  # the same ones, by topic pattern
        self._claims: dict[str, tuple[int, Claim]] = {}  # own ones by name, with their entry number
        self._heard: list[Heard] = []  # claims of others that nobody took yet
        self._last_entry = 0
        self._tables: dict[int, _Table] = {}  # by owner, this broker excluded; at most MAX_BROKERS
        self._assemblies: dict[int, _Assembly] = {}  # by owner, newer than the table held; as many at most
        self._index = MatchIndex()  # entries of all `_tables`, targets are owners
        self._last_key = 0
        self._reserved: dict[
            str, int
        ] = {}  # topic patterns within RESERVED, with the selectors that have them
        self.reserved_changes = 0  # of `_reserved`'s keys
        self._versions: dict[int, int] | None = None  # what `versions` gave last, None once it is out of date

    # Own interest

    def subscribe(self, key: SubscriptionKey, selector: Selector) -> list[InterestUpdate]:
        """Add a local subscription. The updates to flood, none when what is advertised covers it already."""
        if key in self._keys:
            raise UsageError(f"the {key} is in the interest already")
        own = self._own.get(selector)
        if own is not None:
            own.references += 1
            self._keys[key] = own
            return []
        text_bytes = self._check_own(selector)
        own = OwnSelector(selector)
        self._keys[key] = self._own[selector] = own
        self._own_text_bytes += text_bytes
        self._count_reserved(selector, 1)
        change = self._begin_change()
        self._place(own, change)
        return self._commit(change)

    def unsubscribe(self, key: SubscriptionKey) -> list[InterestUpdate]:
        """Remove a local subscription. What it alone covered is advertised again before it goes."""
        own = self._keys.pop(key, None)
        if own is None:
            raise UsageError(f"the {key} is not in the interest")
        own.references -= 1
        if own.references:
            return []
        selector = own.selector
        del self._own[selector]
        self._own_text_bytes -= text_bytes_of(selector.topic, selector.where)
        self._count_reserved(selector, -1)
        if own.coverer is not None:
            del own.coverer.covered[selector]
            return []
        change = self._begin_change()
        self._withdraw(own, change)
        for orphan in own.covered.values():
            orphan.coverer = None
            self._place(orphan, change)
        return self._commit(change)

    def claim(self, changes: Mapping[str, Claim | None]) -> list[InterestUpdate]:
        """Claim these names, or no longer (None). The updates to flood."""
        change = self._begin_change()
        for name, claim in changes.items():
            entry, former = self._claims.pop(name, (0, None))
            if former is not None:
                change.withdraw(entry)
            if claim is not None:
                self._last_entry += 1
                self._claims[name] = (self._last_entry, claim)
                change.added[self._last_entry] = wire_entry(self._last_entry, claim)
        return self._commit(change)

    def take_heard(self) -> list[Heard]:
        """What others claim, since this was last asked."""
        heard, self._heard = self._heard, []
        return heard

    def claims_of(self, owner: int) -> Heard:
        """All that an owner is known to claim."""
        table = self._tables.get(owner)
        entries = [] if table is None else [table.entries[entry][1] for entry in table.claims.values()]
        return Heard(owner, self.version(owner), claims_in(entries), whole=False)

    def _check_own(self, selector: Selector) -> int:
        text_bytes = text_bytes_of(selector.topic, selector.where)
        if len(selector.topic.encode()) > TOPIC_BYTES or len(selector.where.encode()) > WHERE_BYTES:
            raise UsageError(
                f"a selector with a topic of {len(selector.topic.encode())} bytes and a condition of"
                f" {len(selector.where.encode())}; at most {TOPIC_BYTES} and {WHERE_BYTES} are allowed"
            )
        if len(self._own) >= ENTRIES_PER_OWNER:
            raise UsageError(f"a broker holds at most {ENTRIES_PER_OWNER} different selectors")
        if self._own_text_bytes + text_bytes > TEXT_BYTES_PER_OWNER:
            raise UsageError(
                f"a broker holds at most {TEXT_BYTES_PER_OWNER} bytes of selectors: it has"
                f" {self._own_text_bytes}, this one has {text_bytes}"
            )
        return text_bytes

    def _begin_change(self) -> _Change:
        self._covering.begin_change()
        return _Change()

    def _place(self, own: OwnSelector, change: _Change) -> None:
        """Put a selector under a coverer, or advertise it and put what it covers under it."""
        coverer = self._covering.find_wider(own)
        if coverer is not None:
            own.coverer = coverer
            coverer.covered[own.selector] = own
            return
        for narrower in self._covering.find_narrower(own):
            self._withdraw(narrower, change)
            # Coverers stand one deep: what the narrower one covered, its coverer covers as well.
            for covered in (narrower, *narrower.covered.values()):
                covered.coverer = own
                own.covered[covered.selector] = covered
            narrower.covered = {}
        self._last_entry += 1
        own.entry = self._last_entry
        self._entries[own.entry] = own
        self._covering.add(own)
        change.added[own.entry] = wire_entry(own.entry, own.selector)

    def _withdraw(self, own: OwnSelector, change: _Change) -> None:
        change.withdraw(own.entry)
        del self._entries[own.entry]
        self._covering.remove(own)
        own.entry = 0

    def _commit(self, change: _Change) -> list[InterestUpdate]:
        updates: list[InterestUpdate] = []
        # A change too large for one frame becomes several versions. Additions come first: the versions in
        # between want too much, never too little.
        for added, removed in pack(change.added.values(), sorted(change.removed)):
            if self.own_version & _MAX_CHANGES == _MAX_CHANGES:
                raise UnavailableError("interest has changed 2^32 times since the broker started: restart it")
            base, self.own_version = self.own_version, self.own_version + 1
            self._versions = None
            updates.append(make_update(self._me, base, self.own_version, added, removed))
        return updates

    # Everybody's interest

    def digest(self) -> dict[int, int]:
        """Owner -> version held, own included, by increasing owner."""
        return dict(sorted(self.versions().items()))

    def versions(self) -> Mapping[int, int]:
        """Owner -> version that `match` filters with, own included. A change makes a new mapping."""
        if self._versions is None:
            self._versions = {owner: table.version for owner, table in self._tables.items()}
            self._versions[self._me] = self.own_version
        return self._versions

    def version(self, owner: int) -> int:
        """The version held of one owner, 0 if none."""
        if owner == self._me:
            return self.own_version
        table = self._tables.get(owner)
        return 0 if table is None else table.version

    def wanted(self, digest: Mapping[int, int]) -> tuple[int, ...]:
        """The owners of whom the sender of `digest` holds a newer table."""
        return tuple(
            owner
            for owner, version in sorted(digest.items())
            if owner != self._me and version > self.version(owner)
        )

    def full(self, owner: int) -> list[InterestUpdate]:
        """The whole table of `owner` in parts that fit a frame; empty if none is held."""
        selectors: Iterable[tuple[int, Entry]]
        if owner == self._me:
            selectors = [
                *((entry, own.selector) for entry, own in self._entries.items()),
                *self._claims.values(),
            ]
        elif owner in self._tables:
            selectors = ((entry, row[1]) for entry, row in self._tables[owner].entries.items())
        else:
            return []
        # Sorted, so that the parts are the same ones whoever sends them: parts of one version that
        # came from different brokers fit together.
        entries = [
            wire_entry(entry, selector) for entry, selector in sorted(selectors, key=lambda item: item[0])
        ]
        packs = list(pack(entries, ())) or [((), ())]
        return [
            make_update(owner, 0, self.version(owner), added, (), part, len(packs))
            for part, (added, _) in enumerate(packs)
        ]

    def accept(self, update: InterestUpdate) -> tuple[bool, bool]:
        """Take in what a neighbour sent: (news, to flood on; base not held, pull the whole table).

        Every part of a whole table that is new is news, so that flooding carries all parts on.
        PeerError leaves everything as it was.
        """
        intake = self.begin(update)
        while not intake.complete:
            intake.step(1)
        return intake.finish()

    def begin(self, update: InterestUpdate) -> Intake:
        """`accept` in slices, for a broker that has other things to do in between.

        The updates of one owner are taken in one after the other, each begun when the last has finished.
        """
        return Intake(self, self._index, update, self._limits)

    def answer(self, update: InterestUpdate) -> tuple[bool, bool] | None:
        """What `accept` answers to an update whose entries need not be looked at, else None."""
        if update.owner == self._me or update.version <= self.version(update.owner):
            return False, False
        if update.owner not in self._tables and len(self._tables) >= MAX_BROKERS:
            raise PeerError(f"interest of more than {MAX_BROKERS} brokers")
        if update.base == 0:
            assembly = self._assemblies.get(update.owner)
            if not 0 <= update.part < update.parts <= _MAX_PARTS or update.removed:
                raise PeerError(
                    f"part {update.part} of {update.parts} of broker {update.owner}'s interest removes"
                    f" {len(update.removed)} entries; parts are numbered from 0, at most {_MAX_PARTS}, and"
                    " remove none"
                )
            old = assembly is not None and update.version < assembly.version
            return (False, False) if old else None
        if update.parts != 1 or update.part != 0 or update.base >= update.version:
            raise PeerError(
                f"interest change of broker {update.owner} from version {update.base} to {update.version} is"
                f" part {update.part} of {update.parts}; it has one part and goes to a later version"
            )
        table = self._tables.get(update.owner)
        return (False, True) if table is None or table.version != update.base else None

    def apply(self, update: InterestUpdate, added: dict[int, Entry], text_bytes: int) -> tuple[bool, bool]:
        """Take in an update to which `answer` is None, and whose entries are these."""
        if update.base == 0:
            return self._accept_part(update, added, text_bytes), False
        self._apply(self._tables[update.owner], update, added, text_bytes)
        self._drop_stale_assembly(update.owner)
        return True, False

    def _apply(self, table: _Table, update: InterestUpdate, added: dict[int, Entry], text_bytes: int) -> None:
        owner = update.owner
        removed = set(update.removed)
        if len(removed) != len(update.removed):
            twice = len(update.removed) - len(removed)
            raise PeerError(f"interest change of broker {owner} removes {twice} entries twice")
        if unknown := removed - table.entries.keys():
            raise PeerError(f"interest change of broker {owner} removes entry {min(unknown)}, which it lacks")
        if repeated := added.keys() & table.entries.keys():
            raise PeerError(f"interest change of broker {owner} adds entry {min(repeated)}, which it has")
        text_bytes += table.text_bytes - sum(entry_bytes(table.entries[entry][1]) for entry in update.removed)
        _check_table(owner, len(table.entries) + len(added) - len(removed), text_bytes)
        claims: dict[str, Claim | None] = {}
        for entry in update.removed:
            key, gone = table.entries.pop(entry)
            if isinstance(gone, Claim):
                # A change that is too large for one frame adds the later claim in an earlier version.
                if table.claims.get(gone.name) == entry:
                    del table.claims[gone.name]
                    claims[gone.name] = None
            else:
                self._index.remove(key)
                self._count_reserved(gone, -1)
        claims.update(claims_in(added.values()))
        if claims:
            self._heard.append(Heard(owner, update.version, claims, whole=False))
        self._fill(owner, table, added)
        table.text_bytes = text_bytes
        table.version = update.version
        self._versions = None

    def _accept_part(self, update: InterestUpdate, added: dict[int, Entry], text_bytes: int) -> bool:
        owner = update.owner
        assembly = self._assemblies.get(owner)
        if assembly is None or (assembly.version, len(assembly.parts)) != (update.version, update.parts):
            assembly = _Assembly(update.version, update.parts)
        elif assembly.parts[update.part]:
            return False
        if repeated := added.keys() & assembly.entries.keys():
            raise PeerError(f"two parts of broker {owner}'s interest hold the same entry, {min(repeated)}")
        _check_table(owner, len(assembly.entries) + len(added), assembly.text_bytes + text_bytes)
        assembly.parts[update.part] = True
        assembly.entries.update(added)
        assembly.text_bytes += text_bytes
        if all(assembly.parts):
            self._replace(owner, assembly)
            return True
        if self._assemblies.get(owner) is not assembly:
            self._drop_assembly(owner)
            if len(self._assemblies) >= MAX_BROKERS:
                # Whoever sends beginnings without end must not keep others from being heard: the oldest
                # goes, and is asked for again when a change of it comes.
                self._drop_assembly(next(iter(self._assemblies)))
            self._assemblies[owner] = assembly
        for selector in added.values():
            if not isinstance(selector, Claim):
                self._index.hold(selector)
                assembly.indexed.append(selector)
        return True

    def _drop_assembly(self, owner: int) -> None:
        assembly = self._assemblies.pop(owner, None)
        if assembly is not None:
            for selector in assembly.indexed:
                self._index.release(selector)

    def _replace(self, owner: int, assembly: _Assembly) -> None:
        """What the table had before and has still costs next to nothing: most of it, after a lost link."""
        before = self._tables.get(owner)
        gone = {} if before is None else before.entries
        table = _Table(assembly.version)
        table.text_bytes = assembly.text_bytes
        added: dict[int, Entry] = {}
        for entry, selector in assembly.entries.items():
            if gone.get(entry, (0, None))[1] == selector and not isinstance(selector, Claim):
                table.entries[entry] = gone.pop(entry)
            else:
                added[entry] = selector
        self._tables[owner] = table
        self._versions = None
        self._fill(owner, table, added)
        self._take_out(gone)
        self._drop_assembly(owner)
        self._heard.append(self.claims_of(owner)._replace(whole=True))

    def _take_out(self, entries: Mapping[int, tuple[int, Entry]]) -> None:
        for key, entry in entries.values():
            if not isinstance(entry, Claim):
                self._index.remove(key)
                self._count_reserved(entry, -1)

    def _fill(self, owner: int, table: _Table, added: Mapping[int, Entry]) -> None:
        for entry, selector in added.items():
            if isinstance(selector, Claim):
                table.entries[entry] = (0, selector)
                table.claims[selector.name] = max(entry, table.claims.get(selector.name, 0))
                continue
            self._last_key += 1
            table.entries[entry] = (self._last_key, selector)
            self._index.add(self._last_key, selector, owner)
            selector.forget()  # it is matched, and compared with nothing
            self._count_reserved(selector, 1)

    def _drop_stale_assembly(self, owner: int) -> None:
        assembly = self._assemblies.get(owner)
        if assembly is not None and assembly.version <= self.version(owner):
            self._drop_assembly(owner)

    def forget(self, owner: int) -> None:
        """That broker is gone for good."""
        self._drop_assembly(owner)
        table = self._tables.pop(owner, None)
        if table is not None:
            self._versions = None
            self._take_out(table.entries)

    def match(self, batch: EventBatch) -> list[Group]:
        """Which rows which other brokers want; targets are their numbers."""
        return self._index.match(batch)

    # What the network says about itself

    def wants(self, topic: str) -> bool:
        """Whether anybody anywhere has a subscription to this topic, which is within RESERVED."""
        return any(pattern_matches(pattern, topic) for pattern in self._reserved)

    def _count_reserved(self, selector: Selector, by: int) -> None:
        # No pattern that begins with a wildcard matches what is reserved.
        if selector.topic.split("/", 1)[0] != RESERVED:
            return
        count = self._reserved.pop(selector.topic, 0) + by
        if count:
            self._reserved[selector.topic] = count
        self.reserved_changes += 1

    # Inspection

    def stats(self) -> dict[str, int]:
        return {
            "interest_subscriptions": len(self._keys),
            "interest_selectors": len(self._own),
            "interest_advertised": len(self._entries),
            "interest_owners": len(self._tables) + 1,
            "interest_entries_held": sum(len(table.entries) for table in self._tables.values()),
        }

    def check(self) -> None:
        """BugError unless the comments in `__init__` hold."""
        references = dict.fromkeys(self._own, 0)
        for own in self._keys.values():
            references[own.selector] += 1
        for selector, own in self._own.items():
            if own.selector != selector or own.references != references[selector] or own.references == 0:
                raise BugError(f"{own.references} references to {selector}")
            if (own.entry == 0) != (own.coverer is not None) or (
                own.entry and self._entries.get(own.entry) is not own
            ):
                raise BugError(f"{selector} must be either advertised or covered")
            if own.coverer is not None and (
                own.coverer.entry == 0 or own.coverer.covered.get(selector) is not own
            ):
                raise BugError(f"{selector} is not covered by what is advertised")
            if any(covered.coverer is not own for covered in own.covered.values()):
                raise BugError(f"{selector} covers what others cover")
        if len(self._entries) != sum(own.entry != 0 for own in self._own.values()):
            raise BugError("an entry is advertised that nobody wants")
        if self._own_text_bytes != sum(map(entry_bytes, self._own)):
            raise BugError("text bytes of the own selectors are miscounted")
        self._covering.check(self._entries.values())
        for owner, table in self._tables.items():
            if table.text_bytes != sum(entry_bytes(selector) for _, selector in table.entries.values()):
                raise BugError(f"text bytes of broker {owner}'s interest are miscounted")
        if max(len(self._tables), len(self._assemblies)) > MAX_BROKERS:
            raise BugError(f"tables of more than {MAX_BROKERS} brokers")
        if any(assembly.version <= self.version(owner) for owner, assembly in self._assemblies.items()):
            raise BugError("parts are kept of a table that is older than the one held")
        indexed = [
            key
            for table in self._tables.values()
            for key, entry in table.entries.values()
            if not isinstance(entry, Claim)
        ]
        if len(self._index) != len(indexed):
            raise BugError("the index does not hold exactly the tables")
        self._index.check()
        others = [entry for table in self._tables.values() for _, entry in table.entries.values()]
        topics = [entry.topic for entry in (*self._own, *others) if not isinstance(entry, Claim)]
        if sum(self._reserved.values()) != sum(topic.split("/", 1)[0] == RESERVED for topic in topics):
            raise BugError("interest in what the network says about itself is miscounted")


def _check_table(owner: int, entries: int, text_bytes: int) -> None:
    if entries > ENTRIES_PER_OWNER:
        raise PeerError(f"broker {owner} wants {entries} selectors held, the limit is {ENTRIES_PER_OWNER}")
    if text_bytes > TEXT_BYTES_PER_OWNER:
        raise PeerError(f"broker {owner} wants {text_bytes} bytes held, the limit is {TEXT_BYTES_PER_OWNER}")
