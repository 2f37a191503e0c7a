"""Counts that a trainer and a plan share: parameters, operations, GPUs, sizes of checkpoints. Imports no torch."""

MIB, GIB = 2**20, 2**30
LOGIT_CHUNK_BYTES = 2**30
"""Size that one chunk's logits have in fp32 at most, where nobody says how many positions a chunk has."""
