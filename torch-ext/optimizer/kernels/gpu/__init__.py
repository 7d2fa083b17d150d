"""Kernels that only GPUs run, of Triton and for compute capability 9.0, their launches and configurations."""
