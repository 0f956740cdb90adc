from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("foreword_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def times(package: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in package.iterdir()}


def test_code_is_generated_once_and_leaves_nothing_stale(setup: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "tree"
    setup.generate_proto(out)
    package = out / "foreword" / "v1"
    first = times(package)
    stems = {path.stem for path in (ROOT / "proto").rglob("*.proto")}
    assert {name for name in first if name.endswith("_pb2.py")} == {f"{stem}_pb2.py" for stem in stems}
    assert {name for name in first if name.endswith("_pb2.pyi")} == {f"{stem}_pb2.pyi" for stem in stems}
    assert {name for name in first if name.endswith("_grpc.py")} == {
        f"{stem}_pb2_grpc.py" for stem in stems if stem.endswith("_service")
    }

    setup.generate_proto(out)
    assert times(package) == first

    (package / "removed_pb2.py").touch()
    (package / "digest").write_text("of other sources")
    setup.generate_proto(out)
    assert set(times(package)) == set(first)
    assert list(tmp_path.iterdir()) == [out]


def test_the_digest_knows_sources_and_tools(setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    source = tmp_path / "a.proto"
    source.write_text("one")
    digest = setup.digest_of([source], ("mypy-protobuf",))
    assert setup.digest_of([source], ("mypy-protobuf",)) == digest
    assert setup.digest_of([source], ()) != digest
    assert setup.digest_of([], ("mypy-protobuf",)) != digest
    source.write_text("two")
    assert setup.digest_of([source], ("mypy-protobuf",)) != digest
