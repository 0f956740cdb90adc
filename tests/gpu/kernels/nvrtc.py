"""Compiles kernels for real GPUs with NVRTC, without having one; as a program, prints what each needs."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from cuda.core import Program, ProgramOptions
from simt import cuda_include_dirs

from foreword.gpu.kernels.table import KERNELS, SHARED_BYTES, Kernel, TemplateArgument

ARCHITECTURES = tuple(SHARED_BYTES)
_RESOURCES = re.compile(
    r"(?P<spill_stores>\d+) bytes spill stores, (?P<spill_loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?:.*?(?P<shared>\d+) bytes smem)?"
)
Instantiation = tuple[Kernel, tuple[TemplateArgument, ...]]


@dataclass(frozen=True)
class Compiled:
    """What one instantiation needs: registers and spilled bytes of a thread, static shared memory of a block."""

    expression: str
    registers: int
    shared_bytes: int
    spilled_bytes: int


def compile_kernels(instantiations: Sequence[Instantiation], architecture: str) -> Iterator[Compiled]:
    """Compile with the options that CuPy uses, one program a file.

    Raises:
        cuda.core's NVRTCError: the compiler refuses a file.
    """
    for source, group in groupby(instantiations, lambda item: item[0].source):
        names = [kernel.expression(template) for kernel, template in group]
        options = ProgramOptions(
            arch=architecture,
            std="c++17",
            ftz=True,
            device_as_default_execution_space=True,
            include_path=[str(source.parent), *cuda_include_dirs()],
            ptxas_options=["-v"],
        )
        log = io.StringIO()
        code = Program(source.read_text(), "c++", options).compile("cubin", name_expressions=tuple(names), logs=log)
        for name in names:
            symbol = code.symbol_mapping[name]
            symbol = symbol.decode() if isinstance(symbol, bytes) else symbol
            report = log.getvalue().split(f"'{symbol}'", 1)[1].split("Compiling entry", 1)[0].replace("\n", " ")
            match = _RESOURCES.search(report)
            assert match is not None, report
            numbers = {key: int(value or 0) for key, value in match.groupdict().items()}
            spilled = max(numbers["spill_stores"], numbers["spill_loads"])
            yield Compiled(name, numbers["registers"], numbers["shared"], spilled)


def main(architectures: Sequence[str]) -> None:
    """Print every kernel and instantiation of the table."""
    instantiations = [(kernel, template) for kernel in KERNELS for template in kernel.instantiations]
    for architecture in architectures:
        begin = time.perf_counter()
        print(f"{architecture:60} registers  shared bytes  spilled bytes")
        for row in compile_kernels(instantiations, architecture):
            print(f"  {row.expression:58} {row.registers:9} {row.shared_bytes:13} {row.spilled_bytes:14}")
        print(f"  {len(instantiations)} instantiations in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:] or ARCHITECTURES)
