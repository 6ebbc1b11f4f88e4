#!/usr/bin/env bash
# Makes the environment where needed, checks style, runs the tests.
#
#   ./scripts/test.sh               the quick tests, all offline once the environment is made
#   ./scripts/test.sh --all         also those that take minutes or need a package registry
#   ./scripts/test.sh ARGUMENTS     any arguments of pytest: files, -k, -x, ...
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
arguments=()
for argument in "$@"; do
    case "$argument" in
        --all) arguments+=(-m "not gpu") ;;
        -h | --help) sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
        -*) arguments+=("$argument") ;;
        *)  # a path relative to where the caller is
            [[ -e "${argument%%::*}" && "$argument" != /* ]] && argument="$PWD/$argument"
            arguments+=("$argument") ;;
    esac
done

"$root/scripts/setup_env.sh"
python="$root/.venv/bin/python"
cd "$root"
"$python" -m ruff check .
"$python" -m ruff format --check .
# a process a core; files stay whole, because their tests share what they trained
exec "$python" -m pytest -n auto --maxprocesses 4 --dist loadfile ${arguments[@]+"${arguments[@]}"}
