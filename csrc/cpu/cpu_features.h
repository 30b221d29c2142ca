/*
 * cpu_features.h - which variant of the CPU kernels runs here.
 *
 * The best variant that the processor and the operating system support is chosen once per process, at the first call
 * (`info` and the self-check of a GPU are such calls too). The environment variable VLLM_MEGAATTN_CPU = scalar | avx2 |
 * avx512 | avx512bf16 chooses another. It is read then and never again, so that all calls of a process run one variant;
 * only a value that names no variant of this processor is refused, and read anew by the next call.
 * All variants give the same bits (cpu_internal.h), so the choice is about time only.
 */
#ifndef VLLM_MEGAATTN_CPU_FEATURES_H
#define VLLM_MEGAATTN_CPU_FEATURES_H

/* Name of the variant in use, or "none" while VLLM_MEGAATTN_CPU asks for one that does not exist here. */
const char *mx_cpu_variant_name(void);

/* What was found of the instruction sets that the variants need, as one constant string. */
const char *mx_cpu_feature_list(void);

#endif /* VLLM_MEGAATTN_CPU_FEATURES_H */
