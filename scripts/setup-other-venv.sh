#!/usr/bin/env bash
# Makes .venv-other beside .venv, with another Python, and prints the path of its interpreter; the
# e-graph's tests run with both (egglog 14 needs Python 3.12, Python 3.11 has egglog 13.2).
# Prints no path where no other Python is found. Messages go to stderr.
# EGGPU_OTHER_PYTHON=/path/to/python names one, EGGPU_OTHER_PYTHON= (empty) goes without.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv-other

minor_of() { # "3.12" of a CPython that runs, is recent enough and can make environments
    "$1" - 2>/dev/null <<'PYTHON'
import ensurepip, sys, venv

if sys.implementation.name != "cpython" or sys.version_info < (3, 11):
    sys.exit(1)
print(f"{sys.version_info[0]}.{sys.version_info[1]}")
PYTHON
}

find_other() { # one with the other egglog first; a pyenv shim may be on PATH and not run
    local mine minor minors python
    mine=$(minor_of .venv/bin/python)
    minors="3.12 3.13 3.14"
    [ "$mine" = 3.11 ] || minors="3.11 $minors"
    for minor in $minors; do
        [ "$minor" != "$mine" ] || continue
        for python in "python$minor" \
            "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$minor".*/bin/"python$minor"; do
            if [ "$(minor_of "$python")" = "$minor" ]; then
                echo "$python"
                return
            fi
        done
    done
    return 1
}

if [ "${EGGPU_OTHER_PYTHON-unset}" = "" ]; then
    exit 0
elif [ -n "${EGGPU_OTHER_PYTHON:-}" ]; then
    python=$EGGPU_OTHER_PYTHON
    if ! minor_of "$python" >/dev/null; then
        echo "EGGPU_OTHER_PYTHON must be a CPython 3.11 or newer that can make virtual environments;" \
            "$python is not" >&2
        exit 1
    fi
elif ! python=$(find_other); then
    echo "no other Python (3.11 to 3.14) found: the e-graph's tests run with one only;" \
        "EGGPU_OTHER_PYTHON=/path/to/python names another" >&2
    exit 0
fi

version='import sys; print(sys.version)'
if [ "$("$venv/bin/python" -c "$version" 2>/dev/null)" != "$("$python" -c "$version")" ]; then
    rm -rf "$venv"
fi
# Little of what is installed is ever imported there, so pip need not compile it.
if ! EGGPU_VENV=$venv PYTHON=$python scripts/setup-venv.sh egraph-tests --no-compile >&2; then
    echo "$venv cannot be set up with $python; \`make test EGGPU_OTHER_PYTHON=\` goes without" >&2
    exit 1
fi
echo "$PWD/$venv/bin/python"
