"""The runner for GPUs: a step is launched by one thread and finished by another, and nothing in between waits.

It runs on the CPU as well, with the kernels in Triton's interpreter: all that is CUDA's alone is in `accelerator`.
"""
