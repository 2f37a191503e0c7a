# Qwen2.5-7B and Qwen2.5-7B-Instruct
MODEL_ARGS=(
    --swiglu
    --num-layers 28
    --hidden-size 3584
    --ffn-hidden-size 18944
    --num-attention-heads 28
    --group-query-attention
    --num-query-groups 4
    --vocab-size 152064
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --use-rotary-position-embeddings
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --add-qkv-bias
    --untie-embeddings-and-output-weights
)
