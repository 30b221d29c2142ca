/*
 * ptx_sm90.cuh - Hopper's own instructions, one wrapper each.
 *
 * A wrapper is one PTX instruction under a C name (two where an address has to be mapped first). Barriers and shared
 * memory are named by 32-bit shared-window addresses (`smem_address`), as the instructions want them. The reason for a
 * modifier stands at its wrapper. Loops and policies live in the kernels.
 */
#ifndef VLLM_MEGAATTN_PTX_SM90_CUH
#define VLLM_MEGAATTN_PTX_SM90_CUH

#include <cuda.h>
#include <stdint.h>

#define MX_DEVICE static __device__ __forceinline__

/* ---- identity -------------------------------------------------------------------------------------------- */

MX_DEVICE uint32_t smem_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

MX_DEVICE uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/* The same value in every lane, told to the compiler: what follows from it stays in uniform registers. */
MX_DEVICE uint32_t warp_uniform(uint32_t value) { return __shfl_sync(0xFFFFFFFFu, value, 0); }

/* True in one lane of the (converged) warp. */
MX_DEVICE bool elect_one() {
    uint32_t elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected != 0;
}

/* ---- mbarrier -------------------------------------------------------------------------------------------- */

MX_DEVICE void mbarrier_init(uint32_t bar, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}

/* Makes initialised barriers visible to the copy engine and to the other blocks of the cluster. */
MX_DEVICE void mbarrier_fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

/* NOTE: no .release.cluster on the ring's arrivals and no .acquire.cluster on its waits: they compile to MEMBAR.ALL.GPU
 * and a cache invalidation. The default (cta scope) orders what the ring needs: the data moves by the copy engine. */
MX_DEVICE void mbarrier_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

/* `bar` is an address of the shared::cluster window, from map_to_rank. */
MX_DEVICE void mbarrier_arrive_remote(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}

/* Arrives, and announces bytes that the copy engine (or st.async) will still deliver in this phase. */
MX_DEVICE void mbarrier_arrive_expect(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

/* Announces bytes without arriving. */
MX_DEVICE void mbarrier_expect(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

/* True once the phase of that parity has completed; sleeps in hardware for a while before it says no. */
MX_DEVICE bool mbarrier_try_wait(uint32_t bar, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(bar), "r"(parity)
                 : "memory");
    return done != 0;
}

MX_DEVICE void mbarrier_wait(uint32_t bar, uint32_t parity) {
    while (!mbarrier_try_wait(bar, parity)) {
    }
}

/* The same, and what other blocks of the cluster wrote by ordinary stores before they arrived is visible after it. */
MX_DEVICE bool mbarrier_try_wait_cluster(uint32_t bar, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(bar), "r"(parity)
                 : "memory");
    return done != 0;
}

MX_DEVICE void mbarrier_wait_cluster(uint32_t bar, uint32_t parity) {
    while (!mbarrier_try_wait_cluster(bar, parity)) {
    }
}

/* ---- the copy engine ------------------------------------------------------------------------------------- */

/* Fetches the descriptor before the first copy needs it. */
MX_DEVICE void tma_prefetch_map(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

MX_DEVICE void tma_load_2d(uint32_t dst, const CUtensorMap *map, int x, int y, uint32_t bar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(dst),
                 "l"(map), "r"(x), "r"(y), "r"(bar)
                 : "memory");
}

MX_DEVICE void tma_load_3d(uint32_t dst, const CUtensorMap *map, int x, int y, int z, uint32_t bar) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(dst),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(bar)
                 : "memory");
}

/* Cache policies for the *_hint forms: what is read once should leave L2 first, what is shared should stay. */
#define MX_L2_EVICT_FIRST 0x12F0000000000000ull
#define MX_L2_EVICT_LAST  0x14F0000000000000ull

MX_DEVICE void tma_load_3d_hint(uint32_t dst, const CUtensorMap *map, int x, int y, int z, uint32_t bar,
                                uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(dst),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(bar), "l"(policy)
                 : "memory");
}

/* The same data to the same offset in every block of the cluster named in `ranks`; each one's barrier is told. */
MX_DEVICE void tma_load_3d_multicast(uint32_t dst, const CUtensorMap *map, int x, int y, int z, uint32_t bar,
                                     uint16_t ranks) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(dst),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(bar), "h"(ranks)
                 : "memory");
}

MX_DEVICE void tma_store_2d(const CUtensorMap *map, uint32_t src, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(x),
                 "r"(y), "r"(src)
                 : "memory");
}

/* A run of bytes; addresses and size are multiples of 16. */
MX_DEVICE void bulk_load(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
                 "l"(src), "r"(bytes), "r"(bar)
                 : "memory");
}

/* Shared memory of this block to that of a neighbour; `dst` and `bar` come from map_to_rank. */
MX_DEVICE void bulk_copy_to_rank(uint32_t dst, uint32_t src, uint32_t bytes, uint32_t bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
        "r"(src), "r"(bytes), "r"(bar)
        : "memory");
}

MX_DEVICE void bulk_store(void *dst, uint32_t src, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes)
                 : "memory");
}

MX_DEVICE void bulk_prefetch_l2(const void *src, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(bytes) : "memory");
}

MX_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/* At most N groups of stores still have to read their shared memory. */
template <int N> MX_DEVICE void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

template <int N> MX_DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory"); }

/* ---- ordering -------------------------------------------------------------------------------------------- */

/* Ordinary accesses to shared memory before it, tensor core and copy engine accesses after it. */
MX_DEVICE void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* The same for all memory, for instance between ordinary stores to global memory and a copy engine read of them. */
MX_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

MX_DEVICE void named_barrier_sync(uint32_t id, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

MX_DEVICE void named_barrier_arrive(uint32_t id, uint32_t threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* ---- programmatic dependent launch ----------------------------------------------------------------------- */

/* Returns when the kernels this one depends on have finished and their writes are visible. Every kernel runs it, also
 * one that reads nothing of its predecessor: completion is passed on from kernel to kernel only this way. */
MX_DEVICE void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/* Lets the next kernel start once every block has said so or ended; it does not make writes visible. */
MX_DEVICE void grid_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

/* ---- clusters -------------------------------------------------------------------------------------------- */

MX_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }

/* Arrival that publishes nothing: enough before exit and where a fence has done it already. */
MX_DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }

MX_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

/* Where this block's shared address lies in the block of that rank (shared::cluster window). */
MX_DEVICE uint32_t map_to_rank(uint32_t address, uint32_t rank) {
    uint32_t mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}

/* Stores to a neighbour's shared memory that count as delivered bytes on a barrier there. */
MX_DEVICE void store_async_f32(uint32_t address, float value, uint32_t bar) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
                 "r"(__float_as_uint(value)), "r"(bar)
                 : "memory");
}

MX_DEVICE void store_async_v2_f32(uint32_t address, float a, float b, uint32_t bar) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(address),
                 "r"(__float_as_uint(a)), "r"(__float_as_uint(b)), "r"(bar)
                 : "memory");
}

MX_DEVICE void store_async_v4_f32(uint32_t address, float a, float b, float c, float d, uint32_t bar) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
        "r"(__float_as_uint(a)), "r"(__float_as_uint(b)), "r"(__float_as_uint(c)), "r"(__float_as_uint(d)), "r"(bar)
        : "memory");
}

/* Ordinary stores to a neighbour's shared memory; visible there after the next cluster_arrive / cluster_wait. */
MX_DEVICE void store_cluster_v4_f32(uint32_t address, float a, float b, float c, float d) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b), "f"(c), "f"(d)
                 : "memory");
}

MX_DEVICE void store_cluster_u32(uint32_t address, uint32_t v) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

/* ---- shared memory by address ---------------------------------------------------------------------------- */

MX_DEVICE uint32_t load_shared_u8(uint32_t address) {
    uint32_t v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

MX_DEVICE uint32_t load_shared_u16(uint32_t address) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
    return v;
}

MX_DEVICE uint32_t load_shared_u32(uint32_t address) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

MX_DEVICE float load_shared_f32(uint32_t address) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
    return v;
}

MX_DEVICE float2 load_shared_v2_f32(uint32_t address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}

MX_DEVICE float4 load_shared_v4_f32(uint32_t address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

MX_DEVICE void store_shared_u32(uint32_t address, uint32_t v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

MX_DEVICE void store_shared_f32(uint32_t address, float v) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}

MX_DEVICE void store_shared_v4_f32(uint32_t address, float4 v) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
}

MX_DEVICE void store_shared_v2_u32(uint32_t address, uint32_t a, uint32_t b) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}

/* Four 8x8 matrices of 16-bit elements (for bytes: 8 rows x 16 bytes each), one register of each per lane. */
MX_DEVICE void load_matrix_x4(uint32_t (&d)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(address)
                 : "memory");
}

MX_DEVICE void store_matrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

/* ---- global memory --------------------------------------------------------------------------------------- */

/* Read once: takes no place in L1. NOTE: not .nc, whose lines may be older than griddepcontrol.wait. */
MX_DEVICE uint4 load_global_stream_v4(const void *p) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

/* A byte that an earlier kernel wrote; volatile, so that it stays where the kernel's overlap wants it. */
MX_DEVICE uint32_t load_global_u8(const uint8_t *p) {
    uint32_t v;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

/* ---- registers and conversions --------------------------------------------------------------------------- */

/* Executed by a whole warpgroup; takes effect only in a kernel with a register cap (__launch_bounds__(threads, 1)). */
template <int N> MX_DEVICE void set_max_registers_up() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N> MX_DEVICE void set_max_registers_down() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

/* Two BF16 in one register, `low` in the low half; round to nearest even. */
MX_DEVICE uint32_t pack_bf16(float low, float high) {
    uint32_t v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}

/* Two e4m3 bytes, `low` in the low byte; round to nearest even, saturating at 448, NaN becomes 0x7F. */
MX_DEVICE uint32_t pack_e4m3(float low, float high) {
    uint16_t v;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(high), "f"(low));
    return v;
}

MX_DEVICE float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
MX_DEVICE float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

#endif /* VLLM_MEGAATTN_PTX_SM90_CUH */
