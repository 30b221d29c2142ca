/*
 * probes_sm90.cu - small kernels, each with one fault (or none), that show what the emulator finds. They use the package's
 * PTX wrappers like its kernels do. test_emulated_machine.py says what each must end with.
 *
 * Every kernel gets a buffer `g` of 4096 bytes, a tensor map of `g` as 32 rows of 128 bytes (box 8 rows, 128-byte
 * swizzle), and `wrong`: 0 for the correct form of the kernel, 1 for the faulty one.
 */
#include <stdint.h>

#include "ptx_sm90.cuh"
#include "wgmma_sm90.cuh"

#define PROBE(NAME)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(384, 1)                                                             \
        NAME(uint8_t *g, const __grid_constant__ CUtensorMap map, int wrong)

MX_DEVICE uint32_t shared_base() {
    extern __shared__ __align__(1024) uint8_t smem[];
    return smem_address(smem);
}

/* ---- values ---------------------------------------------------------------------------------------------- */

/* Writes a row of 32 words per instruction. */
PROBE(values) {
    uint32_t *out = (uint32_t *)g;
    const uint32_t lane = threadIdx.x;
    uint32_t row = 0;
    const uint32_t results[] = {
        __shfl_sync(~0u, lane, 5),
        __shfl_sync(~0u, lane, 3, 8),
        __shfl_up_sync(~0u, lane, 2),
        __shfl_down_sync(~0u, lane, 3, 16),
        __shfl_xor_sync(~0u, lane, 9),
        __ballot_sync(~0u, lane % 3 == 0),
        (uint32_t)__any_sync(~0u, lane == 7),
        (uint32_t)__all_sync(~0u, lane < 31),
        __reduce_add_sync(~0u, lane),
        __reduce_max_sync(lane < 16 ? 0xFFFFu : 0xFFFF0000u, lane ^ 5),
        (uint32_t)elect_one(),
        __byte_perm(0x33221100u, 0x77665544u, 0x7531 + lane % 2),
        __umulhi(0x80000000u + lane, 6),
        __vmaxu2(lane << 16 | 7, 5 << 16 | lane),
        pack_bf16(1.0f + lane / 256.0f, -3.0e38f),
        pack_e4m3(0.4375f * lane, 500.0f),
    };
    for (uint32_t r : results) {
        out[row++ * 32 + lane] = r;
    }
    (void)map;
    (void)wrong;
}

/* ---- ordinary shared memory ------------------------------------------------------------------------------ */

PROBE(read_unwritten) {
    const uint32_t at = shared_base() + threadIdx.x * 4;
    if (!wrong) {
        store_shared_u32(at, 1);
    }
    *(uint32_t *)(g + threadIdx.x * 4) = load_shared_u32(at);
}

PROBE(no_syncthreads) {
    store_shared_u32(shared_base() + threadIdx.x * 4, threadIdx.x);
    if (!wrong) {
        __syncthreads();
    }
    *(uint32_t *)(g + threadIdx.x * 4) = load_shared_u32(shared_base() + (threadIdx.x ^ 32) * 4);
}

PROBE(no_syncwarp) {
    store_shared_u32(shared_base() + threadIdx.x * 4, threadIdx.x);
    if (!wrong) {
        __syncwarp();
    } else {
        __shfl_sync(~0u, 0, 0); /* meets, but orders no memory */
    }
    *(uint32_t *)(g + threadIdx.x * 4) = load_shared_u32(shared_base() + (threadIdx.x ^ 1) * 4);
}

PROBE(overwrite_while_read) {
    extern __shared__ __align__(1024) uint8_t smem[];
    smem[threadIdx.x] = 1;
    __syncthreads();
    g[threadIdx.x] = smem[threadIdx.x ^ 32];
    if (!wrong) {
        __syncthreads();
    }
    smem[threadIdx.x] = 2;
}

PROBE(beyond_shared) {
    if (threadIdx.x == 0) {
        store_shared_u32(shared_base() + (wrong ? 65536 : 65532), 0);
    }
}

PROBE(beyond_global) { g[wrong ? 4096 : 4095] = 0; }

PROBE(misaligned_global) { *(uint4 *)(g + (wrong ? 8 : 16)) = make_uint4(0, 0, 0, 0); }

/* ---- barriers -------------------------------------------------------------------------------------------- */

PROBE(named_barrier_count) {
    if (threadIdx.x < 32) {
        named_barrier_arrive(1, 64);
    } else {
        named_barrier_sync(1, wrong ? 96 : 64);
    }
}

PROBE(divergent_collective) {
    if (threadIdx.x % 32 < 16) {
        __syncwarp(wrong ? ~0u : 0xFFFFu);
    } else {
        __shfl_sync(wrong ? ~0u : 0xFFFF0000u, 0, 16);
    }
}

PROBE(mbarrier_uninitialised) {
    const uint32_t bar = shared_base();
    if (!wrong && threadIdx.x == 0) {
        mbarrier_init(bar, blockDim.x);
    }
    __syncthreads();
    mbarrier_arrive(bar);
    mbarrier_wait(bar, 0);
}

PROBE(mbarrier_init_not_seen) {
    const uint32_t bar = shared_base();
    if (threadIdx.x == 0) {
        mbarrier_init(bar, blockDim.x);
    }
    if (!wrong) {
        __syncthreads();
    }
    mbarrier_arrive(bar);
}

PROBE(mbarrier_too_many_arrivals) {
    const uint32_t bar = shared_base();
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 2);
        mbarrier_expect(bar, 16); /* keeps the phase open */
        mbarrier_arrive(bar);
        mbarrier_arrive(bar);
        if (wrong) {
            mbarrier_arrive(bar);
        }
    }
}

PROBE(mbarrier_bytes_overflow) {
    const uint32_t bar = shared_base();
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        mbarrier_expect(bar, 0xFFFFF);
        mbarrier_expect(bar, wrong ? 1 : 0);
    }
}

PROBE(deadlock) {
    const uint32_t bar = shared_base();
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 2);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        mbarrier_arrive(bar);
        if (!wrong) {
            mbarrier_arrive(bar);
        }
    }
    mbarrier_wait(bar, 0);
}

PROBE(registers) {
    if (threadIdx.x < 256) {
        set_max_registers_up<232>();
    } else if (wrong) {
        set_max_registers_down<128>();
    } else {
        set_max_registers_down<40>();
    }
}

/* ---- the copy engine ------------------------------------------------------------------------------------- */

/* One thread loads 1 KB; `fence`: of the barrier's initialisation. */
MX_DEVICE void load_tile(const CUtensorMap *map, uint32_t bar, uint32_t dst, int row) {
    mbarrier_arrive_expect(bar, 1024);
    tma_load_2d(dst, map, 0, row, bar);
}

PROBE(barrier_without_fence) {
    const uint32_t bar = shared_base() + 8192;
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        if (!wrong) {
            mbarrier_fence_init();
        }
        load_tile(&map, bar, shared_base(), 0);
    }
    __syncthreads();
    mbarrier_wait(bar, 0);
}

PROBE(read_before_wait) {
    const uint32_t bar = shared_base() + 8192;
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        mbarrier_fence_init();
        load_tile(&map, bar, shared_base(), 0);
    }
    __syncthreads();
    if (!wrong) {
        mbarrier_wait(bar, 0);
    }
    const uint32_t v = load_shared_u32(shared_base() + threadIdx.x * 4);
    mbarrier_wait(bar, 0);
    *(uint32_t *)(g + 2048 + threadIdx.x * 4) = v;
}

PROBE(copy_over_readers) {
    const uint32_t full = shared_base() + 8192, empty = full + 8;
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        mbarrier_init(empty, blockDim.x);
        mbarrier_fence_init();
        load_tile(&map, full, shared_base(), 0);
    }
    __syncthreads();
    mbarrier_wait(full, 0);
    load_shared_u32(shared_base() + threadIdx.x * 4);
    mbarrier_arrive(empty);
    if (threadIdx.x == 0) {
        if (!wrong) {
            mbarrier_wait(empty, 0);
        }
        load_tile(&map, full, shared_base(), 8);
    }
    mbarrier_wait(full, 1);
}

PROBE(too_few_bytes_expected) {
    const uint32_t bar = shared_base() + 8192;
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        mbarrier_fence_init();
        mbarrier_arrive_expect(bar, wrong ? 512 : 1024);
        tma_load_2d(shared_base(), &map, 0, 0, bar);
    }
    __syncthreads();
    mbarrier_wait(bar, 0);
}

PROBE(store_without_proxy_fence) {
    store_shared_u32(shared_base() + threadIdx.x * 4, threadIdx.x);
    if (!wrong) {
        fence_proxy_async_shared();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        bulk_store(g, shared_base(), blockDim.x * 4);
        bulk_commit();
        bulk_wait<0>();
    }
}

PROBE(exit_before_store_is_done) {
    store_shared_u32(shared_base() + threadIdx.x * 4, threadIdx.x);
    fence_proxy_async_shared();
    __syncthreads();
    if (threadIdx.x == 0) {
        bulk_store(g, shared_base(), blockDim.x * 4);
        bulk_commit();
        if (!wrong) {
            bulk_wait_read<0>();
        }
    }
}

/* ---- wgmma ----------------------------------------------------------------------------------------------- */

/* 64 rows of A (from row 0 of `g`, read twice) and 8 of B behind them, all by one barrier. */
MX_DEVICE void load_operands(const CUtensorMap *map, uint32_t bar, int rows) {
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        mbarrier_fence_init();
        mbarrier_arrive_expect(bar, (rows + 8) * 128);
        for (int row = 0; row < rows; row += 8) {
            tma_load_2d(shared_base() + row * 128, map, 0, row % 32, bar);
        }
        tma_load_2d(shared_base() + 8192, map, 0, 0, bar);
    }
    __syncthreads();
    mbarrier_wait(bar, 0);
}

MX_DEVICE void store_products(uint8_t *g, const float (&d)[4]) {
    for (int i = 0; i < 4; i += 2) {
        *(uint32_t *)(g + (i * 128 + threadIdx.x * 2) * 2) = pack_bf16(d[i], d[i + 1]);
    }
}

PROBE(wgmma_without_fence) {
    float d[4] = {0, 0, 0, 0};
    load_operands(&map, shared_base() + 16384, 64);
    if (!wrong) {
        wgmma_fence();
    }
    wgmma_m64k32(d, wgmma_descriptor(shared_base()), wgmma_descriptor(shared_base() + 8192), false);
    wgmma_commit();
    wgmma_wait<0>();
}

PROBE(wgmma_registers_touched) {
    float d[4] = {0, 0, 0, 0};
    load_operands(&map, shared_base() + 16384, 64);
    wgmma_fence();
    wgmma_m64k32(d, wgmma_descriptor(shared_base()), wgmma_descriptor(shared_base() + 8192), false);
    if (wrong) {
        *(volatile float *)&d[2] = 1.0f;
    }
    wgmma_m64k32(d, wgmma_descriptor(shared_base()), wgmma_descriptor(shared_base() + 8192), true);
    wgmma_commit();
    wgmma_wait<0>();
}

PROBE(wgmma_not_waited_for) {
    float d[4];
    load_operands(&map, shared_base() + 16384, 64);
    wgmma_fence();
    wgmma_m64k32(d, wgmma_descriptor(shared_base()), wgmma_descriptor(shared_base() + 8192), false);
    wgmma_commit();
    if (!wrong) {
        wgmma_wait<0>();
    }
}

PROBE(wgmma_operand_overwritten) {
    float d[4];
    const uint32_t bar = shared_base() + 16384;
    load_operands(&map, bar, 64);
    wgmma_fence();
    wgmma_m64k32(d, wgmma_descriptor(shared_base()), wgmma_descriptor(shared_base() + 8192), false);
    wgmma_commit();
    if (!wrong) {
        wgmma_wait<0>();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        load_tile(&map, bar, shared_base(), 0);
    }
    mbarrier_wait(bar, 1);
    wgmma_wait<0>();
}

/* Only 56 rows are copied; the products of the others must not be used. */
PROBE(wgmma_foreign_rows) {
    float d[4];
    load_operands(&map, shared_base() + 16384, 56);
    wgmma_fence();
    wgmma_m64k32(d, wgmma_descriptor(shared_base()), wgmma_descriptor(shared_base() + 8192), false);
    wgmma_commit();
    wgmma_wait<0>();
    if (!wrong && threadIdx.x >= 96) {
        d[2] = d[3] = 0.0f; /* rows 56 to 63 */
    }
    store_products(g, d);
}

/* ---- clusters -------------------------------------------------------------------------------------------- */

PROBE(remote_store_without_cluster_scope) {
    const uint32_t bar = shared_base() + 1024;
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        mbarrier_fence_init();
    }
    cluster_arrive();
    cluster_wait();
    if (threadIdx.x == 0) {
        store_cluster_v4_f32(map_to_rank(shared_base(), 1 - cluster_rank()), 1, 2, 3, 4);
        mbarrier_arrive_remote(map_to_rank(bar, 1 - cluster_rank()));
        if (wrong) {
            mbarrier_wait_cluster(bar, 0); /* an acquire of cluster scope, but the arrival's release had none */
        }
    }
    if (!wrong) {
        cluster_arrive();
        cluster_wait();
    }
    if (threadIdx.x == 0) {
        load_shared_v4_f32(shared_base());
    }
    cluster_arrive();
    cluster_wait();
}

PROBE(store_to_a_block_that_left) {
    if (cluster_rank() == 0) {
        cluster_arrive();
        cluster_wait();
        if (threadIdx.x == 0) {
            store_cluster_v4_f32(map_to_rank(shared_base(), 1), 0, 0, 0, 0);
        }
    } else {
        cluster_arrive();
        cluster_wait();
    }
    if (!wrong) {
        cluster_arrive();
        cluster_wait();
    }
}

PROBE(store_async_counts_bytes) {
    const uint32_t bar = shared_base() + 1024, peer = 1 - cluster_rank();
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        mbarrier_fence_init();
        mbarrier_arrive_expect(bar, 16);
    }
    cluster_arrive();
    cluster_wait();
    if (threadIdx.x == 0) {
        store_async_v2_f32(map_to_rank(shared_base(), peer), 1.0f, 2.0f, map_to_rank(bar, peer));
        if (!wrong) {
            store_async_v2_f32(map_to_rank(shared_base() + 8, peer), 3.0f, 4.0f, map_to_rank(bar, peer));
        }
    }
    mbarrier_wait_cluster(bar, 0);
    const float4 v = load_shared_v4_f32(shared_base());
    if (v.x + v.y + v.z + v.w == 10.0f) {
        g[cluster_rank()] = 10;
    }
    cluster_arrive();
    cluster_wait();
}

/* ---- programmatic dependent launch ----------------------------------------------------------------------- */

PROBE(writes) {
    grid_dependency_wait();
    g[threadIdx.x] = 1;
}

PROBE(reads_before_wait) {
    uint8_t v = 0;
    if (wrong) {
        v = *(volatile uint8_t *)(g + threadIdx.x);
    }
    grid_dependency_wait();
    if (!wrong) {
        v = *(volatile uint8_t *)(g + threadIdx.x);
    }
    g[1024 + threadIdx.x] = v;
}

PROBE(copies_before_wait) {
    const uint32_t bar = shared_base() + 8192;
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        mbarrier_fence_init();
        if (!wrong) {
            grid_dependency_wait();
        }
        load_tile(&map, bar, shared_base(), 0);
    }
    grid_dependency_wait();
    __syncthreads();
    mbarrier_wait(bar, 0);
}

PROBE(never_waits) {
    if (!wrong) {
        grid_dependency_wait();
    }
}

PROBE(blocks_share_memory) {
    grid_dependency_wait();
    if (threadIdx.x == 0) {
        g[blockIdx.x] = 1;
        if (wrong == 1 && blockIdx.x == 1) {
            g[1] = g[0];
        }
        if (wrong == 2) {
            g[7] = 1;
        }
    }
}
