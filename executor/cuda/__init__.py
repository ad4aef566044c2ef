"""The runner for GPUs: one thread launches a step and another finishes it, and launching never waits for a result.

It runs on the CPU as well, with the kernels in Triton's interpreter: everything specific to CUDA is in `accelerator`.
"""
