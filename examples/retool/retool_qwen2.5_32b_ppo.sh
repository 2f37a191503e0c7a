#!/usr/bin/env bash
# RL (PPO with a critic) of the 32B SFT model, with the values published for verl: 4 hosts of 8 GPUs shared by
# training and generation. On every host `ray start ...` (see README.md), then on one of them:
#   RAY_ADDRESS=auto MODEL_ROOT=/models DATA_ROOT=/data bash examples/retool/retool_qwen2.5_32b_ppo.sh
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/launch_32b_rl.sh"

length --num-rollout 250

ALGORITHM_ARGS=(
  --advantage-estimator ppo
  --gamma 1.0
  --lambd 1.0
  --normalize-advantages
  --critic-lr 2e-6
  --value-clip 0.5
  --num-critic-only-steps 20

  # 4 optimizer steps
  --rollout-batch-size 1024
  --n-samples-per-prompt 1
  --global-batch-size 256
)

launch_32b_rl ppo "$@"
