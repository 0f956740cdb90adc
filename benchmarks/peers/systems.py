"""The systems that are compared, each with its own speculation and without any."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.peers.adapters.worker import Answer, Job, Ready, Refused, Settings
from benchmarks.server_process import descendants

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class System:
    """One column of the table.

    Attributes:
        adapter: module in `adapters`, and the environment it runs in.
        speculates: with its own speculation as it comes, or without any.
        is_peer: not ours.
    """

    adapter: str
    speculates: bool
    is_peer: bool = True

    @property
    def needs_bfloat16(self) -> bool:
        """Whether it cannot compute with the GGUF file's format."""
        return self.adapter in ("vllm", "transformers")


SYSTEMS: Mapping[str, System] = {
    "foreword": System("foreword", True, is_peer=False),
    "foreword-off": System("foreword", False, is_peer=False),
    "openvino": System("openvino", False),
    "openvino-lookup": System("openvino", True),
    "llama.cpp": System("llama_cpp", False),
    "llama.cpp-lookup": System("llama_cpp", True),
    "vllm": System("vllm", False),
    "vllm-lookup": System("vllm", True),
    "transformers": System("transformers", False),
    "transformers-lookup": System("transformers", True),
}


class SystemFailed(Exception):
    """A system does not start, or ended; the message says where its log is."""


class RunningSystem:
    """A system in a child process.

    Attributes:
        ready: what it said when it served.
    """

    def __init__(self, name: str, python: Path, settings: Settings, log: Path) -> None:
        """Start it and wait until it serves.

        Raises:
            SystemFailed: it did not start.
        """
        self._name = name
        self._log = log
        command = [
            str(python),
            "-m",
            f"benchmarks.peers.adapters.{SYSTEMS[name].adapter}",
            json.dumps(asdict(settings)),
        ]
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.ready = Ready(**json.loads(self._line()))

    def run(self, job: Job) -> list[Answer]:
        """Do a job.

        Raises:
            Refused: the system cannot do it.
            SystemFailed: it ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()
        reply = json.loads(self._line())
        if isinstance(reply, dict):
            raise Refused(reply["refused"])
        return [Answer(**answer) for answer in reply]

    def memory_mb(self) -> list[float]:
        """Memory of each of its processes; pages that several share are divided among them (proportional set size)."""
        return [pss_mb(pid) for root in self.ready.pids for pid in descendants(root)]

    def stop(self) -> None:
        """End it."""
        with ExitStack() as stack:
            stack.callback(self._process.wait, 60)
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stack.callback(stream.close)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemFailed(f"{self._name} ended with status {self._process.wait()}; its log is {self._log}")
        return line


def pss_mb(pid: int) -> float:
    """Proportional set size of a process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / 1e6
