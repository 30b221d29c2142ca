/*
 * ptx_sm100.cuh - what Blackwell (sm_100a, sm_103a) adds outside the tensor cores, one instruction per wrapper.
 *
 * Barriers, copies, programmatic dependent launch and clusters are as on Hopper and come from ptx_sm90.cuh, under the
 * same names; the tensor cores' own instructions are in tcgen05_sm100.cuh.
 */
#ifndef VLLM_MEGAATTN_PTX_SM100_CUH
#define VLLM_MEGAATTN_PTX_SM100_CUH

#include "ptx_sm90.cuh"

/* ---- mbarrier -------------------------------------------------------------------------------------------- */

/* Arrival on a barrier of any block of the cluster that also publishes what this thread did or saw done before.
 * NOTE: costs a fence of the whole GPU (see ptx_sm90.cuh); for once a tile, not once a stage. */
MX_DEVICE void mbarrier_arrive_release_cluster(uint32_t bar) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}

/* ---- the copy engine ------------------------------------------------------------------------------------- */

/* Loads into this block's shared memory and counts the bytes on a barrier that may be its own or that of the other
 * block of its pair (%cluster_ctarank differs in the last bit only): cta_group::2 allows the second. `bar` is an
 * address of the shared::cluster window, from map_to_rank. */
MX_DEVICE void tma_load_3d_pair(uint32_t dst, const CUtensorMap *map, int x, int y, int z, uint32_t bar) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2 "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(dst),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(bar)
                 : "memory");
}

/* ---- shared memory by address ---------------------------------------------------------------------------- */

MX_DEVICE void store_shared_u8(uint32_t address, uint32_t v) {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

MX_DEVICE void store_shared_v4_u32(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

MX_DEVICE void store_shared_v4_f32(uint32_t address, float a, float b, float c, float d) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b), "f"(c), "f"(d)
                 : "memory");
}

/* ---- registers ------------------------------------------------------------------------------------------- */

/* Products of two pairs of BF16, each rounded to nearest even. */
MX_DEVICE uint32_t multiply_bf16_pair(uint32_t a, uint32_t b) {
    uint32_t v;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}

#endif /* VLLM_MEGAATTN_PTX_SM100_CUH */
