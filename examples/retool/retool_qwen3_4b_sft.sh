#!/usr/bin/env bash
# SFT of Qwen3-4B-Instruct-2507 on ReTool traces: one host, 8 GPUs. Further flags may follow and win:
#   MODEL_ROOT=/models DATA_ROOT=/data bash examples/retool/retool_qwen3_4b_sft.sh --num-epoch 1
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/launch_common.sh"

TINY_DATA=sft.parquet
use_model qwen3-4B-Instruct-2507
length --num-epoch 3
checkpoints Qwen3-4B-Instruct-2507 Qwen3-4B-Instruct-2507_sft 1000
NUM_NODES="${NUM_NODES:-1}"
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"

DATA_ARGS=(
  --prompt-data "${PROMPT_DATA:-${DATA_ROOT}/retool/ReTool-SFT.parquet}"
  --rollout-batch-size 128
  --global-batch-size 128
)

PERF_ARGS=(
  --tensor-model-parallel-size 1
  --sequence-parallel
  --pipeline-model-parallel-size 1
  --context-parallel-size 1
  --expert-model-parallel-size 1
  --expert-tensor-parallel-size 1
  --max-tokens-per-gpu 9216
)

OPTIMIZER_ARGS=(
  --optimizer adam
  --lr 1e-5
  --lr-decay-style cosine
  --min-lr 1e-6
  --lr-warmup-fraction 0.1
  --weight-decay 0.1
  --adam-beta1 0.9
  --adam-beta2 0.95
)

RUN_ARGS=(
  "${CKPT_ARGS[@]}" "${SFT_ARGS[@]}" "${MEMORY_ARGS[@]}" "${DATA_ARGS[@]}" "${PERF_ARGS[@]}" "${OPTIMIZER_ARGS[@]}"
)
launch qwen3-4B-retool-sft "$@"
