"""Checks the CUDA device on a machine with an NVIDIA GPU, within four minutes: what it computes, and how fast.

Prints each line when it is known and a table of all of them at the end; the exit status is 1 if a check failed. Each
section runs in a process of its own within its share of the time: one that fails or is ended is a line of the table,
and the others go on. A speed below its target is said in the table and fails nothing. Nothing is fetched from a
network. `--dry` runs the same script without a GPU: kernels on the checker (tests/simt), small sizes, one stream on the
CPU device; its times mean nothing, and no time is kept.

    accuracy    relative error of each kernel against the float64 oracle
    tokens      greedy tokens of the default model in float32 equal to the CPU device's; two devices sum in different
                orders, so a sequence may part where the CPU's two best logits are closer than NEAR_TIE
    graph       a recorded step gives the tokens of a step that is not, and so does one begun before the last is read
    rows        products of the model's layers are the same bits for every number of rows
    sanitizer   compute-sanitizer finds nothing in the accuracy checks
    ceilings    copy bandwidth and bfloat16 product rate of this machine, measured
    speeds      attention against the ceilings, sampling with acceptance of 8 drafts, cost of a launch
    serving     output tokens per second through gRPC
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from device_workload import AttentionWorkload, StepWriter, sampling_batch

from foreword.gpu.backends.cuda_backend import CudaBackend
from foreword.gpu.backends.numpy_backend import NumpyBackend
from foreword.gpu.checkpoint.default_model import default_model_path
from foreword.gpu.checkpoint.open import open_checkpoint
from foreword.gpu.config import DeviceConfig
from foreword.gpu.device import find_device
from foreword.gpu.models.decoder import Decoder
from foreword.gpu.models.registry import family
from foreword.gpu.runner import ModelRunner, load_runner
from foreword.scheduler.errors import ConfigError
from foreword.scheduler.request import Request, SamplingParams, StoppingParams

ERROR_LIMIT = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
NEAR_TIE = 1e-3
BF16_BYTES = 2
SANITIZER_TIMEOUT_S = 35
SERVING_TIMEOUT_S = 65
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Line:
    """One result. `passed` is None for a figure without a bar, or one whose bar fails nothing."""

    name: str
    value: str
    target: str = ""
    passed: bool | None = None


class Machine:
    """The GPU, or the checker in its place."""

    def __init__(self, is_dry: bool) -> None:
        self.is_dry = is_dry
        self.device = "cpu" if is_dry else "cuda:0"

    def backend(self, dtype: str) -> CudaBackend:
        """A device of its own."""
        if self.is_dry:
            sys.path.insert(0, str(ROOT / "tests"))
            from simt.driver import CheckerDriver

            return CudaBackend(dtype, CheckerDriver(), device="cpu")
        from foreword.gpu.device import open_cuda_backend

        return open_cuda_backend(dtype)

    def seconds(self, work: Callable[[], Any], repeats: int = 20) -> float:
        """Device time of one call: the median of five batches of calls."""
        if self.is_dry:
            start = time.perf_counter()
            work()
            return time.perf_counter() - start
        for _ in range(3):
            work()
        times = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(repeats):
                work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3 / repeats)
        return statistics.median(times)

    def size(self, whole: int, small: int) -> int:
        """A size on the GPU, or a small one on the checker."""
        return small if self.is_dry else whole


def relative_error(actual: torch.Tensor, expected: np.ndarray) -> float:
    """Of the whole array, by its norm; infinite if anything is not finite."""
    got = actual.double().cpu().numpy()
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected)) if np.isfinite(got).all() else np.inf


def accuracy(machine: Machine) -> Iterator[Line]:
    """Every kernel against the oracle."""
    oracle, rng = NumpyBackend(), np.random.default_rng(0)
    for dtype, limit in ERROR_LIMIT.items():
        cuda = machine.backend(dtype)

        def rounded(*shape: int, cuda: CudaBackend = cuda) -> tuple[torch.Tensor, np.ndarray]:
            tensor = cuda.embedding_weight(rng.standard_normal(shape, np.float32))
            return tensor, tensor.float().cpu().numpy()

        width = machine.size(4096, 96)
        stream, (delta, delta_host) = rng.standard_normal((33, width), np.float32), rounded(33, width)
        weight = rng.standard_normal(width).astype(np.float32)
        expected = oracle.rms_norm(stream.copy(), weight, 1e-5, delta_host)
        actual = cuda.rms_norm(cuda.weight(stream), cuda.weight(weight), 1e-5, delta)
        errors = {"rms_norm": relative_error(actual, expected)}
        gate_up, gate_up_host = rounded(33, 2 * width)
        errors["silu_and_mul"] = relative_error(cuda.silu_and_mul(gate_up), oracle.silu_and_mul(gate_up_host))
        for head_dim, group in ((64, 3), (128, 8)):
            workload = AttentionWorkload(2, group, head_dim, machine.size(700, 270))
            errors[f"attention {head_dim}x{group}"] = relative_error(workload.run(cuda), workload.run(oracle))
        for name, error in errors.items():
            yield Line(f"{name} {dtype}", f"{error:.1e}", f"<= {limit:.0e}", error <= limit)
        yield sampled_tokens(machine, cuda, dtype)


def sampled_tokens(machine: Machine, cuda: CudaBackend, dtype: str) -> Line:
    """Draws that differ from the oracle's, over rows with different parameters."""
    rows, vocab = machine.size(256, 6), machine.size(32000, 300)
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 3
    on_device = cuda.embedding_weight(logits.numpy())
    params = sampling_batch(rows, top_k=50, top_p=0.95, min_p=0.02)
    drawn = cuda.sample(on_device, params).token_ids
    expected = NumpyBackend().sample(on_device.float().cpu().numpy(), params).token_ids
    same = int((drawn == expected).sum())
    return Line(f"tokens drawn like the oracle {dtype}", f"{same} of {rows}", f">= {rows - 1}", same >= rows - 1)


def greedy(runner: ModelRunner, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """Greedy tokens behind a prompt, and at each the distance of the two best log probabilities."""
    writer = StepWriter(runner.config.num_blocks)
    stopping, sampling = StoppingParams(num_tokens), SamplingParams(temperature=0.0)
    request = Request(0, np.array(prompt, np.int32), stopping, sampling, num_top_logprobs=2)
    tokens: list[int] = []
    gaps: list[float] = []
    plan = writer.plan(prompt, [(0, request)])
    for _ in range(num_tokens):
        result = runner.execute(plan)
        tokens.append(int(result.token_ids[0]))
        assert result.scores is not None
        best, second = result.scores.top_logprobs[:2]
        gaps.append(float(best - second))
        plan = writer.plan(tokens[-1:])
    return tokens, gaps


def greedy_ahead(runner: ModelRunner, prompt: list[int], num_tokens: int) -> list[int]:
    """The same tokens, each step begun before the last result is read, with sampling as part of the recording."""
    writer = StepWriter(runner.config.num_blocks)
    request = Request(0, np.array(prompt, np.int32), StoppingParams(num_tokens), SamplingParams(temperature=0.0))
    under_way = [runner.launch(writer.plan(prompt, [(0, request)]))]
    tokens: list[int] = []
    for step in range(num_tokens):
        if step + 1 < num_tokens:
            under_way.append(runner.launch(writer.plan([-1])))
        tokens += under_way.pop(0)().token_ids.tolist()
    return tokens


def model_tokens(machine: Machine) -> Iterator[Line]:
    """The default model on the CPU device and on this one; its products' independence of the number of rows."""
    checkpoint = open_checkpoint(default_model_path())
    config = DeviceConfig(num_blocks=32, dtype="float32", max_num_sequences=1, max_model_len=512)
    prompt = np.random.default_rng(2).integers(100, 40000, machine.size(40, 3)).tolist()
    num_tokens = machine.size(64, 2)
    expected, gaps = greedy(load_runner(config, checkpoint), prompt, num_tokens)

    model = family(checkpoint)
    model_config = model.read_config(checkpoint)
    cuda = machine.backend("float32")
    weights = model.load_weights(checkpoint, model_config, cuda, lambda loaded, total: None)
    runner = ModelRunner(config, Decoder(model_config, weights, cuda, config.max_model_len))
    recorded, _ = greedy(runner, prompt, num_tokens)
    same = next((i for i in range(num_tokens) if recorded[i] != expected[i]), num_tokens)
    is_tie = same < num_tokens and gaps[same] < NEAR_TIE
    value = f"{same} of {num_tokens}" + (f", then a tie of {gaps[same]:.0e}" if is_tie else "")
    yield Line("tokens equal to the CPU's", value, "all, or up to a tie", same == num_tokens or is_tie)

    is_same = greedy_ahead(runner, prompt, num_tokens) == recorded
    yield Line("steps begun ahead equal to others", "yes" if is_same else "no", "yes", is_same)
    cuda.compute = lambda model, batch: model(batch)  # type: ignore[method-assign]
    plain, _ = greedy(runner, prompt, num_tokens)
    yield Line("recorded steps equal to others", "yes" if plain == recorded else "no", "yes", plain == recorded)
    bf16 = machine.backend("bfloat16")
    layers = list(model_config.linear_layers)[: machine.size(99, 2)]
    independent = bf16.is_row_independent(layers, machine.size(512, 40))
    yield Line("products independent of rows", "yes" if independent else "no", "yes", independent)


def sanitizer(machine: Machine) -> Iterator[Line]:
    """The accuracy checks once more, small, under compute-sanitizer."""
    tool = shutil.which("compute-sanitizer")
    if machine.is_dry or tool is None:
        yield Line("compute-sanitizer", "not here")
        return
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, __file__, "--only", "accuracy"]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SANITIZER_TIMEOUT_S)
        yield Line("compute-sanitizer", f"status {done.returncode}", "status 0", done.returncode == 0)
    except subprocess.TimeoutExpired:
        yield Line("compute-sanitizer", f"not done within {SANITIZER_TIMEOUT_S} s")


def ceilings(machine: Machine) -> tuple[float, float]:
    """Bytes per second of a copy, read and written, and operations per second of a bfloat16 product."""
    source = torch.empty(machine.size(1 << 30, 1 << 16), dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    side = machine.size(8192, 64)
    matrix = torch.randn(side, side, device=machine.device).bfloat16()
    copy_s, product_s = machine.seconds(lambda: target.copy_(source)), machine.seconds(lambda: matrix @ matrix)
    return 2 * len(source) / copy_s, 2 * side**3 / product_s


def speeds(machine: Machine) -> Iterator[Line]:
    """Ceilings of the machine, then the kernels against them."""
    copy, product = ceilings(machine)
    yield Line("copy", f"{copy / 1e12:.2f} TB/s")
    yield Line("bfloat16 product", f"{product / 1e12:.0f} TFLOP/s")
    cuda = machine.backend("bfloat16")
    context, batch, heads = machine.size(4096, 64), machine.size(64, 2), machine.size(8, 2)
    decode = AttentionWorkload(heads, 4, 128, context, num_sequences=batch, query_len=1)
    decode_s = machine.seconds(decode.prepared(cuda))
    share = 2 * batch * context * heads * 128 * BF16_BYTES / decode_s / copy
    yield Line(f"decode attention, {batch} x {context}", f"{decode_s * 1e6:.0f} us, {share:.0%} of copy", ">= 85%")
    verify = AttentionWorkload(heads, 4, 128, context, num_sequences=batch, query_len=8)
    ratio = machine.seconds(verify.prepared(cuda)) / decode_s
    yield Line("verification of 8 rows", f"{ratio:.2f} of decode", "<= 1.10")
    chunk = AttentionWorkload(heads, 4, 128, context, num_sequences=1, query_len=context)
    work = 2 * context**2 * heads * 4 * 128  # two products, half of each masked
    share = work / machine.seconds(chunk.prepared(cuda)) / product
    yield Line(f"prompt attention, {context}", f"{share:.0%} of product", ">= 55%")

    sequences, vocab = machine.size(32, 2), machine.size(128 * 1024, 500)
    rows = sequences * 9
    drafts = (np.zeros(rows, np.int32), np.arange(0, rows + 1, 9, dtype=np.int32))
    logits = torch.randn(rows, vocab, device=machine.device).bfloat16()
    for name, params in {
        "greedy": sampling_batch(rows, temperature=0.0),
        "random": sampling_batch(rows),
        "top-k 50, top-p 0.95": sampling_batch(rows, top_k=50, top_p=0.95),
    }.items():
        seconds = machine.seconds(lambda params=params: cuda.sample_and_accept(logits, params, *drafts)())  # type: ignore[misc]
        yield Line(f"sample and accept {rows} x {vocab} {name}", f"{seconds * 1e6:.0f} us, copies included", "<= 60 us")
    stream, weight = cuda.weight(np.ones((1, 32), np.float32)), cuda.weight(np.ones(32, np.float32))
    start, launches = time.perf_counter(), machine.size(2000, 20)
    for _ in range(launches):
        cuda.rms_norm(stream, weight, 1e-5)
    yield Line("host time of a launch", f"{(time.perf_counter() - start) / launches * 1e6:.1f} us")


def serving(machine: Machine) -> Iterator[Line]:
    """Output tokens per second through gRPC, by `benchmarks/serving.py`."""
    streams = [1] if machine.is_dry else [1, 16, 64, 256]
    limits = ["--max-num-sequences", "256"]
    command = [sys.executable, str(ROOT / "benchmarks" / "serving.py"), "--rounds", "1"]
    command += ["--tokens", str(machine.size(128, 4)), "--streams", *map(str, streams)]
    command += ["--", "--device", "cpu" if machine.is_dry else "cuda", *([] if machine.is_dry else limits)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = process.communicate(timeout=SERVING_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # it ends its server
        output, errors = process.communicate()
    if process.returncode:
        yield Line("serving", (errors.strip().splitlines() or ["no message"])[-1], "", False)
    for row in map(json.loads, output.splitlines()):
        target = {1: ">= 1000", 64: ">= 25000"}.get(row["streams"], "")
        yield Line(f"tokens/s, {row['streams']} streams", f"{row['tokens_per_s']:.0f}", target)


SECTIONS = {section.__name__: section for section in (accuracy, model_tokens, speeds, serving, sanitizer)}
BUDGET_S = {"accuracy": 40, "model_tokens": 40, "speeds": 40, "serving": 75, "sanitizer": 40}
"""What a section may take on a GPU, 235 s in all; one that takes longer is ended and has failed."""
_INTERRUPT_GRACE_S = 5


def run_here(name: str, is_dry: bool) -> None:
    """Run one section and print its results as JSON lines."""
    for line in SECTIONS[name](Machine(is_dry)):
        print(json.dumps(dataclasses.asdict(line)), flush=True)


def run_apart(name: str, is_dry: bool) -> Iterator[Line]:
    """Run one section in a process of its own: a fault of the device ends a process, and the other sections go on."""
    command = [sys.executable, __file__, "--only", name, *(["--dry"] if is_dry else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    budget_s = BUDGET_S[name]
    alarm = threading.Timer(budget_s, _end, [process])
    if not is_dry:  # the checker's times mean nothing
        alarm.start()
    start = time.perf_counter()
    with process:
        assert process.stdout is not None
        yield from (Line(**json.loads(text)) for text in process.stdout)
    alarm.cancel()
    if process.returncode:
        is_late = not is_dry and time.perf_counter() - start >= budget_s
        yield Line(name, f"ended after {budget_s} s" if is_late else f"status {process.returncode}", "status 0", False)


def _end(process: subprocess.Popen[str]) -> None:
    """Interrupt a section, so that it ends its server, and kill what is left of it."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_INTERRUPT_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def main() -> int:
    """Run the sections and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="without a GPU, on the checker")
    parser.add_argument("--only", choices=SECTIONS, help="one section, as JSON lines")
    options = parser.parse_args()
    if options.only:
        run_here(options.only, options.dry)
        return 0
    if not options.dry:
        try:
            find_device("cuda")
        except ConfigError as error:
            parser.exit(2, f"{error.message}\n")
    device_name = "CUDA checker" if options.dry else torch.cuda.get_device_name()
    print(f"{device_name}, PyTorch {torch.__version__}", flush=True)
    lines = []
    for name in SECTIONS:
        start = time.perf_counter()
        for line in run_apart(name, options.dry):
            lines.append(line)
            print(f"{line.name}: {line.value}", flush=True)
        print(f"({name}: {time.perf_counter() - start:.0f} s)", flush=True)
    print()
    for line in lines:
        verdict = {None: "", True: "pass", False: "FAIL"}[line.passed]
        print(f"{line.name:<48}{line.value:<34}{line.target:<22}{verdict}")
    return int(any(line.passed is False for line in lines))


if __name__ == "__main__":
    sys.exit(main())
