"""GPU path of a training step on any machine: an emulated GPU whose memory is host memory, and a recorder of its work.

Tensors on the emulated GPU are plain CPU tensors whose storage is marked. Python sees them on the device `cuda:0`.
Therefore the package takes all branches for GPUs. Triton's kernels run in its interpreter. CUDA graphs are captured
and replayed.
"""
