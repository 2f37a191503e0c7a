#!/usr/bin/env bash
# RL (GRPO with DAPO's clip-higher) of the 32B SFT model, with the values published for verl: 4 hosts of 8 GPUs shared by
# training and generation. On every host `ray start ...` (see README.md), then on one of them:
#   RAY_ADDRESS=auto MODEL_ROOT=/models DATA_ROOT=/data bash examples/retool/retool_qwen2.5_32b_dapo.sh
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/launch_32b_rl.sh"

length --num-rollout 150

ALGORITHM_ARGS=(
  --advantage-estimator grpo

  # 64 prompts of 16 samples in each of 8 optimizer steps
  --rollout-batch-size 512
  --n-samples-per-prompt 16
  --global-batch-size 1024
)

launch_32b_rl dapo "$@"
