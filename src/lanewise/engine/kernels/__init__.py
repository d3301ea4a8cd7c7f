"""Kernels in Triton. Their modules are imported where there is a GPU, and nowhere else."""
