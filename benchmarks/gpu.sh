#!/usr/bin/env bash
# Decode speed, update speed and a whole Countdown step on one GPU, in at most 5 minutes.
#
#   bash benchmarks/gpu.sh                 # Qwen2.5-0.5B and 3B shapes, random weights
#   SIZE=nano bash benchmarks/gpu.sh       # the same program on a CPU, in under a minute
#
# PYTHON is the interpreter to use. What does not fit into LIMIT seconds is cut off, the largest
# shape's whole step first. Prints a JSON line a part.
set -u
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
LIMIT=${LIMIT:-300}
SECONDS=0
failed=0

measure() {
  local left=$((LIMIT - SECONDS))
  if [ "$left" -le 0 ]; then
    echo "no time left for: $*" >&2
    failed=1
    return
  fi
  timeout "$left" "$PYTHON" benchmarks/gpu.py "$@" || { echo "failed: $*" >&2; failed=1; }
}

for size in ${SIZE:-0.5b 3b}; do
  measure "$size" --only decode update
  measure "$size" --only transformers
done
for size in ${SIZE:-0.5b 3b}; do
  measure "$size" --only step
done
exit $failed
