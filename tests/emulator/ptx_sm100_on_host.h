/*
 * ptx_sm100_on_host.h - stands in for the instructions of csrc/cuda/ptx_sm100.cuh and tcgen05_sm100.cuh, like
 * ptx_sm90_on_host.h for the Hopper headers.
 */
#ifndef EMULATOR_PTX_SM100_ON_HOST_H
#define EMULATOR_PTX_SM100_ON_HOST_H

#include "ptx_sm90_on_host.h"
#include "tcgen05.h"

/* ---- ptx_sm100.cuh --------------------------------------------------------------------------------------- */

MX_DEVICE void mbarrier_arrive_release_cluster(uint32_t bar) {
    emu::mbarrier_arrive(bar, 1, true, emu::Scope::Cluster);
}

MX_DEVICE void tma_load_3d_pair(uint32_t dst, const CUtensorMap *map, int x, int y, int z, uint32_t bar) {
    const int at[] = {x, y, z};
    emu::tma_load_pair(dst, map, at, 3, bar);
}

MX_DEVICE void store_shared_u8(uint32_t address, uint32_t v) {
    const uint8_t byte = (uint8_t)v;
    emu::shared_store(address, &byte, 1, false);
}
MX_DEVICE void store_shared_v4_u32(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const uint32_t v[] = {a, b, c, d};
    emu::shared_store(address, v, 16, false);
}
MX_DEVICE void store_shared_v4_f32(uint32_t address, float a, float b, float c, float d) {
    const float v[] = {a, b, c, d};
    emu::shared_store(address, v, 16, false);
}

/* PTX ISA, "mul" .bf16x2: each product is exact in FP32 and rounded to nearest even; NaN becomes 0x7FFF. */
MX_DEVICE uint32_t multiply_bf16_pair(uint32_t a, uint32_t b) {
    return pack_bf16(__uint_as_float(a << 16) * __uint_as_float(b << 16),
                     __uint_as_float(a & 0xFFFF0000u) * __uint_as_float(b & 0xFFFF0000u));
}

/* ---- tcgen05_sm100.cuh ----------------------------------------------------------------------------------- */

template <int CTAS> MX_DEVICE void tmem_alloc(uint32_t slot, uint32_t columns) {
    emu::tcgen05_alloc(CTAS, slot, columns);
}
template <int CTAS> MX_DEVICE void tmem_relinquish() { emu::tcgen05_relinquish(CTAS); }
template <int CTAS> MX_DEVICE void tmem_dealloc(uint32_t address, uint32_t columns) {
    emu::tcgen05_dealloc(CTAS, address, columns);
}
MX_DEVICE void tmem_load_x16(uint32_t (&r)[16], uint32_t address) { emu::tcgen05_load_32x32b(r, 16, address); }
MX_DEVICE void tmem_wait_load() { emu::tcgen05_wait_load(); }
MX_DEVICE void tcgen05_fence_before() { emu::tcgen05_fence_before(); }
MX_DEVICE void tcgen05_fence_after() { emu::tcgen05_fence_after(); }
template <int CTAS> MX_DEVICE void tmem_copy_scales(uint32_t address, uint64_t descriptor) {
    emu::tcgen05_copy_32x128b_warpx4(CTAS, address, descriptor);
}
template <int CTAS>
MX_DEVICE void mma_mxf8(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t sfa, uint32_t sfb,
                        bool accumulate) {
    emu::tcgen05_mma_mxf8(CTAS, d, a, b, instruction, sfa, sfb, accumulate);
}
template <int CTAS> MX_DEVICE void tcgen05_commit(uint32_t bar) { emu::tcgen05_commit(CTAS, bar, CTAS == 2 ? 3 : 0); }

#endif
