"""Lines over time, by ECharts.

Keys of options that begin with a colon are run as code by NiceGUI: names from the network are values in them,
never keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from nicegui import ui
from nicegui.elements.echart import EChart

from postroad.page.core.figures import Line

COLOURS: Final = ("#2f7ed8", "#d9822b", "#2b9a66", "#b5489a", "#7a6ff0", "#8a8f98")
FEW: Final = 12  # points
GREY: Final = "#8a8f98"  # legible on light and dark


class Lines:
    """`says` is what a screen reader is told of the drawing; it is told again with the last values."""

    def __init__(self, says: str, *, of_time: bool = False, height_px: int = 200) -> None:
        self._says = says
        self._shown: dict[str, list[list[float | None]]] = {}
        self._chart: EChart = ui.echart(_options(of_time), renderer="svg").style(f"height:{height_px}px")
        self._chart.classes("pr-lines")
        self._chart.props["role"] = "img"
        self._chart.props["aria-label"] = says

    def show(self, lines: Mapping[str, Line]) -> None:
        shown = {name: [[at * 1000, value] for at, value in line.points] for name, line in lines.items()}
        if shown == self._shown:
            return
        self._shown = shown
        self._chart.options["series"] = [
            {
                "type": "line",
                "name": name,
                "data": [[at, None if value is None else value * self._factor] for at, value in points],
                "showSymbol": len(points) < FEW,  # a point alone is no line
                "symbolSize": 5,
                "animation": False,
                "connectNulls": False,
                "lineStyle": {"width": 2},
            }
            for name, points in shown.items()
        ]
        last = ", ".join(
            f"{name} {points[-1][1]:.4g}"
            for name, points in shown.items()
            if points and points[-1][1] is not None
        )
        self._chart.props["aria-label"] = f"{self._says}: {last or 'no values yet'}"
        self._chart.update()

    @property
    def _factor(self) -> float:
        """Times are shown by ECharts in milliseconds."""
        return 1000.0 if self._chart.options["yAxis"]["type"] == "time" else 1.0


def _options(of_time: bool) -> dict[str, Any]:
    label = {"color": GREY, "fontSize": 11, "hideOverlap": True}
    faint = {"lineStyle": {"color": GREY, "opacity": 0.25}}
    value = {"type": "time", "scale": True} if of_time else {"type": "value", "min": 0, "splitNumber": 3}
    return {
        "color": list(COLOURS),
        "animation": False,
        "grid": {
            "left": 8,
            "right": 14,
            "top": 46 if of_time else 30,
            "bottom": 4,
            "outerBoundsMode": "same",
            "outerBoundsContain": "axisLabel",
        },
        "legend": {
            "top": 0,
            "left": 0,
            "icon": "roundRect",
            "itemWidth": 12,
            "itemHeight": 4,
            "textStyle": {"color": GREY, "fontSize": 12},
        },
        "tooltip": {"trigger": "axis", "confine": True, "renderMode": "richText"},
        "xAxis": {"type": "time", "axisLabel": label, "splitLine": {"show": False}, "axisLine": faint},
        "yAxis": {**value, "axisLabel": label, "splitLine": faint},
        "series": [],
    }
