"""A trace for people: a tree for the terminal, a graph for Graphviz."""

from __future__ import annotations

from postroad.tracking.query.verdict import Delivered, TraceResult

_DOUBTFUL = 0.5


def doubt_text(doubt: float) -> str:
    if doubt == 0:
        return "certain"
    if doubt >= 1:
        return "doubtful: nobody confirms it"
    return f"doubt {doubt:.0e}" if doubt < 0.001 else f"doubt {doubt:.3f}"


def tree(result: TraceResult) -> str:
    """The path as an indented tree."""
    lines = [f"message {result.id}"]
    origin = f"published by {result.publisher:08x} at {result.origin}"
    if result.origin_doubt is None:
        lines.append(f"{origin}, not confirmed")
    else:
        lines.append(f"{origin} ({doubt_text(result.origin_doubt)})")
    branches = _Branches(result)
    lines += branches.lines(result.origin)
    for step in result.route[1:]:
        if step.source is None:
            lines.append(f"and again at {step.broker} ({doubt_text(step.doubt)})")
            lines += branches.lines(step.broker)
    further = {at for at, step in enumerate(result.route) if step.source is not None}
    loose = sorted(further - branches.listed)
    while loose:
        step = result.route[loose[0]]
        branches.listed.add(loose[0])
        lines.append(f"{step.broker}, from {step.source} ({doubt_text(step.doubt)})")
        lines += branches.lines(step.broker)
        loose = [at for at in loose if at not in branches.listed]
    lines += branches.elsewhere()
    lines += [f"lost from {hop.source} to {hop.target} ({doubt_text(hop.doubt)})" for hop in result.lost]
    return "\n".join([*lines, *_verdict(result)])


def _as_repair(receiver: Delivered) -> str:
    return ", as a repair" if receiver.repair else ""


def _verdict(result: TraceResult) -> list[str]:
    """A line, unless nothing is missing."""
    return [f"{result.verdict}: {result.explanation}"] if result.explanation else []


class _Branches:
    """What is told below a broker that the message reached: its receivers, then where it went."""

    def __init__(self, result: TraceResult) -> None:
        self._route = result.route
        self.listed: set[int] = set()  # steps
        self._receivers: dict[str, list[str]] = {}  # by broker that is not told yet
        for receiver in result.receivers:
            self._receivers.setdefault(receiver.broker, []).append(
                f"→ {receiver.subscriber}{_as_repair(receiver)} ({doubt_text(receiver.doubt)})"
            )
        self._below: dict[str, list[int]] = {}  # by broker: steps that have it from there
        for at, step in enumerate(result.route):
            if step.source is not None:
                self._below.setdefault(step.source, []).append(at)

    def lines(self, broker: str) -> list[str]:
        lines: list[str] = []
        # The latest at the end: its text, what stands before all below it, and the broker that it leads to.
        waiting = self._entries(broker, "")
        while waiting:
            text, indent, leads = waiting.pop()
            lines.append(text)
            if leads is not None:
                waiting += self._entries(leads, indent)
        return lines

    def elsewhere(self) -> list[str]:
        """Receivers of repairs at brokers that the event did not come to."""
        return [f"at {broker} {text}" for broker, texts in self._receivers.items() for text in texts]

    def _entries(self, broker: str, indent: str) -> list[tuple[str, str, str | None]]:
        """In reverse order."""
        entries: list[tuple[str, str | None]] = [(text, None) for text in self._receivers.pop(broker, ())]
        for at in self._below.get(broker, ()):
            if at not in self.listed:
                self.listed.add(at)
                step = self._route[at]
                entries.append((f"{step.broker} ({doubt_text(step.doubt)})", step.broker))
        made = [(f"{indent}├─ {text}", f"{indent}│  ", leads) for text, leads in entries[:-1]]
        made += [(f"{indent}└─ {text}", f"{indent}   ", leads) for text, leads in entries[-1:]]
        return made[::-1]


def dot(result: TraceResult) -> str:
    """The path as a DOT graph; what is doubtful is dashed, as is who passed it on and does not know of it."""
    label = _quoted(result.id, *_verdict(result))
    lines = ["digraph trace {", "  rankdir=LR;", f"  label={label};"]
    publisher = _quoted(f"publisher {result.publisher:08x}")
    lines.append(f"  {publisher} [shape=cds];")
    brokers = dict.fromkeys([result.origin, *(step.broker for step in result.route)])
    lines += [f"  {_quoted(broker)} [shape=box];" for broker in brokers]
    silent = dict.fromkeys(step.source for step in result.route if step.source and step.source not in brokers)
    lines += [f"  {_quoted(broker)} [shape=box, style=dashed];" for broker in silent]
    confirmed = 1.0 if result.origin_doubt is None else result.origin_doubt
    lines.append(_edge(publisher, _quoted(result.origin), confirmed))
    for step in result.route:
        if step.source is not None:
            lines.append(_edge(_quoted(step.source), _quoted(step.broker), step.doubt))
        elif step.broker != result.origin:
            lines.append(_edge(publisher, _quoted(step.broker), step.doubt))
    for receiver in result.receivers:
        name = _quoted(f"subscriber {receiver.subscriber}{_as_repair(receiver)}")
        lines.append(f"  {name} [shape=ellipse];")
        lines.append(_edge(_quoted(receiver.broker), name, receiver.doubt))
    lines.append("}")
    return "\n".join(lines)


def _edge(start: str, end: str, doubt: float) -> str:
    style = ", style=dashed" if doubt >= _DOUBTFUL else ""
    return f'  {start} -> {end} [label="{doubt:.1e}"{style}];'


def _quoted(*lines: str) -> str:
    escaped = (line.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") for line in lines)
    return '"' + "\\n".join(escaped) + '"'
