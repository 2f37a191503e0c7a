"""Counts that a trainer and a plan share: parameters, operations, GPUs, sizes of checkpoints. Imports no torch."""

MIB, GIB = 2**20, 2**30
