"""`python -m vllm_megaattn bench`: this package beside what else a user could run, in one interleaved run on one GPU.

workload  shapes, weights and activations
timing    CUDA graphs over rotating weight copies, interleaved rounds
ours      the contenders of this package
peers     public kernels: torch, cuBLASLt, Triton, and DeepGEMM, vLLM, Humming, FlashInfer where they can be imported
marks     floors and ceilings: reading the weights, copying the activations, FP8 products without scales
report    table, JSON, plots
"""
