#!/usr/bin/env bash
# SFT of Qwen2.5-32B-Instruct on ReTool traces, with the values published for verl: 2 hosts of 8 GPUs. On every host:
#   ray start ...      (see README.md), then on one of them
#   RAY_ADDRESS=auto MODEL_ROOT=/models DATA_ROOT=/data bash examples/retool/retool_qwen2.5_32b_sft.sh
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/launch_common.sh"

TINY_DATA=sft.parquet
MODEL_ARGS_NORM_EPSILON="${MODEL_ARGS_NORM_EPSILON:-1e-6}"  # of -Instruct
use_model qwen2.5-32B
length --num-epoch 6
checkpoints Qwen2.5-32B-Instruct Qwen2.5-32B-Instruct_sft 62
NUM_NODES="${NUM_NODES:-2}"
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"

DATA_ARGS=(
  --prompt-data "${PROMPT_DATA:-${DATA_ROOT}/retool/ReTool-SFT.parquet}"
  --rollout-batch-size 32
  --global-batch-size 32
  --rollout-max-context-len 16384
)

PERF_ARGS=(
  --tensor-model-parallel-size 8
  --sequence-parallel
  --max-tokens-per-gpu 16384
)

OPTIMIZER_ARGS=(
  --optimizer adam
  --lr 1e-5
  --lr-decay-style cosine
  --lr-warmup-fraction 0.1
  --weight-decay 0.01
  --adam-beta1 0.9
  --adam-beta2 0.95
)

RUN_ARGS=(
  "${CKPT_ARGS[@]}" "${SFT_ARGS[@]}" "${MEMORY_ARGS[@]}" "${DATA_ARGS[@]}" "${PERF_ARGS[@]}" "${OPTIMIZER_ARGS[@]}"
)
launch qwen2.5-32B-retool-sft "$@"
