#!/usr/bin/env bash
# Makes the environment of this project in .venv/ at the repository root; when it is up to date, does nothing.
#
#   ./scripts/setup_env.sh          then use .venv/bin/python, .venv/bin/fairseq-train, ...
#   source scripts/setup_env.sh     the same, and activates it in this shell
#
# PYTHON=... chooses the Python (3.10, 3.11 or 3.12); otherwise a suitable one is looked for.

if [[ "${BASH_SOURCE[0]}" != "$0" ]]; then
    bash "${BASH_SOURCE[0]}" && source "$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/activate"
    return
fi

set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="$root/.venv"
stamp="$venv/fairseq_collab.stamp"      # written last: its presence means that the installation is complete
unfinished="$venv/fairseq_collab.unfinished"
log="$root/.venv.log"
extras="fairseq,corpora,plot,serve,hf,dev"

say() { printf 'setup_env: %s\n' "$*"; }
die() { printf 'setup_env: error: %s\n' "$*" >&2; exit 1; }

# Two lines: where the environment lies and its Python, and the files that say what to install.
fingerprint() {
    "$venv/bin/python" - "$root" "$extras" 2>/dev/null <<'PY'
import hashlib, pathlib, re, sys
root = pathlib.Path(sys.argv[1])
files = [(root / name).read_bytes() for name in ("setup.py", "pyproject.toml", "scripts/constraints.txt")]
init = (root / "fairseq_collab" / "__init__.py").read_text(encoding="utf-8")
version = re.search(r"^__version__ = .*$", init, re.MULTILINE).group()
print("%d.%d" % sys.version_info[:2], root)
print(hashlib.sha256(b"".join([*files, version.encode(), sys.argv[2].encode()])).hexdigest())
PY
}

is_complete() { [[ -f "$stamp" && ! -e "$unfinished" ]]; }
is_up_to_date() { is_complete && [[ "$(cat "$stamp")" == "$(fingerprint)" ]] && is_wanted_python; }
is_in_place() { is_complete && [[ "$(head -n 1 "$stamp")" == "$(fingerprint | head -n 1)" ]] && is_wanted_python; }
is_wanted_python() { [[ -z "${PYTHON:-}" || "$(version_of "$PYTHON")" == "$(version_of "$venv/bin/python")" ]]; }

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }
is_suitable() { [[ "$(version_of "$1")" =~ ^3\.1[012]$ ]]; }
makes_environments() { "$1" -c 'import venv, ensurepip' 2>/dev/null; }

candidates() {
    local name
    for name in python3.11 python3.12 python3.10 python3; do
        type -aP "$name" || true
    done
    for name in 3.11 3.12 3.10; do
        compgen -G "${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}/versions/$name.*/bin/python" || true
    done
}

find_python() {
    local found without_venv=""
    if [[ -n "${PYTHON:-}" ]]; then
        is_suitable "$PYTHON" || die "PYTHON=$PYTHON is not a Python 3.10, 3.11 or 3.12 that runs; point it to one, or unset it."
        makes_environments "$PYTHON" || without_venv="$PYTHON"
        python="$PYTHON"
    else
        python=""
        while IFS= read -r found; do
            is_suitable "$found" || continue
            if makes_environments "$found"; then python="$found"; without_venv=""; break; fi
            without_venv="${without_venv:-$found}"
        done < <(candidates)
    fi
    [[ -z "$without_venv" ]] || die "$without_venv has no venv module; install it (on Debian and Ubuntu: apt install python$(version_of "$without_venv")-venv) and run this again."
    [[ -n "$python" ]] || die "no Python 3.10, 3.11 or 3.12 was found on the PATH; install one, or name it with PYTHON=/path/to/python."
}

# fairseq comes ready-made for CPython 3.11 and 3.12 on 64-bit Linux PCs; elsewhere it is compiled.
check_compiler() {
    minutes="2 to 5 minutes"
    "$python" -c 'import platform, sys; sys.exit(not (
        platform.python_implementation() == "CPython" and (3, 11) <= sys.version_info[:2] <= (3, 12)
        and sys.platform == "linux" and platform.machine() == "x86_64"))' && return
    minutes="10 to 20 minutes, since fairseq has to be compiled for this Python or machine"
    local compiler="${CXX:-}"
    [[ -n "$compiler" ]] || compiler="$(type -P c++ || type -P g++ || type -P clang++ || true)"
    [[ -n "$compiler" ]] && type -P "${compiler%% *}" >/dev/null ||
        die "fairseq has to be compiled for this Python or machine and there is no C++ compiler; install one (on Debian and Ubuntu: apt install g++) or use Python 3.11 on 64-bit Linux, which needs none."
    "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
        die "fairseq has to be compiled and the headers of $python are missing; install them (on Debian and Ubuntu: apt install python$(version_of "$python")-dev) or use Python 3.11 on 64-bit Linux, which needs none."
}

# One sentence for what stopped the installation, from what it left in the log.
explain() {
    local free_kilobytes
    free_kilobytes="$(df -Pk "$root" 2>/dev/null | awk 'NR == 2 { print $4 }')"
    if [[ "${free_kilobytes:-999999}" -lt 20000 ]] || grep -qiE 'No space left on device|Errno 28|Disk quota exceeded' "$log"; then
        die "the disk is full ($root or the folder for temporary files); free 3 GB (8 GB where pip takes a torch for GPUs) and run this again."
    elif grep -qiE 'Failed to establish a new connection|Name or service not known|name resolution|Max retries exceeded|Connection (refused|reset|aborted)|Network is unreachable|ConnectTimeout|Read timed out|ProxyError|SSLError' "$log"; then
        die "the package registry cannot be reached; check the connection (and pip's index and proxy settings) and run this again: what was downloaded is kept."
    elif grep -qiE "command '?[^ ]*(gcc|g\+\+|cc|c\+\+|clang)[^ ]*'? failed|unable to execute '[^']*(gcc|cc|c\+\+|clang)" "$log"; then
        die "compiling fairseq failed, see $log; a Python 3.11 on 64-bit Linux needs no compiling (PYTHON=python3.11)."
    fi
    die "$1 failed, see $log: $(grep -E 'ERROR|Error' "$log" | tail -n 1 | sed -E 's/^[0-9T:,-]+ *//' || true)"
}

install() {
    : >"$log" || die "$root cannot be written to; make it writable and run this again."
    if is_in_place; then
        say "what the project needs has changed: updating .venv"
        python="$venv/bin/python"
    elif [[ -e "$venv" && ! -e "$stamp" && ! -e "$unfinished" ]]; then
        die "$venv exists but was not made by this script; move it away (mv .venv .venv.old) and run this again."
    else
        find_python
        if [[ -e "$venv" ]]; then
            say "the earlier .venv is incomplete, for another Python, or from another folder: making it again"
            rm -rf "$venv"
        fi
    fi
    check_compiler
    say "installing with Python $(version_of "$python") into .venv: $minutes on a fast connection"
    mkdir -p "$venv" || explain "making .venv"
    : >"$unfinished" || explain "making .venv"
    [[ -f "$stamp" ]] || "$python" -m venv "$venv" >>"$log" 2>&1 || explain "making .venv"
    cd "$root"  # pip splits PIP_CONSTRAINT at spaces, so it gets a relative path
    # variables and not options, so that they hold for the pip that fetches what packages are built with, too
    PIP_CONSTRAINT=scripts/constraints.txt PIP_BUILD_CONSTRAINT=scripts/constraints.txt PIP_LOG="$log" \
        PIP_DISABLE_PIP_VERSION_CHECK=1 "$venv/bin/python" -m pip install -e ".[$extras]" || explain "the installation"
    fingerprint >"$stamp.new" && mv "$stamp.new" "$stamp" || explain "finishing .venv"
    rm -f "$unfinished"
    say "done in $SECONDS s"
}

if [[ "${1:-}" == "-h" || "${1:-}" == "--help" ]]; then
    sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
fi
[[ $# -eq 0 ]] || die "unknown argument '$1'; this script takes none (see --help)."

is_up_to_date && exit 0
trap 'printf "\nsetup_env: interrupted; the next run starts over and keeps what was downloaded\n" >&2; exit 130' INT
if type -P flock >/dev/null; then
    exec 9>"$root/.venv.lock" || die "$root cannot be written to; make it writable and run this again."
    if ! flock -n 9; then
        say "waiting for another run of this script"
        flock 9
    fi
    is_up_to_date && exit 0
fi
install
