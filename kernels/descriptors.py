"""Tensor descriptors over `[B, H, N, D]` tensors: what the kernels load through the tensor memory accelerator."""

import torch


def can_describe(x: torch.Tensor) -> bool:
    """Say whether a tensor descriptor can address `[B, H, N, D]` x: 16-byte aligned base and strides."""
    size = x.element_size()
    return x.data_ptr() % 16 == 0 and all(s * size % 16 == 0 and s > 0 for s in x.stride()[:3])


def describe(x: torch.Tensor, rows: int, block_d: int) -> object:
    """Describe `[B, H, N, D]` x in boxes of rows by block_d, out-of-range elements read as zero."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, block_d])
