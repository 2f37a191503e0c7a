# Qwen3-30B-A3B and Qwen3-30B-A3B-Base. MODEL_ARGS_ROTARY_BASE replaces the rotary base.
MODEL_ARGS=(
    --swiglu
    --num-layers 48
    --hidden-size 2048
    --ffn-hidden-size 6144
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 4
    --kv-channels 128
    --vocab-size 151936
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --use-rotary-position-embeddings
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --qk-layernorm
    --untie-embeddings-and-output-weights
    --num-experts 128
    --moe-router-topk 8
    --moe-ffn-hidden-size 768
)
