#!/usr/bin/env bash
# RL (GRPO with DAPO's clip-higher) of the 32B SFT model, with the values published for verl: 4 hosts of 8 GPUs shared by
# training and generation. On every host `ray start ...` (see README.md), then on one of them:
#   RAY_ADDRESS=auto MODEL_ROOT=/models DATA_ROOT=/data bash examples/retool/retool_qwen2.5_32b_dapo.sh
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/launch_common.sh"

TINY_DATA=rl.jsonl
use_model qwen2.5-32B
length --num-epoch 1

HF_CHECKPOINT="${HF_CHECKPOINT:-${MODEL_ROOT}/qwen2.5-32b-sft}"
REF_LOAD="${REF_LOAD:-${HF_CHECKPOINT}_torch_dist}"
SAVE_DIR="${SAVE_DIR:-${MODEL_ROOT}/qwen2.5-32b-sft_dapo}"
LOAD_DIR="${LOAD_DIR:-${SAVE_DIR}}"
PROMPT_DATA="${PROMPT_DATA:-${DATA_ROOT}/dapo-math-17k/dapo-math-17k.jsonl}"
EVAL_DATA="${EVAL_DATA:-${DATA_ROOT}/aime-2025/aime-2025.jsonl}"
NUM_NODES="${NUM_NODES:-4}"
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"

CKPT_ARGS=(
  --hf-checkpoint "${HF_CHECKPOINT}"
  --ref-load "${REF_LOAD}"
  --load "${LOAD_DIR}"
  --save "${SAVE_DIR}"
  --save-interval 30
)

ROLLOUT_ARGS=(
  --colocate
  --prompt-data "${PROMPT_DATA}"
  --input-key prompt
  --label-key label
  --apply-chat-template
  --rollout-shuffle
  --reward-key score
  --rollout-batch-size 512
  --n-samples-per-prompt 16
  --rollout-max-prompt-len 2048
  --rollout-max-response-len 16384
  --rollout-max-context-len 18432
  --rollout-temperature 1
  --max-turns 8

  # 64 prompts of 16 samples in each of 8 optimizer steps
  --global-batch-size 1024
)

EVAL_ARGS=(
  --eval-interval 5
  --eval-prompt-data aime25 "${EVAL_DATA}"
  --n-samples-per-eval-prompt 30
  --eval-temperature 1
  --eval-top-p 0.6
)

PERF_ARGS=(
  --tensor-model-parallel-size 8
  --sequence-parallel

  --recompute-granularity full
  --recompute-method uniform
  --recompute-num-layers 1

  --use-dynamic-batch-size
  --max-tokens-per-gpu 18432
)

DAPO_ARGS=(
  --advantage-estimator grpo
  --eps-clip 0.2
  --eps-clip-high 0.28
  --eps-clip-c 10.0
  --calculate-per-token-loss
)

OPTIMIZER_ARGS=(
  --optimizer adam
  --lr 1e-6
  --lr-decay-style constant
  --weight-decay 0.01
  --adam-beta1 0.9
  --adam-beta2 0.999
)

SGLANG_ARGS=(
  --rollout-num-gpus-per-engine 4
  --sglang-mem-fraction-static 0.8
)

CUSTOM_ARGS=(
  --custom-generate-function-path generate_with_retool.generate
  --custom-rm-path generate_with_retool.reward_func
)

RUN_ARGS=(
  "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" "${PERF_ARGS[@]}" "${DAPO_ARGS[@]}"
  "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "${CUSTOM_ARGS[@]}"
)
launch qwen2.5-32B-retool-dapo "$@"
