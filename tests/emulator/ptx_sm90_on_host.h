/*
 * ptx_sm90_on_host.h - stands in for the functions of csrc/cuda/ptx_sm90.cuh and wgmma_sm90.cuh that are one instruction:
 * the same names and signatures (a test compares them), carried out by the emulator. What those headers write in plain
 * C++ (descriptors, loops) is taken from them as it is; see host_build.py.
 */
#ifndef EMULATOR_PTX_SM90_ON_HOST_H
#define EMULATOR_PTX_SM90_ON_HOST_H

#include "cuda_on_host.h"

#define MX_DEVICE static __device__ __forceinline__

/* ---- identity -------------------------------------------------------------------------------------------- */

MX_DEVICE uint32_t cluster_rank() { return emu::cluster_rank(); }
MX_DEVICE bool elect_one() { return emu::warp_elect(0xFFFFFFFFu); }

/* ---- mbarrier -------------------------------------------------------------------------------------------- */

MX_DEVICE void mbarrier_init(uint32_t bar, uint32_t arrivals) { emu::mbarrier_init(bar, arrivals); }
MX_DEVICE void mbarrier_fence_init() { emu::mbarrier_fence_init(); }
MX_DEVICE void mbarrier_arrive(uint32_t bar) { emu::mbarrier_arrive(bar, 1, false, emu::Scope::Cta); }
MX_DEVICE void mbarrier_arrive_remote(uint32_t bar) { emu::mbarrier_arrive(bar, 1, true, emu::Scope::Cta); }
MX_DEVICE void mbarrier_arrive_expect(uint32_t bar, uint32_t bytes) {
    emu::mbarrier_expect(bar, bytes);
    emu::mbarrier_arrive(bar, 1, false, emu::Scope::Cta);
}
MX_DEVICE void mbarrier_expect(uint32_t bar, uint32_t bytes) { emu::mbarrier_expect(bar, bytes); }
MX_DEVICE bool mbarrier_try_wait(uint32_t bar, uint32_t parity) {
    return emu::mbarrier_try_wait(bar, parity, emu::Scope::Cta);
}
MX_DEVICE bool mbarrier_try_wait_cluster(uint32_t bar, uint32_t parity) {
    return emu::mbarrier_try_wait(bar, parity, emu::Scope::Cluster);
}

/* ---- the copy engine ------------------------------------------------------------------------------------- */

MX_DEVICE void tma_prefetch_map(const CUtensorMap *map) { emu::tma_check_map(map); }

MX_DEVICE void tma_load_2d(uint32_t dst, const CUtensorMap *map, int x, int y, uint32_t bar) {
    const int at[] = {x, y};
    emu::tma_load(dst, map, at, 2, bar, 0);
}

MX_DEVICE void tma_load_3d(uint32_t dst, const CUtensorMap *map, int x, int y, int z, uint32_t bar) {
    const int at[] = {x, y, z};
    emu::tma_load(dst, map, at, 3, bar, 0);
}

MX_DEVICE void tma_load_3d_hint(uint32_t dst, const CUtensorMap *map, int x, int y, int z, uint32_t bar,
                                uint64_t policy) {
    if (policy != 0x12F0000000000000ull && policy != 0x14F0000000000000ull) { /* evict first, evict last */
        emu::kernel_error("cp.async.bulk.tensor: 0x%016llX is no cache policy", (unsigned long long)policy);
    }
    tma_load_3d(dst, map, x, y, z, bar);
}

MX_DEVICE void tma_load_3d_multicast(uint32_t dst, const CUtensorMap *map, int x, int y, int z, uint32_t bar,
                                     uint16_t ranks) {
    const int at[] = {x, y, z};
    if (ranks == 0) {
        emu::kernel_error("cp.async.bulk.tensor .multicast: the mask of ranks is empty");
    }
    emu::tma_load(dst, map, at, 3, bar, ranks);
}

MX_DEVICE void tma_store_2d(const CUtensorMap *map, uint32_t src, int x, int y) {
    const int at[] = {x, y};
    emu::tma_store(map, src, at, 2);
}

MX_DEVICE void bulk_load(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar) {
    emu::bulk_load(dst, src, bytes, bar, 0);
}
MX_DEVICE void bulk_copy_to_rank(uint32_t dst, uint32_t src, uint32_t bytes, uint32_t bar) {
    emu::bulk_copy_shared(dst, src, bytes, bar);
}
MX_DEVICE void bulk_store(void *dst, uint32_t src, uint32_t bytes) { emu::bulk_store(dst, src, bytes); }
MX_DEVICE void bulk_prefetch_l2(const void *src, uint32_t bytes) {
    if ((uintptr_t)src % 16 != 0 || bytes % 16 != 0) {
        emu::kernel_error("cp.async.bulk.prefetch: address %p and size %u must be multiples of 16", src, bytes);
    }
}
MX_DEVICE void bulk_commit() { emu::bulk_commit(); }
template <int N> MX_DEVICE void bulk_wait_read() { emu::bulk_wait(N, true); }
template <int N> MX_DEVICE void bulk_wait() { emu::bulk_wait(N, false); }

/* ---- ordering -------------------------------------------------------------------------------------------- */

MX_DEVICE void fence_proxy_async_shared() { emu::proxy_fence_async(); }
MX_DEVICE void fence_proxy_async() { emu::proxy_fence_async(); }
MX_DEVICE void named_barrier_sync(uint32_t id, uint32_t threads) { emu::block_barrier(id, threads, true); }
MX_DEVICE void named_barrier_arrive(uint32_t id, uint32_t threads) { emu::block_barrier(id, threads, false); }

/* ---- programmatic dependent launch ----------------------------------------------------------------------- */

MX_DEVICE void grid_dependency_wait() { emu::grid_wait(); }
MX_DEVICE void grid_launch_dependents() { emu::grid_launch_dependents(); }

/* ---- clusters -------------------------------------------------------------------------------------------- */

MX_DEVICE void cluster_arrive() { emu::cluster_barrier_arrive(true); }
MX_DEVICE void cluster_arrive_relaxed() { emu::cluster_barrier_arrive(false); }
MX_DEVICE void cluster_wait() { emu::cluster_barrier_wait(); }
MX_DEVICE uint32_t map_to_rank(uint32_t address, uint32_t rank) { return emu::map_address(address, rank); }

MX_DEVICE void store_async_f32(uint32_t address, float value, uint32_t bar) {
    emu::shared_store_async(address, &value, 4, bar);
}
MX_DEVICE void store_async_v2_f32(uint32_t address, float a, float b, uint32_t bar) {
    const float v[] = {a, b};
    emu::shared_store_async(address, v, 8, bar);
}
MX_DEVICE void store_async_v4_f32(uint32_t address, float a, float b, float c, float d, uint32_t bar) {
    const float v[] = {a, b, c, d};
    emu::shared_store_async(address, v, 16, bar);
}

MX_DEVICE void store_cluster_u32(uint32_t address, uint32_t v) { emu::shared_store(address, &v, 4, true); }
MX_DEVICE void store_cluster_v4_f32(uint32_t address, float a, float b, float c, float d) {
    const float v[] = {a, b, c, d};
    emu::shared_store(address, v, 16, true);
}

/* ---- shared memory by address ---------------------------------------------------------------------------- */

template <class T> MX_DEVICE T emu_load_shared(uint32_t address) {
    T v;
    emu::shared_load(address, &v, sizeof v);
    return v;
}

MX_DEVICE uint32_t load_shared_u8(uint32_t address) { return emu_load_shared<uint8_t>(address); }
MX_DEVICE uint32_t load_shared_u16(uint32_t address) { return emu_load_shared<uint16_t>(address); }
MX_DEVICE uint32_t load_shared_u32(uint32_t address) { return emu_load_shared<uint32_t>(address); }
MX_DEVICE float load_shared_f32(uint32_t address) { return emu_load_shared<float>(address); }
MX_DEVICE float2 load_shared_v2_f32(uint32_t address) { return emu_load_shared<float2>(address); }
MX_DEVICE float4 load_shared_v4_f32(uint32_t address) { return emu_load_shared<float4>(address); }

MX_DEVICE void store_shared_u32(uint32_t address, uint32_t v) { emu::shared_store(address, &v, 4, false); }
MX_DEVICE void store_shared_f32(uint32_t address, float v) { emu::shared_store(address, &v, 4, false); }
MX_DEVICE void store_shared_v4_f32(uint32_t address, float4 v) { emu::shared_store(address, &v, 16, false); }
MX_DEVICE void store_shared_v2_u32(uint32_t address, uint32_t a, uint32_t b) {
    const uint32_t v[] = {a, b};
    emu::shared_store(address, v, 8, false);
}

MX_DEVICE void load_matrix_x4(uint32_t (&d)[4], uint32_t address) { emu::matrix_load(address, d, 4, false); }
MX_DEVICE void store_matrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const uint32_t v[] = {a, b, c, d};
    emu::matrix_store(address, v, 4, false);
}

/* ---- global memory --------------------------------------------------------------------------------------- */

MX_DEVICE uint4 load_global_stream_v4(const void *p) {
    uint4 v;
    emu::global_load(p, &v, sizeof v);
    return v;
}
MX_DEVICE uint32_t load_global_u8(const uint8_t *p) {
    uint8_t v;
    emu::global_load(p, &v, 1);
    return v;
}

/* ---- registers and conversions --------------------------------------------------------------------------- */

template <int N> MX_DEVICE void set_max_registers_up() { emu::set_max_registers(N, true); }
template <int N> MX_DEVICE void set_max_registers_down() { emu::set_max_registers(N, false); }

/* PTX ISA, "cvt": .rn rounds to nearest even; a NaN becomes the canonical NaN 0x7FFF. */
MX_DEVICE uint32_t emu_bf16(float f) {
    const uint32_t u = __float_as_uint(f);
    if (f != f) {
        emu::use_value(f);
        return 0x7FFF;
    }
    return (u + 0x7FFF + (u >> 16 & 1)) >> 16;
}
MX_DEVICE uint32_t pack_bf16(float low, float high) { return emu_bf16(low) | emu_bf16(high) << 16; }

/* PTX ISA, "cvt" to .e4m3x2: .rn.satfinite; NaN becomes 0x7F. Written by search, so that it shares nothing with the
 * package's own rounding: the nearest of the 127 magnitudes, the even one of two. */
MX_DEVICE uint32_t emu_e4m3(float f) {
    const uint32_t sign = __float_as_uint(f) >> 24 & 0x80;
    const float magnitude = fabsf(f);
    if (f != f) {
        emu::use_value(f);
        return 0x7F;
    }
    auto value = [](uint32_t code) {
        return code >> 3 ? ldexpf((float)(8 + (code & 7)), (int)(code >> 3) - 10) : ldexpf((float)code, -9);
    };
    uint32_t low = 0, high = 0x7E;
    while (low < high) { /* the largest code whose value is at most the magnitude */
        const uint32_t middle = (low + high + 1) / 2;
        if (value(middle) <= magnitude) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    if (low < 0x7E) {
        const float below = magnitude - value(low), above = value(low + 1) - magnitude;
        if (above < below || (above == below && (low & 1))) {
            low++;
        }
    }
    return sign | low;
}
MX_DEVICE uint32_t pack_e4m3(float low, float high) { return emu_e4m3(low) | emu_e4m3(high) << 8; }

/* ---- wgmma_sm90.cuh -------------------------------------------------------------------------------------- */

MX_DEVICE void wgmma_fence() { emu::wgmma_fence(); }
MX_DEVICE void wgmma_commit() { emu::wgmma_commit(); }
template <int N> MX_DEVICE void wgmma_wait() { emu::wgmma_wait(N); }
template <int N> MX_DEVICE void wgmma_pin(float (&d)[N]) { (void)d; }

template <int COUNT> MX_DEVICE void wgmma_m64k32(float (&d)[COUNT], uint64_t a, uint64_t b, bool accumulate) {
    emu::wgmma_multiply(d, COUNT, nullptr, a, b, accumulate);
}
template <int COUNT>
MX_DEVICE void wgmma_m64k32(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
    emu::wgmma_multiply(d, COUNT, a, 0, b, accumulate);
}

#endif
