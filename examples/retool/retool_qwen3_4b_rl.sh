#!/usr/bin/env bash
# RL (GRPO) of the SFT model with a Python sandbox in its rollouts: one host, 4 GPUs shared by training and
# generation. Further flags may follow and win:
#   MODEL_ROOT=/models DATA_ROOT=/data bash examples/retool/retool_qwen3_4b_rl.sh --num-rollout 100
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/launch_common.sh"

TINY_DATA=rl.jsonl
use_model qwen3-4B-Instruct-2507
length --num-rollout 3000
checkpoints qwen3-4b-sft qwen3-4b-sft_rl 20
NUM_NODES="${NUM_NODES:-1}"
GPUS_PER_NODE="${GPUS_PER_NODE:-4}"

ROLLOUT_ARGS=(
  --prompt-data "${PROMPT_DATA:-${DATA_ROOT}/dapo-math-17k/dapo-math-17k.jsonl}"
  --rollout-batch-size 32
  --n-samples-per-prompt 8
  --rollout-max-response-len 8192
  # Of prompt and response together, in training and in evaluation: what one GPU packs.
  --rollout-max-context-len 9216

  --global-batch-size 256
  --balance-data
)

EVAL_ARGS=(
  --eval-interval 20
  --eval-prompt-data aime "${EVAL_DATA:-${DATA_ROOT}/aime-2024/aime-2024.jsonl}"
  --n-samples-per-eval-prompt 16
  --eval-max-response-len 16384
  --eval-top-p 1
)

PERF_ARGS=(
  --tensor-model-parallel-size 2
  --sequence-parallel
  --pipeline-model-parallel-size 1
  --context-parallel-size 1
  --expert-model-parallel-size 1
  --expert-tensor-parallel-size 1
  --max-tokens-per-gpu 9216
)

GRPO_ARGS=(
  --advantage-estimator grpo
  --use-kl-loss
  --kl-loss-coef 0.00
  --kl-loss-type low_var_kl
  --entropy-coef 0.00
  --eps-clip 0.2
  --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(
  --optimizer adam
  --lr 1e-6
  --lr-decay-style constant
  --weight-decay 0.1
  --adam-beta1 0.9
  --adam-beta2 0.98
)

SGLANG_ARGS=(
  --rollout-num-gpus-per-engine 2
  --sglang-mem-fraction-static 0.7
)

RUN_ARGS=(
  "${CKPT_ARGS[@]}" "${RL_ARGS[@]}" "${MEMORY_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" "${PERF_ARGS[@]}"
  "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}"
)
launch qwen3-4B-retool-rl "$@"
