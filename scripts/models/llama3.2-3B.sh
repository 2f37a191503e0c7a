# Llama-3.2-3B and Llama-3.2-3B-Instruct
MODEL_ARGS=(
    --swiglu
    --num-layers 28
    --hidden-size 3072
    --ffn-hidden-size 8192
    --num-attention-heads 24
    --group-query-attention
    --num-query-groups 8
    --vocab-size 128256
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --use-rotary-position-embeddings
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-500000}"
    --use-rope-scaling
    --rope-scaling-factor 32
)
