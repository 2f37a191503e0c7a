# Qwen1.5-MoE-A2.7B and Qwen1.5-MoE-A2.7B-Chat. MODEL_ARGS_ROTARY_BASE replaces the rotary base.
MODEL_ARGS=(
    --swiglu
    --num-layers 24
    --hidden-size 2048
    --ffn-hidden-size 5632
    --num-attention-heads 16
    --kv-channels 128
    --vocab-size 151936
    --disable-bias-linear
    --add-qkv-bias
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --use-rotary-position-embeddings
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --untie-embeddings-and-output-weights
    --num-experts 60
    --moe-router-topk 4
    --moe-ffn-hidden-size 1408
    --moe-router-pre-softmax
    --moe-shared-expert-intermediate-size 5632
    --moe-shared-expert-gate
)
