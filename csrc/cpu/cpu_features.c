/* cpu_features.c - what the processor can do, and the choice of a variant. */
#include "cpu_features.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "cpu_internal.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#define CHOICE_VARIABLE "VLLM_MEGAATTN_CPU"

struct candidate {
    const struct mx_cpu_variant *variant;
    bool (*supported)(void);
    bool on_demand;    /* only if VLLM_MEGAATTN_CPU asks for it */
    const char *needs; /* for messages and mx_cpu_feature_list */
};

static bool always(void) { return true; }

#if defined(__x86_64__)

/* __builtin_cpu_supports also asks whether the operating system saves the wide registers. It knows F16C only in
 * recent compilers, so that bit (leaf 1, ECX bit 29) is read here. */
static bool has_avx2(void) {
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1) && __builtin_cpu_supports("avx2") &&
           __builtin_cpu_supports("fma");
}

static bool has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

/* One lane's pair of products in the order of step 2. The two orders differ here: 2^24 + 1 is a tie that rounds down,
 * so 1 + 2^24 - 2^24 leaves 0 or 1. Intel documents the upper element first; a processor that adds the lower element
 * first, or both at once, must not use this variant. */
__attribute__((target("avx512f,avx512bw,avx512bf16"))) static bool pairs_add_upper_first(void) {
    const __m512i one = _mm512_set1_epi32(0x3F803F80);
    const __m512i upper_big = _mm512_set1_epi32((int)0xCB803F80u); /* upper -2^24, lower 1 */
    const __m512i lower_big = _mm512_set1_epi32((int)0x3F80CB80u); /* upper 1, lower -2^24 */
    const __m512 big = _mm512_set1_ps(16777216.0f);
    __m512 first = _mm512_dpbf16_ps(big, (__m512bh)one, (__m512bh)upper_big);  /* (2^24 - 2^24) + 1 = 1 */
    __m512 second = _mm512_dpbf16_ps(big, (__m512bh)one, (__m512bh)lower_big); /* (2^24 + 1) - 2^24 = 0 */
    return _mm512_cmpeq_ps_mask(first, _mm512_set1_ps(1.0f)) == 0xFFFF &&
           _mm512_cmpeq_ps_mask(second, _mm512_setzero_ps()) == 0xFFFF;
}

static bool has_avx512bf16(void) {
    return has_avx512() && __builtin_cpu_supports("avx512bf16") && pairs_add_upper_first();
}

#endif

/* From the simplest to the widest; the last one that is supported and not `on_demand` is the best. avx512bf16 is on
 * demand: VDPBF16PS multiplies twice as many pairs as an FMA, but on Xeon (Emerald Rapids, measured) one starts every
 * second cycle against two FMAs a cycle, so FP32 is faster. It is for processors where that is otherwise. */
static const struct candidate CANDIDATES[] = {
    {&mx_cpu_scalar, always, false, "any processor"},
#if defined(__x86_64__)
    {&mx_cpu_avx2, has_avx2, false, "avx2 fma f16c"},
    {&mx_cpu_avx512, has_avx512, false, "avx2 fma f16c avx512f avx512bw avx512vl avx512dq"},
    {&mx_cpu_avx512bf16, has_avx512bf16, true, "avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512bf16"},
#endif
};
enum { NUM_CANDIDATES = sizeof CANDIDATES / sizeof CANDIDATES[0] };

/* The whole mutable state of the backend. Threads that get here at once compute the same pointer. */
static _Atomic(const struct mx_cpu_variant *) chosen;

static const struct mx_cpu_variant *best_variant(void) {
    const struct mx_cpu_variant *best = NULL;
    for (int i = 0; i < NUM_CANDIDATES; i++) {
        if (!CANDIDATES[i].on_demand && CANDIDATES[i].supported()) {
            best = CANDIDATES[i].variant;
        }
    }
    return best;
}

const struct mx_cpu_variant *mx_cpu_choose(const struct mx_exec *exec) {
    const struct mx_cpu_variant *variant = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (variant) {
        return variant;
    }

    /* No wish: the best */
    const char *wish = getenv(CHOICE_VARIABLE);
    if (!wish || !*wish) {
        variant = best_variant();
    }

    /* A wish must be known and possible */
    for (int i = 0; wish && *wish && i < NUM_CANDIDATES; i++) {
        if (strcmp(wish, CANDIDATES[i].variant->name) != 0) {
            continue;
        }
        if (!CANDIDATES[i].supported()) {
            mx_cpu_fail(exec, MX_UNSUPPORTED, CHOICE_VARIABLE "=%s needs a processor with %s, this one has: %s", wish,
                        CANDIDATES[i].needs, mx_cpu_feature_list());
            return NULL;
        }
        variant = CANDIDATES[i].variant;
    }
    if (!variant) {
        mx_cpu_fail(exec, MX_UNSUPPORTED,
                    CHOICE_VARIABLE " must be scalar, avx2, avx512 or avx512bf16 (or unset for the best), got '%s'",
                    wish);
        return NULL;
    }
    atomic_store_explicit(&chosen, variant, memory_order_relaxed);
    return variant;
}

const char *mx_cpu_variant_name(void) {
    const struct mx_exec silent = {.err = NULL};
    const struct mx_cpu_variant *variant = mx_cpu_choose(&silent);
    return variant ? variant->name : "none";
}

const char *mx_cpu_feature_list(void) {
    const char *list = "none";
    for (int i = 1; i < NUM_CANDIDATES; i++) {
        list = CANDIDATES[i].supported() ? CANDIDATES[i].needs : list;
    }
    return list;
}
