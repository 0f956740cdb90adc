"""What pyproject.toml cannot say: the import tree, generated protobuf code and Cython extensions.

The folders of this repository are the import packages of the namespace ``foreword``. Tools that resolve imports from
the file system (Cython's ``cimport``, mypy, import-linter) need them under one parent folder, so this file keeps the
git-ignored tree ``build/tree/foreword/``: a link for each folder, and the generated code of ``proto/`` as ``v1``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from importlib.metadata import distribution
from pathlib import Path
from tempfile import TemporaryDirectory

from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
TREE = ROOT / "build" / "tree" / "foreword"
FOLDERS = ("scheduler", "gpu", "service", "clients")
PROTO_TOOLS = ("googleapis-common-protos", "grpcio-tools", "mypy-protobuf")


def link_tree() -> None:
    """Make ``build/tree/foreword/<folder>`` point at each top-level folder."""
    TREE.mkdir(parents=True, exist_ok=True)
    for folder in FOLDERS:
        link = TREE / folder
        if not link.is_symlink():
            link.symlink_to(Path("../../..") / folder)


def generate_proto(out: Path) -> None:
    """Compile ``proto/`` into the package ``foreword/v1`` below ``out``, unless it is up to date.

    The package also gets ``descriptors.binpb``: all files with their imports and comments, which `buf lint` and
    `buf breaking` read.
    """
    import grpc_tools
    from grpc_tools import protoc

    proto = ROOT / "proto"
    sources = sorted(path.relative_to(proto) for path in proto.rglob("*.proto"))
    package = out / "foreword" / "v1"
    digest = digest_of([Path(__file__), *(proto / source for source in sources)], PROTO_TOOLS)
    stamp = package / "digest"
    if stamp.exists() and stamp.read_text() == digest:
        return

    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    googleapis = distribution("googleapis-common-protos").locate_file("")
    with TemporaryDirectory(dir=out.parent) as temporary:
        generated = Path(temporary) / "foreword" / "v1"
        generated.mkdir(parents=True)
        command = ["protoc", f"-I{proto}", f"-I{Path(grpc_tools.__file__).parent / '_proto'}", f"-I{googleapis}"]
        messages = [
            f"--python_out={temporary}",
            f"--mypy_out=quiet:{temporary}",
            f"--descriptor_set_out={generated / 'descriptors.binpb'}",
            "--include_imports",
            "--include_source_info",
        ]
        services = [f"--grpc_python_out={temporary}", f"--mypy_grpc_out=quiet:{temporary}"]
        for outputs, suffix in ((messages, ".proto"), (services, "_service.proto")):
            status = protoc.main([*command, *outputs, *(str(path) for path in sources if path.name.endswith(suffix))])
            if status:
                raise SystemExit(f"protoc failed with status {status}")
        (generated / "py.typed").touch()
        (generated / "digest").write_text(digest)
        if package.exists():
            shutil.rmtree(package)
        package.parent.mkdir(parents=True, exist_ok=True)
        generated.rename(package)


def digest_of(files: list[Path], tools: tuple[str, ...]) -> str:
    """A digest of the files and of the versions of the tools that read them."""
    state = hashlib.sha256()
    for file in files:
        state.update(f"{file.relative_to(ROOT)} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    for tool in tools:
        state.update(f"{tool} {distribution(tool).version}\n".encode())
    return state.hexdigest()


def packages() -> list[str]:
    """The generated package and every folder of ours that has an ``__init__.py``."""
    markers = (marker for folder in FOLDERS for marker in sorted((ROOT / folder).rglob("__init__.py")))
    return ["foreword.v1", *("foreword." + ".".join(marker.parent.relative_to(ROOT).parts) for marker in markers)]


def extensions() -> list[Extension]:
    """One extension for every ``.pyx`` file below the package folders."""
    import numpy
    from Cython.Build import cythonize

    modules = []
    for folder in FOLDERS:
        for source in sorted((ROOT / folder).rglob("*.pyx")):
            relative = source.relative_to(ROOT)
            modules.append(
                Extension(
                    "foreword." + ".".join(relative.with_suffix("").parts),
                    [str(relative)],
                    include_dirs=[numpy.get_include(), str(relative.parent)],
                    define_macros=[("NPY_NO_DEPRECATED_API", "NPY_2_0_API_VERSION")],
                    extra_compile_args=["-O3", "-fno-math-errno", "-fno-trapping-math"],
                )
            )
    return cythonize(
        modules,
        include_path=[str(TREE.parent)],
        build_dir="build/cython",
        language_level="3",
        compiler_directives={
            "boundscheck": False,
            "wraparound": False,
            "cdivision": True,
            "initializedcheck": False,
            "embedsignature": False,
        },
    )


if __name__ == "__main__":
    link_tree()
    generate_proto(TREE.parent)
    setup(packages=packages(), ext_modules=extensions())
