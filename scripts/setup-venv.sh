#!/usr/bin/env bash
# Makes .venv and installs this tree into it, editable, with the extras named:
#   scripts/setup-venv.sh dev,models
# Does nothing when .venv already holds them for this pyproject.toml. What follows goes to pip.
# PYTHON=... picks the interpreter, EGGPU_VENV=... another folder than .venv.
set -euo pipefail
cd "$(dirname "$0")/.."

extras=${1:?usage: scripts/setup-venv.sh EXTRA[,EXTRA...] [PIP-OPTION...]}
shift
venv=${EGGPU_VENV:-.venv}
stamp=$venv/.installed-$extras
log=$venv/install.log

recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local name
    for name in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if recent "$name"; then
            echo "$name"
            return
        fi
    done
    echo "eggpu needs Python 3.11 or newer; ${PYTHON:-python3} is" \
        "$("${PYTHON:-python3}" --version 2>&1 | head -n 1). Set PYTHON=/path/to/python3.11." >&2
    return 1
}

# Scripts and the editable install hold absolute paths: in a copied tree they run the old one.
usable_venv() {
    [ "$(cat "$venv/.tree" 2>/dev/null)" = "$PWD" ] && recent "$venv/bin/python"
}

wanted=$(cat pyproject.toml setup.py scripts/setup-venv.sh | cksum)
if usable_venv && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

if ! usable_venv; then
    python=$(find_python)
    if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        echo "$python cannot make virtual environments; on Debian: apt-get install python3-venv" >&2
        exit 1
    fi
    echo "making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
    echo "$PWD" >"$venv/.tree"
fi

echo "installing eggpu[$extras] into $venv"
if ! "$venv/bin/python" -m pip --no-input --disable-pip-version-check --retries 5 \
    install "$@" --editable ".[$extras]" >"$log" 2>&1 </dev/null; then
    cat "$log" >&2
    echo "installing eggpu[$extras] failed; the text above is pip's" >&2
    exit 1
fi
echo "$wanted" >"$stamp"
