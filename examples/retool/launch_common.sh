# Sourced by the launch scripts: where things are, which model, what all runs share, and the launch itself.
#
#   MODEL=tiny       the same command line on this machine's CPU, with a model of a million random weights that is made
#                    on the spot (examples/quickstart/prepare.py); everything goes to TINY_DIR
#   MODEL_ROOT, DATA_ROOT, NUM_NODES, GPUS_PER_NODE, RAY_ADDRESS, WANDB_*, PYTHON as in README.md

EXAMPLE_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
REPO_DIR="$(cd -- "${EXAMPLE_DIR}/../.." && pwd)"
MODEL="${MODEL:-}"
PYTHON="${PYTHON:-python3}"
MODEL_ROOT="${MODEL_ROOT:-${REPO_DIR}/models}"
DATA_ROOT="${DATA_ROOT:-${REPO_DIR}/data}"
TINY_ARGS=()

export PYTHONPATH="${EXAMPLE_DIR}:${REPO_DIR}${PYTHONPATH:+:${PYTHONPATH}}"
export PYTHONUNBUFFERED=1
# Megatron overlaps communication with computation only when launches keep their order.
export CUDA_DEVICE_MAX_CONNECTIONS=1

if [[ -n "${MODEL}" && "${MODEL}" != tiny ]]; then
  echo "MODEL must be empty or 'tiny', got '${MODEL}'; another model needs its own script" >&2
  exit 2
fi

if ! "${PYTHON}" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))' > /dev/null 2>&1; then
  echo "${PYTHON} has no torch: first 'source .venv/3.11/bin/activate' (made by 'make install'; your Python's version)," \
    "or set PYTHON to an interpreter that has it" >&2
  exit 2
fi

# use_model NAME: the model's flags. With MODEL=tiny, the tiny model and its data take the place of all paths.
use_model() {
  if [[ "${MODEL}" == tiny ]]; then
    source "${EXAMPLE_DIR}/tiny.sh"
  else
    source "${REPO_DIR}/scripts/models/$1.sh"
  fi
}

# checkpoints HF SAVE INTERVAL: CKPT_ARGS of a run that starts from MODEL_ROOT/HF and saves to MODEL_ROOT/SAVE, unless
# HF_CHECKPOINT, REF_LOAD, SAVE_DIR or LOAD_DIR say otherwise.
checkpoints() {
  HF_CHECKPOINT="${HF_CHECKPOINT:-${MODEL_ROOT}/$1}"
  REF_LOAD="${REF_LOAD:-${HF_CHECKPOINT}_torch_dist}"
  SAVE_DIR="${SAVE_DIR:-${MODEL_ROOT}/$2}"
  # A run that stopped goes on from what it saved; an empty folder starts from REF_LOAD.
  LOAD_DIR="${LOAD_DIR:-${SAVE_DIR}}"
  CKPT_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT}"
    --ref-load "${REF_LOAD}"
    --load "${LOAD_DIR}"
    --save "${SAVE_DIR}"
    --save-interval "$3"
  )
}

# What every SFT run on ReTool traces is.
SFT_ARGS=(
  --rollout-function-path slime_retool.rollout.sft_rollout.generate_rollout
  --input-key messages
  --tool-key tools
  --rollout-shuffle

  --loss-type sft_loss
  --calculate-per-token-loss
  --disable-compute-advantages-and-returns
  --debug-train-only
)

# What every RL run with ReTool's tools and rewards is. A checkpoint of 4B takes 52 GiB, one of 32B eight times as much.
RL_ARGS=(
  --colocate
  --save-keep 3
  # Samples for `slime-retool view`: of every tenth rollout.
  --dump-rollouts
  --dump-rollouts-every 10
  --dump-rollouts-compressed
  --input-key prompt
  --label-key label
  --apply-chat-template
  --rollout-shuffle
  --rollout-temperature 1

  --custom-generate-function-path generate_with_retool.generate
  --custom-rm-path generate_with_retool.reward_func
  --reward-key score
)

# Activations are made again in the backward pass; a micro-batch is filled up to --max-tokens-per-gpu.
MEMORY_ARGS=(
  --recompute-granularity full
  --recompute-method uniform
  --recompute-num-layers 1

  --use-dynamic-batch-size
)

# length FLAG VALUE: how long the run is, unless the caller's flags say it.
length() {
  LENGTH_ARGS=("$@")
  if [[ "${MODEL}" == tiny ]]; then
    LENGTH_ARGS=(--num-rollout 2)
  fi
}

# launch PROJECT-GROUP FLAGS...: the run itself; the caller's flags come last and win.
launch() {
  local group="$1" flag
  shift
  for flag in "$@"; do
    case "${flag}" in
      --num-rollout | --num-rollout=* | --num-epoch | --num-epoch=*) LENGTH_ARGS=() ;;  # only one of the two may be given
    esac
  done
  # Every run has a folder of its own: metrics of SFT and of RL in one metrics.jsonl would pass for one run.
  local output=(--output-dir "${SAVE_DIR}/output")
  local cluster=(
    --actor-num-nodes "${NUM_NODES}"
    --actor-num-gpus-per-node "${GPUS_PER_NODE}"
  )
  if [[ -n "${RAY_ADDRESS:-}" ]]; then
    cluster+=(--ray-address "${RAY_ADDRESS}")
  fi
  # Without a key there is no W&B; metrics always go to --output-dir as well.
  local wandb=()
  if [[ -n "${WANDB_KEY:-}${WANDB_API_KEY:-}" ]]; then
    wandb=(
      --use-wandb
      --wandb-project "${WANDB_PROJECT:-slime-retool}"
      --wandb-group "${WANDB_GROUP:-${group}}"
    )
    if [[ -n "${WANDB_KEY:-}" ]]; then
      wandb+=(--wandb-key "${WANDB_KEY}")
    fi
  fi
  local numerics=(
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
  )
  exec "${PYTHON}" -m slime_retool.train \
    ${MODEL_ARGS[@]+"${MODEL_ARGS[@]}"} \
    "${output[@]}" \
    "${cluster[@]}" \
    ${LENGTH_ARGS[@]+"${LENGTH_ARGS[@]}"} \
    ${wandb[@]+"${wandb[@]}"} \
    "${numerics[@]}" \
    "${RUN_ARGS[@]}" \
    ${TINY_ARGS[@]+"${TINY_ARGS[@]}"} \
    "$@"
}
