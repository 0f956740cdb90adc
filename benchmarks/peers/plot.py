"""Draws the table's figures; runs in an environment with matplotlib, lines of the figures on standard input.

Usage: `plot.py FILE`, where FILE ends in .svg. Standard input is a JSON object: the systems' names, and for
each panel its title, its unit, the labels of its groups and a figure, or null, for each system and group.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def draw(figures: dict[str, Any], path: str) -> None:
    """Draw one group of bars for each case, side by side in one panel for each kind of case."""
    systems, panels = figures["systems"], figures["panels"]
    colours = pyplot.get_cmap("tab10").colors
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4.2 * len(panels), 4.2), squeeze=False, layout="constrained"
    )
    for axis, panel in zip(axes[0], panels, strict=True):
        width = 0.8 / len(systems)
        for index, (system, values) in enumerate(zip(systems, panel["values"], strict=True)):
            places = [group - 0.4 + (index + 0.5) * width for group in range(len(panel["groups"]))]
            heights = [value or 0.0 for value in values]
            axis.bar(places, heights, width, label=system, color=colours[index % len(colours)])
        axis.set_title(panel["title"])
        axis.set_ylabel(panel["unit"])
        axis.set_xticks(range(len(panel["groups"])), panel["groups"])
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(systems), frameon=False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    matplotlib.rcParams["svg.hashsalt"] = "peers"  # the same figures make the same file
    draw(json.load(sys.stdin), sys.argv[1])
