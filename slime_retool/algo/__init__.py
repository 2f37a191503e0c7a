"""The mathematics of training: tensors in, tensors out. No megatron, no processes, no configuration object.

`advantages` is plain Python, so that the rollout side can use it without torch.
"""
