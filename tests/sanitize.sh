#!/bin/sh
# Builds the kernel with the address and undefined behaviour sanitizers in a temporary folder and fuzzes it
# there. About a minute: POSTROAD_FUZZ_SECONDS (20) of mutations, and the tests of what is compiled.
# PYTHONMALLOC=malloc puts every bytes object between the sanitizer's red zones.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cp -r "$root/src" "$root/setup.py" "$root/pyproject.toml" "$work"
find "$work/src" \( -name '*.so' -o -name '*.c' \) -delete
touch "$work/README.md" "$work/LICENSE"

flags="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g -O1"
(cd "$work" && POSTROAD_CFLAGS="$flags" "$python" setup.py -q build_ext --inplace >"$work/build.log" 2>&1) || {
    cat "$work/build.log"
    exit 1
}
# Else the tests below would skip what is not there.
ls "$work"/src/postroad/kernel/check.*.so "$work"/src/postroad/kernel/frames.*.so "$work"/src/postroad/kernel/bloom.*.so >/dev/null

cd "$root"
PYTHONPATH="$work/src" \
PYTHONMALLOC=malloc \
POSTROAD_FUZZ_SECONDS=${POSTROAD_FUZZ_SECONDS:-20} \
POSTROAD_FUZZ_SEED=${POSTROAD_FUZZ_SEED:-$(date +%s)} \
ASAN_OPTIONS=detect_leaks=0:abort_on_error=0 \
UBSAN_OPTIONS=print_stacktrace=1 \
LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" \
    "$python" -m pytest -p no:cacheprovider --timeout 300 "$@" \
    tests/property/kernel/test_fuzz.py tests/property/kernel/test_columns.py tests/property/selectors/test_match*.py tests/property/selectors/test_like.py tests/property/selectors/test_programs.py tests/unit/events/test_batch.py tests/unit/kernel/test_bloom.py \
    --deselect tests/unit/events/test_batch.py::test_the_environment_forces_the_reference
