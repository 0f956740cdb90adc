"""From rows of rounds to medians, ratios, and a table in Markdown.

A row is what one system did in one round: `run`, `round`, `case`, `streams`, `system` and measures. The machine's speed
drifts, so a ratio compares rows of the same round; its median over the rounds of all runs stands in the table.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from benchmarks.peers.adapters.worker import Answer
from benchmarks.peers.systems import SYSTEMS

Row: TypeAlias = dict[str, Any]


class Cell(NamedTuple):
    """What a line of the table is about."""

    case: str
    streams: int


class Target(NamedTuple):
    """A bound on the ratio of a system of ours to the best peer.

    Attributes:
        system: ours.
        bound: least ratio where more is better, else the greatest.
    """

    system: str
    bound: float


TARGETS: dict[Cell, tuple[Target, ...]] = {
    Cell("decode-chat", 1): (Target("foreword-off", 1.2), Target("foreword", 1.5)),
    Cell("decode-copy", 1): (Target("foreword", 2.5),),
    Cell("decode-edit", 1): (Target("foreword", 2.5),),
    **{
        Cell(f"decode-{kind}", streams): (Target("foreword", bound),)
        for kind in ("chat", "copy")
        for streams, bound in ((4, 1.7), (16, 1.6), (32, 1.6))
    },
    Cell("prefill-512", 1): (Target("foreword-off", 1.3),),
    Cell("prefill-1024", 1): (Target("foreword-off", 1.3),),
    Cell("ttft-idle", 1): (Target("foreword", 1.0),),
    Cell("memory-engine", 1): (Target("foreword", 1.2),),
}


def measure(case: str) -> str:
    """Name of the figure that a case is about."""
    return {"decode": "tokens_per_s", "prefill": "tokens_per_s", "ttft": "ttft_ms_p50", "memory": "mb"}.get(
        case.partition("-")[0], "s"
    )


def more_is_better(case: str) -> bool:
    """Whether a system with a greater figure is the better one."""
    return measure(case) == "tokens_per_s"


def summary(case: str, prompt_lengths: Iterable[int], answers: list[Answer]) -> dict[str, float]:
    """Figures of a round."""
    waits = sorted((answer.first - answer.start) * 1e3 for answer in answers)
    if case.startswith("prefill"):
        rate = sum(prompt_lengths) / (sum(waits) / 1e3)
    else:
        begin = min(answer.start for answer in answers)
        rate = sum(answer.num_tokens for answer in answers) / (max(answer.last for answer in answers) - begin)
    return {
        "tokens_per_s": round(rate, 1),
        "ttft_ms_p50": round(statistics.median(waits), 1),
        "ttft_ms_p99": round(waits[min(len(waits) - 1, int(len(waits) * 0.99))], 1),
    }


def median(rows: Iterable[Row], cell: Cell, system: str, figure: str | None = None) -> float | None:
    """Median of a figure over rounds, or None where there is none."""
    figure = figure or measure(cell.case)
    values = [row[figure] for row in rows if (row["case"], row["streams"], row["system"]) == (*cell, system)]
    return round(statistics.median(values), 2) if values else None


def ratio(rows: Iterable[Row], cell: Cell, system: str, peer: str) -> float | None:
    """Median over the rounds that both were in of `system`'s figure divided by `peer`'s."""
    rounds: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        if Cell(row["case"], row["streams"]) == cell:
            rounds.setdefault((row["run"], row["round"]), {})[row["system"]] = row[measure(cell.case)]
    ratios = [values[system] / values[peer] for values in rounds.values() if system in values and peer in values]
    return statistics.median(ratios) if ratios else None


def best_peer(rows: list[Row], cell: Cell, system: str) -> tuple[str, float] | None:
    """The peer that `system` does worst against, and the ratio to it.

    Without speculation ours is compared with peers without.
    """
    ratios = [
        (found, name)
        for name, peer in SYSTEMS.items()
        if peer.is_peer and (SYSTEMS[system].speculates or not peer.speculates)
        if (found := ratio(rows, cell, system, name)) is not None
    ]
    if not ratios:
        return None
    value, name = min(ratios) if more_is_better(cell.case) else max(ratios)
    return name, value


def table(rows: list[Row]) -> str:
    """A line per case, a column per system, then what ours is to the best peer."""
    systems = [name for name in SYSTEMS if any(row["system"] == name for row in rows)]
    ours = [name for name in systems if not SYSTEMS[name].is_peer]
    cells = list(dict.fromkeys(Cell(row["case"], row["streams"]) for row in rows))
    header = ["case", "streams", "unit", *systems, *(f"{name} / best peer" for name in ours), "target"]
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    for cell in sorted(cells, key=order):
        figures = [format_figure(median(rows, cell, name)) for name in systems]
        unit = measure(cell.case).replace("tokens_per_s", "tokens/s").replace("ttft_ms_p50", "ms, p50")
        line = [cell.case, str(cell.streams), unit, *figures]
        line += [format_ratio(best_peer(rows, cell, name)) for name in ours]
        lines.append(f"| {' | '.join([*line, format_targets(rows, cell)])} |")
        if cell.case.startswith("ttft"):
            tails = [format_figure(median(rows, cell, name, "ttft_ms_p99")) for name in systems]
            lines.append(
                f"| {' | '.join([cell.case, str(cell.streams), 'ms, p99', *tails, *[''] * (len(ours) + 1)])} |"
            )
    return "\n".join(lines) + "\n"


def order(cell: Cell) -> tuple[int, str, int, int]:
    """Where a line stands in the table: families in the order of the issue, lengths as numbers."""
    family, _, kind = cell.case.partition("-")
    families = ("decode", "prefill", "ttft", "memory", "start")
    return families.index(family), "" if kind.isdigit() else kind, int(kind) if kind.isdigit() else 0, cell.streams


def format_figure(value: float | None) -> str:
    """Three digits or more."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def format_ratio(found: tuple[str, float] | None) -> str:
    """The ratio and whom it is to."""
    return "" if found is None else f"{found[1]:.2f} ({found[0]})"


def format_targets(rows: list[Row], cell: Cell) -> str:
    """Bounds, each with whether it is met."""
    words = []
    for target in TARGETS.get(cell, ()):
        found = best_peer(rows, cell, target.system)
        if found is None:
            continue
        met = found[1] >= target.bound if more_is_better(cell.case) else found[1] <= target.bound
        sign = ">=" if more_is_better(cell.case) else "<="
        words.append(f"{target.system} {sign} {target.bound}: {'met' if met else 'missed'}")
    return "; ".join(words)


PANELS = {
    "decode-chat": "chat prompts, by streams",
    "decode-copy": "copy prompts, by streams",
    "prefill": "prefill, by prompt tokens",
    "ttft": "time to first token",
}


def figures(rows: list[Row]) -> dict[str, Any]:
    """What the plot shows: medians, a panel for each kind of case."""
    systems = [name for name in SYSTEMS if any(row["system"] == name for row in rows)]
    found = sorted({Cell(row["case"], row["streams"]) for row in rows}, key=order)
    panels = []
    for prefix, title in PANELS.items():
        groups = [cell for cell in found if cell.case.startswith(prefix)]
        if groups:
            panels.append(
                {
                    "title": title,
                    "unit": "tokens/s" if more_is_better(groups[0].case) else "ms",
                    "groups": [
                        str(cell.streams) if prefix in ("decode-chat", "decode-copy") else cell.case.partition("-")[2]
                        for cell in groups
                    ],
                    "values": [[median(rows, cell, name) for cell in groups] for name in systems],
                }
            )
    return {"systems": systems, "panels": panels}


PAGE = """# Foreword next to other systems

Written by `make bench-peers` from the rounds in `results.jsonl`; what each figure means and what is equal between the
systems stands in `python -m benchmarks.peers --help`. Medians; a ratio is the median of ratios within rounds, and a run
is compared with nothing but itself.

![medians](peers.svg)

"""


def page(rows: list[Row]) -> str:
    """The table with what introduces it."""
    return PAGE + table(rows)
