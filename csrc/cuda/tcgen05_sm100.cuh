/*
 * tcgen05_sm100.cuh - Blackwell's tensor cores: tensor memory, block-scaled MMA, and the descriptors they take.
 *
 * A wrapper is one PTX instruction (PTX ISA, "TensorCore 5th Generation Family Instructions"). CTAS, 1 or 2, is the
 * .cta_group: with 2 the two blocks of a pair work on one product of 256 rows, each with its own half of A and D, and
 * one thread of the even block issues for both. All tcgen05 instructions of a kernel use the same one.
 *
 * Tensor memory is 128 lanes x 512 columns of 32 bits per SM; an address is lane << 16 | column. A warp reads only
 * the 32 lanes 32 * (warp % 4) and up.
 *
 * Who issues: alloc, dealloc, relinquish, ld, wait: one converged warp; cp, mma, commit: one thread, the same one for
 * all three, since commit covers what its own thread issued.
 */
#ifndef VLLM_MEGAATTN_TCGEN05_SM100_CUH
#define VLLM_MEGAATTN_TCGEN05_SM100_CUH

#include "ptx_sm100.cuh"

/* ---- descriptors ----------------------------------------------------------------------------------------- */

/* Instruction descriptor of kind::mxf8f6f4, e4m3 x e4m3, both K-major, scales UE8M0 (PTX ISA, "Instruction
 * descriptor", table for kind::mxf8f6f4):
 *
 *     bits 4-5 byte of SFB's word, 7-9 A format (0 = e4m3), 10-12 B format, 15 / 16 A / B major (0 = K), 17-22 N / 8,
 *     23 scale format (1 = UE8M0), 27-28 M / 128, 29-30 byte of SFA's word; all others 0
 */
MX_DEVICE uint32_t mma_instruction(int m, int n) {
    return 1u << 23 | (uint32_t)(m >> 7) << 27 | (uint32_t)(n >> 3) << 17;
}

/* The descriptor for K step `step` (0 to 3) of a block of 128: it reads byte `step` of the scale words. */
MX_DEVICE uint32_t mma_instruction_step(uint32_t instruction, int step) {
    return instruction | (uint32_t)step << 4 | (uint32_t)step << 29;
}

/* Shared memory descriptor of a K-major tile of 128-byte rows with the 128-byte swizzle (PTX ISA, "Shared memory
 * descriptor"): bits 0-13 address / 16, 32-45 bytes between groups of 8 rows / 16 = 64, 46-48 constant 1, 61-63
 * swizzle (2 = 128 bytes). The tile starts at a multiple of 1024, so the base offset (49-51) is 0; the leading
 * dimension is unused because one swizzle atom covers the whole of K. The next 32 bytes of K are 2 further in the
 * address field. */
MX_DEVICE uint64_t operand_descriptor(uint32_t address) {
    return (uint64_t)2 << 61 | (uint64_t)1 << 46 | (uint64_t)64 << 32 | (uint64_t)(address >> 4 & 0x3FFF);
}

#define MX_DESCRIPTOR_K_STEP 2 /* 32 bytes, in units of 16 */

/* Shared memory descriptor of a 512-byte scale tile: 32 rows of 16 bytes, no swizzle, 128 bytes from one group of
 * 8 rows to the next. */
MX_DEVICE uint64_t scale_descriptor(uint32_t address) {
    return (uint64_t)1 << 46 | (uint64_t)8 << 32 | (uint64_t)(address >> 4 & 0x3FFF);
}

/* ---- tensor memory --------------------------------------------------------------------------------------- */

/* Writes the address of `columns` (a power of two, 32 to 512) columns to shared memory; waits until they are free. */
template <int CTAS> MX_DEVICE void tmem_alloc(uint32_t slot, uint32_t columns) {
    if (CTAS == 2) {
        asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(slot), "r"(columns)
                     : "memory");
    } else {
        asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(slot), "r"(columns)
                     : "memory");
    }
}

/* Gives up the right to allocate more, so that another block of the SM can have its share. */
template <int CTAS> MX_DEVICE void tmem_relinquish() {
    if (CTAS == 2) {
        asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;" ::: "memory");
    } else {
        asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
    }
}

template <int CTAS> MX_DEVICE void tmem_dealloc(uint32_t address, uint32_t columns) {
    if (CTAS == 2) {
        asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns) : "memory");
    } else {
        asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns) : "memory");
    }
}

/* 16 columns of the warp's 32 lanes: word i of lane t is column i of lane t. Usable after tmem_wait_load. */
MX_DEVICE void tmem_load_x16(uint32_t (&r)[16], uint32_t address) {
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x16.b32 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, [%16];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7]),
                   "=r"(r[8]), "=r"(r[9]), "=r"(r[10]), "=r"(r[11]), "=r"(r[12]), "=r"(r[13]), "=r"(r[14]),
                   "=r"(r[15])
                 : "r"(address)
                 : "memory");
}

/* The registers of this thread's earlier loads hold their values after it. NOTE: the compiler does not know that
 * they did not before; the caller must not touch them in between (both are volatile, so their order stands). */
MX_DEVICE void tmem_wait_load() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }

/* ---- order between threads ------------------------------------------------------------------------------- */

/* Earlier tcgen05 operations of this thread are ordered before the barrier it arrives on next. */
MX_DEVICE void tcgen05_fence_before() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }

/* Later tcgen05 operations of this thread are ordered after the barrier it has just waited on. */
MX_DEVICE void tcgen05_fence_after() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }

/* ---- products -------------------------------------------------------------------------------------------- */

/* Brings a 512-byte scale tile into 4 columns of tensor memory: word c of row L goes to column c of lanes L, L + 32,
 * L + 64 and L + 96. With CTAS 2 each block of the pair copies from its own shared memory, same offset, into its own
 * tensor memory. Runs in order with the products that this thread issues later. */
template <int CTAS> MX_DEVICE void tmem_copy_scales(uint32_t address, uint64_t descriptor) {
    if (CTAS == 2) {
        asm volatile("tcgen05.cp.cta_group::2.32x128b.warpx4 [%0], %1;" ::"r"(address), "l"(descriptor) : "memory");
    } else {
        asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(address), "l"(descriptor) : "memory");
    }
}

/* D = (A * SFA) (B * SFB) over 32 columns of K, plus D if `accumulate`. d, sfa, sfb: tensor memory. */
template <int CTAS>
MX_DEVICE void mma_mxf8(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t sfa, uint32_t sfb,
                        bool accumulate) {
    if (CTAS == 2) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
            "tcgen05.mma.cta_group::2.kind::mxf8f6f4.block_scale [%0], %1, %2, %3, [%4], [%5], p;\n}" ::"r"(d),
            "l"(a), "l"(b), "r"(instruction), "r"(sfa), "r"(sfb), "r"((uint32_t)accumulate)
            : "memory");
    } else {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
            "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%0], %1, %2, %3, [%4], [%5], p;\n}" ::"r"(d),
            "l"(a), "l"(b), "r"(instruction), "r"(sfa), "r"(sfb), "r"((uint32_t)accumulate)
            : "memory");
    }
}

/* One arrival on `bar` when all that this thread has issued so far is done; it includes tcgen05_fence_before. With
 * CTAS 2 the barrier at the same offset in both blocks of the pair gets one. */
template <int CTAS> MX_DEVICE void tcgen05_commit(uint32_t bar) {
    if (CTAS == 2) {
        asm volatile(
            "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::
                "r"(bar),
            "h"((uint16_t)3)
            : "memory");
    } else {
        asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(bar)
                     : "memory");
    }
}

#endif /* VLLM_MEGAATTN_TCGEN05_SM100_CUH */
