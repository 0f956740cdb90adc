"""Builds a kernel file into a shared object with g++, once for each text, options and sanitizers."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / "build" / "simt"
RUNTIME = ("fibers.cc", "warp_operations.cc")
SANITIZERS = ("address", "undefined", "thread")
CUDA_HEADERS = ("nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-cuda-cccl")
FLAGS = [
    "-std=c++17",
    "-O1",
    "-g1",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-fno-omit-frame-pointer",
    "-ftrivial-auto-var-init=pattern",  # an unset local is -1.7e38
    "-Wno-unknown-pragmas",
]

# The only rewrite of a kernel's text: C++ has no `extern __shared__ T name[]` of run-time size.
_DYNAMIC_SHARED = re.compile(
    r"\bextern\s+__shared__\s+(?:(?:__align__|alignas)\s*\(\s*\w+\s*\)\s*)?([\w:]+(?:\s+\w+)*?)\s+(\w+)\s*\[\s*\]\s*;"
)
_ENTRY = """\
extern "C" __attribute__((visibility("default"))) void simt_call_{0}(void** arguments) {{
    simt::call(&{1}, arguments);
}}
extern "C" __attribute__((visibility("default"))) int simt_signature_{0}(int* sizes, char* kinds) {{
    return simt::signature(&{1}, sizes, kinds);
}}
"""


def cuda_include_dirs() -> list[str]:
    """Folders of NVIDIA's headers: of the packages `nvidia-cuda-runtime`, `-crt`, `-cccl`, else of `$CUDA_PATH`.

    Raises:
        RuntimeError: there are none.
    """
    roots = [Path(os.environ.get("CUDA_PATH", "/usr/local/cuda"))]
    with contextlib.suppress(PackageNotFoundError):
        roots.insert(0, Path(str(distribution(CUDA_HEADERS[0]).locate_file("nvidia/cu13"))))
    for root in roots:
        include = root / "include"
        if (include / "cuda_bf16.h").exists() and (include / "crt" / "host_defines.h").exists():
            return [str(path) for path in (include, include / "cccl") if path.exists()]
    raise RuntimeError(f"no CUDA headers: pip install {' '.join(CUDA_HEADERS)}")


def build(text: str, filename: str, names: list[str], options: list[str], sanitizers: list[str]) -> Path:
    """Compile a kernel file for the CPU.

    Args:
        text: CUDA C++.
        filename: for messages.
        names: kernels and instantiations to make callable, such as "scale<float>".
        options: `-I` and `-D` for the compiler.
        sanitizers: of `SANITIZERS`.

    Returns:
        the shared object; beside it `.shared` lists offset (from `simt_anchor`) and size of each `__shared__` variable.

    Raises:
        RuntimeError: the compiler refused the text.
    """
    entries = "".join(_ENTRY.format(index, name) for index, name in enumerate(names))
    source = _DYNAMIC_SHARED.sub(r"\1* \2 = ::simt::dynamic<\1>();", text)
    source = f'#line 1 "{filename}"\n{source}\n#line 1 "simt_entries"\n{entries}'
    headers = [path for option in options if option.startswith("-I") for path in Path(option[2:]).glob("*.cuh")]
    defines = [option for option in options if not option.startswith("-I")]  # of folders, the content counts
    key = _digest([source, *defines, *sanitizers], [*headers, HERE / "simt.h", *(HERE / name for name in RUNTIME)])
    library = CACHE / f"{Path(filename).stem}-{key}.so"
    if library.exists():
        return library
    CACHE.mkdir(parents=True, exist_ok=True)
    runtime = _runtime(sanitizers)
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        work = Path(temporary)
        (work / "kernel.cc").write_text(source)
        flags = [*options, *_sanitize(sanitizers), "-include", "simt.h"]
        _compile(flags, work / "kernel.cc", work / "kernel.o")
        objects = map(str, [work / "kernel.o", *runtime])
        _run(["g++", "-shared", *_sanitize(sanitizers), *objects, "-o", str(work / "kernel.so")])
        (work / "kernel.shared").write_text(_shared_variables(work / "kernel.o", work / "kernel.so"))
        (work / "kernel.shared").replace(library.with_suffix(".shared"))
        (work / "kernel.so").replace(library)
    return library


def _runtime(sanitizers: list[str]) -> list[Path]:
    """Compile the checker itself; ThreadSanitizer is told about it but does not watch it."""
    watched = [name for name in sanitizers if name != "thread"]
    flags = [*_sanitize(watched), *(["-DSIMT_TSAN"] if "thread" in sanitizers else [])]
    key = _digest(flags, [HERE / "simt.h", *(HERE / name for name in RUNTIME)])
    objects = [CACHE / f"{Path(name).stem}-{key}.o" for name in RUNTIME]
    for name, path in zip(RUNTIME, objects, strict=True):
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
                _compile(flags, HERE / name, Path(temporary) / path.name)
                (Path(temporary) / path.name).replace(path)
    return objects


def _shared_variables(kernel: Path, library: Path) -> str:
    """Function-local statics of the kernel file are its `__shared__` variables."""
    own = {line.split()[-1] for line in _run(["nm", "--defined-only", str(kernel)]).splitlines()}
    rows = [line.split() for line in _run(["nm", "-S", "--defined-only", str(library)]).splitlines()]
    anchor = next(int(row[0], 16) for row in rows if row[-1] == "simt_anchor")
    return "\n".join(
        f"{int(row[0], 16) - anchor} {int(row[1], 16)}"
        for row in rows
        if len(row) == 4 and row[2] in "bBdDuvV" and row[3].startswith("_ZZ") and row[3] in own
    )


def _sanitize(sanitizers: list[str]) -> list[str]:
    flags = [f"-fsanitize={name}" for name in sanitizers]
    return [*flags, "-fno-sanitize-recover=undefined"] if "undefined" in sanitizers else flags


def _compile(flags: list[str], source: Path, target: Path) -> None:
    includes = [f"-I{HERE}", *(f"-isystem{path}" for path in cuda_include_dirs())]
    _run(["g++", *FLAGS, *includes, *flags, "-c", str(source), "-o", str(target)])


def _digest(texts: list[str], files: list[Path]) -> str:
    ordered = sorted(files, key=lambda path: path.name)
    content = b"\0".join([text.encode() for text in [*FLAGS, *texts]] + [path.read_bytes() for path in ordered])
    return hashlib.sha256(content).hexdigest()[:16]


def _run(command: list[str]) -> str:
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{process.stderr}")
    return process.stdout
