#!/usr/bin/env bash
# One RL step here and in TRL 1.16.0, at equal work, on the same GPU: see trl.md.
#
#   MODEL=DIR TRL_SITE=DIR QUESTIONS=FILE bash benchmarks/peers/trl.sh [work | ours | peer | compare | all]
#
#   MODEL       a Hugging Face checkpoint          TRL_SITE    the folder of trl and accelerate
#   QUESTIONS   train/gsm8k.jsonl of the reference run's prepared data
#   WORK, RESULT (peer.json), STEPS, PROMPTS, SAMPLES, LONGEST (of every answer), ATTENTION, PYTHON
set -euo pipefail
PEER=trl
LONGEST="${LONGEST:-256}"
SHORTEST="${LONGEST}"
ATTENTION="${ATTENTION:-sdpa}"
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

peer() {
  PYTHONPATH="${TRL_SITE}:${PYTHONPATH}" "${PYTHON}" "${HERE}/trl_step.py" --model "${MODEL}" \
    --prompt-data "${WORK}/ours.jsonl" --output "${WORK}/trl.jsonl" --device "${DEVICE}" --attention "${ATTENTION}" \
    --steps "${STEPS}" --prompts "${PROMPTS}" --samples "${SAMPLES}" --length "${LONGEST}" "$@"
}

run "$@"
