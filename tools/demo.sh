#!/usr/bin/env bash
# The main job on the example request, offline: one recommendation, then the preview of its best plan.
set -euo pipefail
cd "$(dirname "$0")/.."
gpufleet=.venv/bin/gpufleet
plans=out/demo-plans.json
mkdir -p out

say() { printf '\n== %s\n' "$1"; }

say "The request (examples/request.yaml)"
cat examples/request.yaml

say "Which fleet trains it cheapest within budget and deadline? (gpufleet recommend, shipped catalog)"
"$gpufleet" recommend examples/request.yaml --save "$plans"

say "What would the best plan create, and what would it cost? (gpufleet preview, no account, no Pulumi CLI)"
"$gpufleet" preview "$plans"

say "The plans are in $plans. To stand up plan 1 for real: gpufleet up $plans"
