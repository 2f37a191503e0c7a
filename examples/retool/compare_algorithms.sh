#!/usr/bin/env bash
# GRPO, DAPO, GSPO, CISPO, RLOO, REINFORCE++ and PPO on the quickstart's task, from one SFT checkpoint, on a CPU:
#   bash examples/retool/compare_algorithms.sh [--algorithms grpo ppo] [--short] [--output-dir DIR]
set -euo pipefail
EXAMPLE_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
REPO_DIR="$(cd -- "${EXAMPLE_DIR}/../.." && pwd)"
export PYTHONPATH="${REPO_DIR}${PYTHONPATH:+:${PYTHONPATH}}"
exec "${PYTHON:-python3}" "${REPO_DIR}/examples/quickstart/compare.py" "$@"
