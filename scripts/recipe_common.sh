# Sourced by train_*.sh and pretrain_roberta.sh: the environment, then scripts/recipes.py.
#
# run_recipe NAME [--tiny] [flags of fairseq-train]; with --help the first lines of the script that sourced this.
# shellcheck shell=bash

run_recipe() {
    case "${2:-}" in
    -h | --help)
        sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[1]}"
        return
        ;;
    esac
    local root
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
    "$root/scripts/setup_env.sh"
    exec "$root/.venv/bin/python" "$root/scripts/recipes.py" "$@"
}
