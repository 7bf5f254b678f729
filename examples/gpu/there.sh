#!/usr/bin/env bash
# On the machine with the GPU: unpacks what was brought, runs stages, and keeps all that they say in one small archive.
#   bash examples/gpu/there.sh PIECES ARCHIVE [arguments of run.py]
set -uo pipefail
cd "$(dirname "$0")/../.."
pieces=$1 archive=$2 to=${TO:-/tmp/verl-ext-gpu}
shift 2
python3 examples/gpu/kit.py install "$pieces" --to "$to" || exit
. "$to/env.sh"
export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda} PYTHONUNBUFFERED=1
# Models of the demo that were made before save their half minute.
if [ -d "$pieces/made" ]; then VERL_EXT_HOME=$(realpath "$pieces/made") && export VERL_EXT_HOME; fi
mkdir -p "$to/run"
keep() {
    tar -C "$to/run" --exclude=made --exclude=checkpoints --exclude=rollouts --exclude=rows -czf "$archive.new" . 2>/dev/null
    mv "$archive.new" "$archive"
}
# As they go: the command may be killed at any time.
(while sleep 5; do keep; done) &
trap "kill $!; keep" EXIT
python3 examples/gpu/run.py --out "$to/run" "$@"
