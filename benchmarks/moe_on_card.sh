#!/usr/bin/env bash
# All that the MoE backend needs an NVIDIA GPU for:
# moe_on_card.sh OUT [all|test|tune|layers|serve] [auto|fp8].
# Run in the repository's root. "all" leaves out "serve" and takes about four minutes. Limits, in
# seconds: LIMIT_TEST, LIMIT_TUNE (of each model), LIMIT_LAYERS (of each), LIMIT_SERVE (of each).
# "fp8" does it with experts in fp8, and marks the names of its files.
# PYTHON is what runs everything; with packages that are not installed, set PYTHONPATH.
set -u
out=${1:?a folder for the results}
what=${2:-all}
weights=${3:-auto}
known() { # known WORD ALLOWED...
  local word=$1 one
  shift
  for one in "$@"; do [[ $word == "$one" ]] && return; done
  echo "moe_on_card.sh: '$word' is none of $(printf '%s, ' "$@" | sed 's/, $//')" >&2
  exit 2
}
known "$what" all test tune layers serve
known "$weights" auto fp8
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1
mkdir -p "$out"
models=$(mktemp -d)
trap 'rm -rf "$models"' EXIT
mark="" tests=moe
[[ $weights == auto ]] || mark=-$weights tests="fp8 or quantized or compiled"
declare -A sizes=([qwen]=Qwen3-30B-A3B [mixtral]=Mixtral-8x7B)

wanted() { [[ $what == "$1" || ($what == all && $1 != serve) ]]; }
begin() { echo "== $1 $(date +%T)"; }
config() { "$python" -m minisgl bench write-config "$1" "$models/$1" >/dev/null; }

if wanted test; then
  begin test
  timeout "${LIMIT_TEST:-150}" "$python" -m pytest -m gpu tests/gpu/test_moe.py -q -n 8 -p no:benchmark \
    -k "$tests" -p no:cacheprovider >"$out/moe-tests$mark.txt" 2>&1
  echo "pytest: exit $?"
  grep -E "^(E  |FAILED|ERROR)|passed|failed" "$out/moe-tests$mark.txt" | cut -c1-200 | sort | uniq -c |
    sort -rn | head -40
fi
if wanted tune; then
  for name in qwen mixtral; do
    begin "tune $name"
    config "${sizes[$name]}"
    # The tokens that are compared with others first: the limit may end it before the rest.
    timeout $((${LIMIT_TUNE:-55} + 25)) "$python" -m minisgl tune moe \
      --model "$models/${sizes[$name]}" --load-format dummy --folder "$out/tuned" \
      --moe-weights-dtype "$weights" \
      --tokens 256,1,16,64,4096,2,4,8,32,128,512,1024,2048 --time-limit "${LIMIT_TUNE:-55}" \
      --log-level debug 2>"$out/tune-$name$mark.log" || tail -n 3 "$out/tune-$name$mark.log"
  done
fi
if wanted layers; then
  for name in qwen mixtral; do
    begin "layers $name"
    tiles=${name^^}_TILES
    [[ $weights == auto ]] || tiles=NO_TILES
    timeout "${LIMIT_LAYERS:-60}" "$python" benchmarks/moe_layers.py --model "${sizes[$name]}" \
      --tuned-folder "$out/tuned" --json "$out/moe-layers-$name$mark.json" \
      --weights-dtype "$weights" \
      ${!tiles:+--published "${!tiles}"} 2>&1
  done
fi
if wanted serve; then
  config Qwen3-30B-A3B
  folder="backend_options.triton.tuned_folder=$(realpath "$out")/tuned"
  for preset in minisgl-offline one-request; do
    begin "serve $preset"
    timeout "${LIMIT_SERVE:-120}" "$python" -m minisgl bench offline --preset "$preset" \
      --model "$models/Qwen3-30B-A3B" --load-format dummy --set "$folder" \
      --moe-weights-dtype "$weights" --json "$out/moe-$preset$mark.json" \
      2>"$out/moe-$preset$mark.log" || tail -n 5 "$out/moe-$preset$mark.log"
    grep -E "experts are held|of which weights" "$out/moe-$preset$mark.log" || true
  done
fi
begin end
