#!/usr/bin/env bash
# Applies each patch here to a copy of a checkout of verl (or of the folder that holds an installed one), and runs the
# patch's test: without the patch's code, where it has some, the test must fail, and with it pass.
#   bash examples/upstream/check.sh CHECKOUT [PATCH...]     PYTHON=.venv/bin/python: with verl's dependencies and pytest
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
checkout=$(cd "${1:?a checkout of verl}" && pwd)
shift
python=${PYTHON:-python}
export GIT_CEILING_DIRECTORIES=/ OMP_NUM_THREADS=1 VERL_USE_EXTERNAL_PLUGINS=none
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

run() { # a tree, and a test in it
    (cd "$1" && PYTHONPATH=$1 "$python" -m pytest -q -W ignore -p no:cacheprovider "$2" >"$work/log" 2>&1)
}

for patch in "${@:-$here/*.patch}"; do
    for file in $patch; do
        tree=$work/$(basename "$file" .patch)
        mkdir "$tree"
        cp -r "$checkout/verl" "$tree/verl"
        test=$(sed -n 's#^+++ b/\(tests/.*\)#\1#p' "$file")
        git -C "$tree" apply --include='tests/*' "$file"
        if grep -q '^+++ b/verl/' "$file"; then
            if run "$tree" "$test"; then echo "$(basename "$file"): the test passes without it" >&2; exit 1; fi
            git -C "$tree" apply --include='verl/*' "$file"
        fi
        run "$tree" "$test" || { cat "$work/log" >&2; echo "$(basename "$file"): the test fails" >&2; exit 1; }
        echo "$(basename "$file"): $(tail -1 "$work/log")"
        rm -rf "$tree"
    done
done
