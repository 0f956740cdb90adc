"""Foreword next to other servers and libraries: the same prompts, interleaved in one run.

    python -m benchmarks.peers --systems foreword openvino --cases decode-chat prefill-512 --streams 1 16

Each system runs in a process of its own and is idle while another one works; in a round every system does the same job
after the other, and the one that begins changes from round to round. Work is equal: the same GGUF file and prompts,
given as token ids; greedy; exactly the same number of output tokens, whether or not an end token comes; two threads;
room for the same number of tokens in the KV cache; no prefix cache. Prints one JSON line per case, number of streams
and system, the median of the rounds, and appends every round to `results.jsonl` in the output folder, from whose lines,
those of earlier runs too, it writes `README.md` and `peers.svg` there.

    tokens_per_s       output tokens / time from the first request to the last token; prefill: prompt tokens / TTFT
    ttft_ms_p50, _p99  from when a request is due to its first token
    mb                 memory-engine: resident memory of the largest process of a system; memory-total: of all, where
                       pages that two of them share count twice
    others_cpu         (results.jsonl only) part of the processors that went to anything but the system; the table
                       leaves out rounds of a case and system in which it is above 5 %
    s                  start: from the start of the process until it serves, with warm file caches
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.peers.adapters.worker import Job, Refused, Settings
from benchmarks.peers.environments import SetupFailed, bfloat16_model, python_of
from benchmarks.peers.report import MOST_OTHERS_CPU, Cell, Row, figures, measure, median, page, summary, undisturbed
from benchmarks.peers.systems import SYSTEMS, RunningSystem, SystemFailed
from benchmarks.peers.workload import CASES, STREAMS, job, read_prompts
from foreword.gpu.checkpoint.default_model import default_model_path

KV_TOKENS = 16384
SETTLE_S = 0.3
"""Between systems: threads of the last one stop spinning."""
PATIENCE_S = 20.0
"""How long a job waits for others to leave the processors."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foreword" / "peers"
    parser = argparse.ArgumentParser(
        prog="benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), metavar="NAME")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument(
        "--streams", nargs="+", type=int, choices=STREAMS, default=list(STREAMS), help="decode cases only"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--environments", type=Path, default=cache, help=f"folder of the peers' environments ({cache})")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/peers"))
    parser.add_argument("--setup-only", action="store_true", help="make the environments and end")
    return parser.parse_args(arguments)


def start(name: str, options: argparse.Namespace, stack: contextlib.ExitStack) -> RunningSystem | None:
    """Start a system, or say why it is skipped."""
    definition = SYSTEMS[name]
    model = default_model_path()
    try:
        python = python_of(definition.adapter, options.environments)
        converted = bfloat16_model(model, options.environments) if definition.needs_bfloat16 else ""
        settings = Settings(str(model), str(converted), options.threads, KV_TOKENS, definition.speculates)
        system = RunningSystem(name, python, settings, options.environments / f"{name}.log")
    except (SetupFailed, SystemFailed) as error:
        print(f"peers: skipped: {error}", file=sys.stderr)
        return None
    stack.callback(system.stop)
    print(f"peers: {name} serves, {system.ready.version}", file=sys.stderr)
    return system


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """The lines of the table."""
    for case in options.cases:
        for streams in options.streams if case.startswith("decode") else (1,):
            yield Cell(case, streams)


def turns(names: list[str], round_index: int) -> list[str]:
    """The order of a round."""
    first = round_index % len(names)
    return names[first:] + names[:first]


def run(systems: dict[str, RunningSystem], options: argparse.Namespace) -> Iterator[Row]:
    """Run all cases; yields rows as they come."""
    prompts = read_prompts(default_model_path())
    for system in systems.values():
        for warm_up in (job("decode-chat", 4, prompts, 0), job("prefill-512", 1, prompts, 0)):
            warm_up.num_tokens = min(warm_up.num_tokens, 16)
            with contextlib.suppress(Refused):
                system.run(warm_up)
    for cell in cells(options):
        refused: set[str] = set()
        for round_index in range(options.rounds):
            work = job(*cell, prompts, round_index)
            for name in turns(list(systems), round_index):
                if name in refused:
                    continue
                try:
                    yield {"round": round_index, **cell._asdict(), "system": name, **once(systems[name], cell, work)}
                except Refused as error:
                    refused.add(name)
                    print(f"peers: {name} skips {cell.case} at {cell.streams}: {error}", file=sys.stderr)


def once(system: RunningSystem, cell: Cell, work: Job) -> dict[str, float]:
    """One system's figures of one round."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        before = system.cpu_times()
        time.sleep(SETTLE_S)
        begin = system.cpu_times()
        if begin.others_since(before) <= MOST_OTHERS_CPU or begin.clock > deadline:
            break
    answers = system.run(work)
    others = system.cpu_times().others_since(begin)
    return {**summary(cell.case, map(len, work.prompts), answers), "others_cpu": others}


def costs(name: str, system: RunningSystem) -> Iterator[Row]:
    """Rows of what a system costs besides time."""
    memory = system.memory_mb()
    for case, figure in (
        ("memory-engine", {"mb": round(max(memory), 1)}),
        ("memory-total", {"mb": round(sum(memory), 1)}),
        (
            "start",
            {
                "s": round(system.ready.start_s, 2),
                "version": system.ready.version,
                "others_cpu": system.others_cpu_at_start,
            },
        ),
    ):
        yield {"round": 0, "case": case, "streams": 1, "system": name, **figure}


def print_medians(rows: list[Row], cell: Cell, names: list[str]) -> None:
    """One JSON line per system that has figures."""
    for name in names:
        keys = (
            ("tokens_per_s", "ttft_ms_p50", "ttft_ms_p99")
            if measure(cell.case) not in ("mb", "s")
            else (measure(cell.case),)
        )
        values = {key: value for key in keys if (value := median(rows, cell, name, key)) is not None}
        if values:
            print(json.dumps({**cell._asdict(), "system": name, **values}), flush=True)


def main() -> None:
    """Run, print, and write the table."""
    options = parse()
    if options.setup_only:
        for adapter in dict.fromkeys(SYSTEMS[name].adapter for name in options.systems):
            try:
                python_of(adapter, options.environments)
            except SetupFailed as error:
                print(f"peers: skipped: {error}", file=sys.stderr)
        return
    options.environments.mkdir(parents=True, exist_ok=True)
    options.output.mkdir(parents=True, exist_ok=True)
    results = options.output / "results.jsonl"
    run_id = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
    rows: list[Row] = []
    with contextlib.ExitStack() as stack, results.open("a", encoding="utf-8") as file:
        systems = {name: system for name in options.systems if (system := start(name, options, stack)) is not None}

        def keep(row: Row) -> None:
            rows.append({"run": run_id, **row})
            print(json.dumps(rows[-1]), file=file, flush=True)

        last = None
        for row in run(systems, options):
            cell = Cell(row["case"], row["streams"])
            if last not in (None, cell):
                print_medians(rows, last, options.systems)
            last = cell
            keep(row)
        if last is not None:
            print_medians(rows, last, options.systems)
        for name, system in systems.items():
            for row in costs(name, system):
                keep(row)
        for case in ("memory-engine", "memory-total", "start"):
            print_medians(rows, Cell(case, 1), options.systems)
    write(results, options)


def write(results: Path, options: argparse.Namespace) -> None:
    """Write the table and the plot of all runs in a results file."""
    rows = undisturbed([json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()])
    (options.output / "README.md").write_text(page(rows), encoding="utf-8")
    try:
        python = python_of("plot", options.environments)
    except SetupFailed as error:
        print(f"peers: no plot: {error}", file=sys.stderr)
        return
    command = [python, Path(__file__).with_name("plot.py"), options.output / "peers.svg"]
    subprocess.run(command, input=json.dumps(figures(rows)), text=True, check=True)


if __name__ == "__main__":
    main()
