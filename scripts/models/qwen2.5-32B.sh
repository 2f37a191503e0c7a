# Qwen2.5-32B
# The base model; -Instruct has an epsilon of 1e-6: MODEL_ARGS_NORM_EPSILON=1e-6 before sourcing.
MODEL_ARGS=(
    --swiglu
    --num-layers 64
    --hidden-size 5120
    --ffn-hidden-size 27648
    --num-attention-heads 40
    --group-query-attention
    --num-query-groups 8
    --vocab-size 152064
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon "${MODEL_ARGS_NORM_EPSILON:-1e-5}"
    --use-rotary-position-embeddings
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --add-qkv-bias
    --untie-embeddings-and-output-weights
)
