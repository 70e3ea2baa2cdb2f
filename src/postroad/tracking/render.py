"""A trace for people: a tree for the terminal, a graph for Graphviz."""

from __future__ import annotations

from postroad.tracking.verdict import RouteStep, TraceResult

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
    listed: set[int] = set()  # steps
    told: set[str] = set()  # brokers whose receivers are
    lines += _branches(result, result.origin, "", listed, told)
    for step in result.route[1:]:
        if step.source is None:
            lines.append(f"and again at {step.broker} ({doubt_text(step.doubt)})")
            lines += _branches(result, step.broker, "", listed, told)
    loose = [at for at, step in enumerate(result.route) if step.source is not None and at not in listed]
    while loose:
        step = result.route[loose[0]]
        listed.add(loose[0])
        lines.append(f"{step.broker}, from {step.source} ({doubt_text(step.doubt)})")
        lines += _branches(result, step.broker, "", listed, told)
        loose = [at for at in loose if at not in listed]
    return "\n".join([*lines, *_verdict(result)])


def _verdict(result: TraceResult) -> list[str]:
    """A line, unless nothing is missing."""
    return [f"{result.verdict}: {result.explanation}"] if result.explanation else []


def _branches(result: TraceResult, broker: str, indent: str, listed: set[int], told: set[str]) -> list[str]:
    """What happened at a broker that the message reached: its receivers, then where it went."""
    entries: list[tuple[str, RouteStep | None]] = [
        (f"→ {one.subscriber} ({doubt_text(one.doubt)})", None)
        for one in result.receivers
        if one.broker == broker and broker not in told
    ]
    told.add(broker)
    for at, step in enumerate(result.route):
        if step.source == broker and at not in listed:
            listed.add(at)
            entries.append((f"{step.broker} ({doubt_text(step.doubt)})", step))
    lines: list[str] = []
    for number, (text, child) in enumerate(entries):
        last = number == len(entries) - 1
        lines.append(f"{indent}{'└─ ' if last else '├─ '}{text}")
        if child is not None:
            lines += _branches(result, child.broker, indent + ("   " if last else "│  "), listed, told)
    return lines


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
    for one in result.receivers:
        name = _quoted(f"subscriber {one.subscriber}")
        lines.append(f"  {name} [shape=ellipse];")
        lines.append(_edge(_quoted(one.broker), name, one.doubt))
    lines.append("}")
    return "\n".join(lines)


def _edge(start: str, end: str, doubt: float) -> str:
    style = ", style=dashed" if doubt >= _DOUBTFUL else ""
    return f'  {start} -> {end} [label="{doubt:.1e}"{style}];'


def _quoted(*lines: str) -> str:
    escaped = (line.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") for line in lines)
    return '"' + "\\n".join(escaped) + '"'
