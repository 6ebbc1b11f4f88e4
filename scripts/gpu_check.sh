#!/usr/bin/env bash
# Tests that need a CUDA GPU, then the speed suites on it and a page of their figures.
#
#   ./scripts/gpu_check.sh [OUT]    OUT defaults to outputs/gpu; OUT/SUITE.json, the plots and OUT/speed.md
#
# DATA=DIR  of python -m data_prep homeassistant, whose sentence lengths `train` takes (made when not given)

set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac

out="$(realpath -m "${1:-outputs/gpu}")"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
"$root/scripts/setup_env.sh"
python="$root/.venv/bin/python"
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_check: error: torch sees no CUDA GPU here; run this on a machine that has one" >&2
    exit 1
fi
cd "$root"
mkdir -p "$out"
"$python" -m pytest -q -m gpu tests/equivalence
for suite in attention train generate scaling; do
    options=(--device cuda --json "$out/$suite.json" --plot "$out")
    [[ "$suite" == train && -n "${DATA:-}" ]] && options+=(--data "$DATA")
    "$python" scripts/benchmark.py "$suite" "${options[@]}"
done
"$python" scripts/speed_page.py --json-dir "$out" --out "$out/speed.md"
echo "gpu_check: done; figures are in $out/speed.md"
