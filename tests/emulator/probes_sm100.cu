/*
 * probes_sm100.cu - one product on Blackwell's tensor cores, and what can go wrong on the way (see probes_sm90.cu). `wrong`
 * says which fault the kernel has; 0: none.
 */
#include <stdint.h>

#include "tcgen05_sm100.cuh"

enum fault {
    CORRECT = 0,
    NO_PROXY_FENCE = 1,      /* scales stored, then copied to tensor memory */
    NO_COMMIT_WAIT = 2,      /* result read without waiting for the products */
    NO_FENCE_AFTER = 3,      /* ... after waiting, without tcgen05.fence::after_thread_sync */
    REGISTERS_TOO_EARLY = 4, /* used before tcgen05.wait::ld */
    NO_DEALLOC = 5,
    FOREIGN_LANES = 6,      /* a warp reads another warp's lanes */
    SCALES_OVERWRITTEN = 7, /* while products that read them are under way */
    NO_FENCE_BEFORE = 8,    /* accumulator given back without tcgen05.fence::before_thread_sync */
    ODD_COLUMNS = 9,        /* 48 columns */
    TWO_GROUPS = 10,        /* cta_group::1 and ::2 in one kernel */
    FIRST_ACCUMULATES = 11, /* on columns that were never written */
    DEALLOC_UNDER_WAY = 12,
    ALLOC_AFTER_RELINQUISH = 13,
    BEYOND_ALLOCATION = 14,
    OPERAND_OVERWRITTEN = 15, /* shared memory refilled before the products have read it */
    COMMIT_BY_ANOTHER = 16,   /* a thread that issued nothing commits: it covers nothing */
};

#define COLUMNS 64
#define N       16

/* Shared memory: A 16 KB, B 2 KB, scales 512 + 512, then three barriers and the address. */
#define B_TILE  16384
#define SCALES  18432
#define FULL    19456
#define DONE    (FULL + 8)
#define FREE    (FULL + 16)
#define ADDRESS (FULL + 24)

MX_DEVICE void load_operands(const CUtensorMap *map, uint32_t smem) {
    mbarrier_arrive_expect(smem + FULL, 16384 + 2048);
    for (int row = 0; row < 128; row += 8) {
        tma_load_2d(smem + row * 128, map, 0, row % 32, smem + FULL);
    }
    tma_load_2d(smem + B_TILE, map, 0, 0, smem + FULL);
    tma_load_2d(smem + B_TILE + 1024, map, 0, 8, smem + FULL);
}

/* One thread: scales, four products of 32 columns, commit. */
MX_DEVICE void multiply(uint32_t smem, uint32_t tmem, int wrong) {
    tmem_copy_scales<1>(tmem + 32, scale_descriptor(smem + SCALES));
    tmem_copy_scales<1>(tmem + 36, scale_descriptor(smem + SCALES + 512));
    for (int i = 0; i < 4; i++) {
        mma_mxf8<1>(tmem, operand_descriptor(smem) + i * MX_DESCRIPTOR_K_STEP,
                    operand_descriptor(smem + B_TILE) + i * MX_DESCRIPTOR_K_STEP,
                    mma_instruction_step(mma_instruction(128, N), i), tmem + 32, tmem + 36,
                    i > 0 || wrong == FIRST_ACCUMULATES);
        if (wrong == SCALES_OVERWRITTEN && i == 1) {
            tmem_copy_scales<1>(tmem + 32, scale_descriptor(smem + SCALES));
        }
    }
    if (wrong != COMMIT_BY_ANOTHER) {
        tcgen05_commit<1>(smem + DONE);
    }
}

extern "C" __global__ void __launch_bounds__(128, 1)
    tensor_core(uint8_t *g, const __grid_constant__ CUtensorMap map, int wrong) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t smem = smem_address(shared), warp = threadIdx.x / 32;
    uint32_t r[16];
    if (threadIdx.x == 0) {
        mbarrier_init(smem + FULL, 1);
        mbarrier_init(smem + DONE, 1);
        mbarrier_init(smem + FREE, 128);
        mbarrier_fence_init();
        load_operands(&map, smem);
    }
    if (threadIdx.x < 64) { /* 1024 bytes of 2^0 */
        store_shared_v4_u32(smem + SCALES + threadIdx.x * 16, 0x7F7F7F7Fu, 0x7F7F7F7Fu, 0x7F7F7F7Fu, 0x7F7F7F7Fu);
    }
    if (wrong != NO_PROXY_FENCE) {
        fence_proxy_async_shared();
    }
    if (warp == 0) {
        tmem_alloc<1>(smem + ADDRESS, wrong == ODD_COLUMNS ? 48 : COLUMNS);
        if (wrong == TWO_GROUPS) {
            tmem_relinquish<2>();
        } else {
            tmem_relinquish<1>();
        }
        __syncwarp();
        if (wrong == ALLOC_AFTER_RELINQUISH) {
            tmem_dealloc<1>(load_shared_u32(smem + ADDRESS), COLUMNS);
            tmem_alloc<1>(smem + ADDRESS, COLUMNS);
        }
        tcgen05_fence_before();
    }
    __syncthreads();
    tcgen05_fence_after();
    const uint32_t tmem = load_shared_u32(smem + ADDRESS);

    /* The second round overwrites the first one's result, operands and scales. */
    for (uint32_t round = 0; round < 2; round++) {
        if (threadIdx.x == 0) {
            mbarrier_wait(smem + FULL, round);
            if (round > 0) {
                mbarrier_wait(smem + FREE, 0);
            }
            tcgen05_fence_after();
            multiply(smem, tmem, wrong);
            if (wrong == OPERAND_OVERWRITTEN && round == 0) {
                load_operands(&map, smem);
            }
        }
        if (wrong == COMMIT_BY_ANOTHER && threadIdx.x == 64) {
            tcgen05_commit<1>(smem + DONE);
        }
        if (wrong == NO_COMMIT_WAIT) {
            __syncthreads();
        } else {
            mbarrier_wait(smem + DONE, round);
        }
        if (wrong == DEALLOC_UNDER_WAY) {
            break;
        }
        if (wrong != NO_FENCE_AFTER) {
            tcgen05_fence_after();
        }
        if (threadIdx.x == 0 && round == 0 && wrong != NO_COMMIT_WAIT) {
            load_operands(&map, smem);
        }
        const uint32_t quarter = wrong == FOREIGN_LANES ? 3 - warp : warp;
        tmem_load_x16(r, tmem + (quarter << 21) + (wrong == BEYOND_ALLOCATION ? COLUMNS - 8 : 0));
        if (wrong != REGISTERS_TOO_EARLY) {
            tmem_wait_load();
        }
        for (int i = 0; i < 16; i += 2) {
            const uint32_t pair = pack_bf16(__uint_as_float(r[i]), __uint_as_float(r[i + 1]));
            if (round == 1) { /* until then the operands are still read from there */
                *(uint32_t *)(g + threadIdx.x * 32 + i * 2) = pair;
            }
        }
        if (wrong != NO_FENCE_BEFORE) {
            tcgen05_fence_before();
        }
        mbarrier_arrive(smem + FREE);
    }

    tcgen05_fence_before();
    __syncthreads();
    tcgen05_fence_after();
    if (warp == 0 && wrong != NO_DEALLOC) {
        if (wrong == DEALLOC_UNDER_WAY && elect_one()) {
            mbarrier_wait(smem + FULL, 0);
            multiply(smem, tmem, wrong);
        }
        __syncwarp();
        tmem_dealloc<1>(tmem, COLUMNS);
    }
}
