# Mixtral-8x7B-v0.1 and Mixtral-8x7B-Instruct-v0.1. MODEL_ARGS_ROTARY_BASE replaces the rotary base.
MODEL_ARGS=(
    --swiglu
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --vocab-size 32000
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --use-rotary-position-embeddings
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --untie-embeddings-and-output-weights
    --num-experts 8
    --moe-router-topk 2
    --moe-ffn-hidden-size 14336
)
