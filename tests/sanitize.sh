#!/usr/bin/env bash
# Builds the scheduler's extensions with AddressSanitizer and UndefinedBehaviorSanitizer and runs its tests on them.
# Needs gcc with both, and the C files that `make build` leaves in build/cython.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
tree=build/sanitize
include=$("$python" -c 'import sysconfig, numpy; print("-I" + sysconfig.get_path("include"), "-I" + numpy.get_include())')
suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
rm -rf $tree
mkdir -p $tree/foreword/scheduler
cp scheduler/*.py $tree/foreword/scheduler
for source in scheduler/*.pyx; do
    name=$(basename "$source" .pyx)
    # shellcheck disable=SC2086 # one -I each
    gcc -shared -fPIC -O1 -g1 -w -fsanitize=address,undefined -fno-sanitize-recover=undefined $include \
        -DNPY_NO_DEPRECATED_API=NPY_2_0_API_VERSION "build/cython/scheduler/$name.c" \
        -o "$tree/foreword/scheduler/$name$suffix"
done
# The interpreter has not been built with the sanitizer and never frees some of its memory.
LD_PRELOAD=$(gcc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$tree "$python" -c '
from foreword.scheduler import scheduler
assert "sanitize" in scheduler.__file__, scheduler.__file__
import pytest
raise SystemExit(pytest.main(["tests/scheduler", "-p", "no:cacheprovider"]))
'
