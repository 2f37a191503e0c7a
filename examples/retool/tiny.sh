# Sourced by launch_common.sh with MODEL=tiny: makes the tiny model and its data (once), and sets the sizes that suit a CPU.
TINY_DIR="${TINY_DIR:-${REPO_DIR}/outputs/tiny}"
"${PYTHON}" "${REPO_DIR}/examples/quickstart/prepare.py" --output-dir "${TINY_DIR}" >&2

MODEL_ARGS=()  # read from the checkpoint's config.json
HF_CHECKPOINT="${HF_CHECKPOINT:-${TINY_DIR}/base}"
REF_LOAD="${REF_LOAD:-${TINY_DIR}/base_torch_dist}"
SAVE_DIR="${SAVE_DIR:-${TINY_DIR}/$(basename "$0" .sh)}"
PROMPT_DATA="${PROMPT_DATA:-${TINY_DIR}/data/${TINY_DATA}}"
EVAL_DATA="${EVAL_DATA:-${TINY_DIR}/data/eval.jsonl}"
NUM_NODES=1
GPUS_PER_NODE=1

TINY_ARGS=(
  --device cpu
  --tensor-model-parallel-size 1
  --pipeline-model-parallel-size 1
  --context-parallel-size 1
  --max-tokens-per-gpu 4096
  --rollout-batch-size 4
  --rollout-max-prompt-len 128
  --rollout-max-context-len 256
)
if [[ "${TINY_DATA}" == rl.jsonl ]]; then
  TINY_ARGS+=(
    --n-samples-per-prompt 4
    --global-batch-size 8
    --rollout-num-gpus-per-engine 1
    --sglang-mem-fraction-static 0.1
    --rollout-max-response-len 64
    --max-observation-tokens 32
    --tool-concurrency 4
    --eval-max-response-len 64
    --n-samples-per-eval-prompt 1
    --num-critic-only-steps 0
  )
else
  TINY_ARGS+=(--global-batch-size 4)
fi
