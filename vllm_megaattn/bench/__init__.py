"""`python -m vllm_megaattn bench`: this package beside what else a user could run, in one interleaved run on one GPU.

workload  shapes, weights and activations; the read floor
timing    CUDA graphs over rotating weight copies, interleaved rounds
ours      the contenders of this package
peers     public kernels: torch, cuBLASLt, Triton, and DeepGEMM, vLLM, Humming, FlashInfer where they can be imported
report    table, JSON, plots
"""
