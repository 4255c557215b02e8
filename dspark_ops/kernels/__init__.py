"""Triton kernels and the device functions they share. Grids, scratch and strides belong to the op that launches them (`dspark_ops.ops`)."""
