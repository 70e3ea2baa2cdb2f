"""`postroad lab`: the papers' experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def list_experiments(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """Name the experiments."""
    import json

    from postroad.lab.experiments import EXPERIMENTS

    for experiment in EXPERIMENTS.values():
        typer.echo(
            json.dumps({"name": experiment.name, "about": experiment.about})
            if as_json
            else f"{experiment.name}  {experiment.about}"
        )


def run(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As `postroad lab list` prints it.")],
    seconds: Annotated[
        float | None, typer.Option(min=0.2, help="Of each measurement. \\[default: the experiment's own]")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw figures as PNG files there.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Run an experiment and print our figures beside the paper's."""
    import signal

    import msgspec
    from rich.console import Console
    from rich.table import Table

    from postroad.lab.experiments import experiment

    chosen = experiment(name)
    # Being told to end must unwind like an interrupt does, or brokers would stay behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Console(stderr=True).status("starting") as status:
        measured, paper = chosen.run(seconds or chosen.seconds, out, status.update)
    if as_json:
        typer.echo(msgspec.json.encode({"name": name, "measured": measured, "paper": paper}).decode())
        return
    table = Table(title=name)
    for heading in ("figure", "measured", "paper"):
        table.add_column(heading, justify="left" if heading == "figure" else "right")
    for figure, value in measured.items():
        table.add_row(figure, f"{value:,.4g}", f"{paper[figure]:,.4g}" if figure in paper else "")
    console = Console()
    console.print(table)
    for note in chosen.notes:
        console.print(note, markup=False, highlight=False)


def register(app: typer.Typer) -> None:
    lab = typer.Typer(help="The papers' experiments.", no_args_is_help=True)
    lab.command("list")(list_experiments)
    lab.command("run")(run)
    app.add_typer(lab, name="lab")
