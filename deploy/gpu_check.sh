#!/usr/bin/env bash
# Everything that only a machine with an NVIDIA GPU can tell about the ExLlamaV2 engine, in one run under ten minutes and
# without a network: see `deploy/gpu_check.sh --help` and docs/exllamav2.md.
cd "$(dirname -- "$(readlink -f -- "$0")")/.." || exit 1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" # also where PYTHONSAFEPATH is set
exec "${PYTHON:-python3}" -m scripts.gpu_check "$@"
