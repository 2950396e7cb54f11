#!/usr/bin/env bash
# Finds a Python that can run Sluice and hands over to bootstrap.py: `bootstrap.sh COMMAND [ARGUMENTS]`.
# Every step replaces this process (exec), so that the process a caller started is the one that does the work.
set -u
here=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")

# SLUICE_PYTHON or nothing; else the first that works, one that can make environments by itself before one that cannot.
candidates=(python3.14 python3.13 python3.12 python3.11 python3 python)
[ -z "${SLUICE_PYTHON:-}" ] || candidates=("$SLUICE_PYTHON")
for needs in "import ensurepip, venv" ""; do
    for python in "${candidates[@]}"; do
        if "$python" -c "import sys; assert (3, 11) <= sys.version_info[:2] <= (3, 14); $needs" 2>/dev/null; then
            exec "$python" "$here/bootstrap.py" "$@"
        fi
    done
done
if [ -n "${SLUICE_PYTHON:-}" ]; then
    echo "SLUICE_PYTHON=$SLUICE_PYTHON is no Python 3.11 to 3.14 that runs." >&2
    exit 1
fi

sudo=""
[ "$(id -u)" = 0 ] || sudo="sudo "
echo "Sluice needs Python 3.11 to 3.14, and there is none on PATH. To get it:" >&2
if command -v apt-get >/dev/null; then
    echo "    ${sudo}apt-get install python3 python3-venv      (Debian 12, Ubuntu 24.04 or newer)" >&2
elif command -v dnf >/dev/null; then
    echo "    ${sudo}dnf install python3.12" >&2
elif command -v pacman >/dev/null; then
    echo "    ${sudo}pacman -S python" >&2
fi
echo "    uv python install 3.12      (with uv, on any Linux)" >&2
echo "Or name one: SLUICE_PYTHON=/path/to/python3.12 ./scripts/${1:-up}" >&2
exit 1
