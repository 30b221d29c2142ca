/*
 * cuda_on_host.h - CUDA C++'s keywords, built-in variables, vector types and intrinsics for an ordinary C++ compiler, as
 * far as the kernels use them. Comes before everything else in a kernel's translation unit.
 *
 * host_build.py finds the kernels by the emu_..._mark words that the keywords leave behind, and removes them.
 */
#ifndef EMULATOR_CUDA_ON_HOST_H
#define EMULATOR_CUDA_ON_HOST_H

#include <cuda.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>
#include <utility>

#include "device_api.h"

#ifndef __CUDA_ARCH__
#define __CUDA_ARCH__ 900
#endif

/* ---- keywords -------------------------------------------------------------------------------------------- */

#define __global__             emu_kernel_mark
#define __launch_bounds__(...) emu_bounds_mark(__VA_ARGS__)
#define __grid_constant__      emu_grid_constant_mark
#define __shared__             emu_shared_mark
#define __device__
#define __host__
#define __constant__    static const
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__    __attribute__((noinline))
#define __align__(n)    __attribute__((aligned(n)))

#define threadIdx       (::emu::thread_index())
#define blockIdx        (::emu::block_index())
#define blockDim        (::emu::block_size())
#define gridDim         (::emu::grid_size())
constexpr int warpSize = 32;

/* ---- vector types ---------------------------------------------------------------------------------------- */

#define EMU_VECTOR(T, NAME, ALIGN2, ALIGN4)                                                                          \
    struct alignas(ALIGN2) NAME##2 { T x, y; };                                                                      \
    struct NAME##3 { T x, y, z; };                                                                                   \
    struct alignas(ALIGN4) NAME##4 { T x, y, z, w; };                                                                \
    static inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                                                \
    static inline NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; }                                        \
    static inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VECTOR(float, float, 8, 16)
EMU_VECTOR(int, int, 8, 16)
EMU_VECTOR(unsigned, uint, 8, 16)
EMU_VECTOR(unsigned short, ushort, 4, 8)
EMU_VECTOR(unsigned char, uchar, 2, 4)
EMU_VECTOR(long long, longlong, 16, 16)
EMU_VECTOR(unsigned long long, ulonglong, 16, 16)
#undef EMU_VECTOR

/* ---- bits and arithmetic --------------------------------------------------------------------------------- */

static inline float __uint_as_float(unsigned u) {
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}
static inline unsigned __float_as_uint(float f) {
    unsigned u;
    memcpy(&u, &f, sizeof u);
    return u;
}
static inline int __float_as_int(float f) { return (int)__float_as_uint(f); }
static inline float __int_as_float(int i) { return __uint_as_float((unsigned)i); }

/* Each rounds once; the host code is compiled without contraction. */
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }

static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)((((unsigned long long)high << 32 | low) << (shift & 31)) >> 32);
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((unsigned long long)high << 32 | low) >> (shift & 31));
}

/* PTX ISA, "prmt", default mode: nibble i of the selector names the byte; its top bit replicates that byte's sign. */
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long bytes = (unsigned long long)b << 32 | a;
    unsigned result = 0;
    for (unsigned i = 0; i < 4; i++) {
        const unsigned nibble = selector >> 4 * i & 15;
        unsigned byte = (unsigned)(bytes >> 8 * (nibble & 7)) & 0xFF;
        if (nibble & 8) {
            byte = byte & 0x80 ? 0xFF : 0;
        }
        result |= byte << 8 * i;
    }
    return result;
}

static inline unsigned __vmaxu2(unsigned a, unsigned b) {
    const unsigned low = (a & 0xFFFF) > (b & 0xFFFF) ? a & 0xFFFF : b & 0xFFFF;
    const unsigned high = a >> 16 > b >> 16 ? a >> 16 : b >> 16;
    return high << 16 | low;
}

static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
static inline unsigned min(int a, unsigned b) { return min((unsigned)a, b); }
static inline unsigned max(int a, unsigned b) { return max((unsigned)a, b); }
static inline unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }
static inline unsigned max(unsigned a, int b) { return max(a, (unsigned)b); }
static inline long min(long a, long b) { return a < b ? a : b; }
static inline long max(long a, long b) { return a > b ? a : b; }
static inline long min(long a, int b) { return a < b ? a : b; }
static inline long max(long a, int b) { return a > b ? a : b; }
static inline long min(int a, long b) { return a < b ? a : b; }
static inline long max(int a, long b) { return a > b ? a : b; }
static inline long long min(long long a, long long b) { return a < b ? a : b; }
static inline long long max(long long a, long long b) { return a > b ? a : b; }
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }

/* ---- memory ---------------------------------------------------------------------------------------------- */

template <class T> static inline T __ldg(const T *p) {
    T v;
    ::emu::global_load(p, &v, sizeof v);
    return v;
}

static inline __attribute__((always_inline)) size_t __cvta_generic_to_shared(const void *p) {
    return ::emu::shared_address(p);
}

static inline void __threadfence() {}

/* ---- threads that meet ----------------------------------------------------------------------------------- */

#define EMU_INLINE static inline __attribute__((always_inline))

EMU_INLINE void __syncthreads() { ::emu::block_barrier(0, 0, true); }
EMU_INLINE void __syncwarp(unsigned mask = 0xFFFFFFFFu) { ::emu::warp_sync(mask); }
EMU_INLINE unsigned __activemask() { return ::emu::warp_active_mask(); }

template <class T>
EMU_INLINE T emu_shuffle(::emu::Shuffle kind, unsigned mask, T value, unsigned operand, int width) {
    static_assert(sizeof(T) == 4, "shuffles are emulated for 32-bit values");
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits = ::emu::warp_shuffle(kind, mask, bits, operand, (uint32_t)width);
    memcpy(&value, &bits, 4);
    return value;
}
template <class T> EMU_INLINE T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
    return emu_shuffle(::emu::Shuffle::Index, mask, value, (unsigned)lane, width);
}
template <class T> EMU_INLINE T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return emu_shuffle(::emu::Shuffle::Up, mask, value, delta, width);
}
template <class T> EMU_INLINE T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return emu_shuffle(::emu::Shuffle::Down, mask, value, delta, width);
}
template <class T> EMU_INLINE T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
    return emu_shuffle(::emu::Shuffle::Xor, mask, value, (unsigned)lanes, width);
}

EMU_INLINE unsigned __ballot_sync(unsigned mask, int p) {
    return ::emu::warp_vote(::emu::Vote::Ballot, mask, p != 0);
}
EMU_INLINE int __any_sync(unsigned mask, int p) { return (int)::emu::warp_vote(::emu::Vote::Any, mask, p != 0); }
EMU_INLINE int __all_sync(unsigned mask, int p) { return (int)::emu::warp_vote(::emu::Vote::All, mask, p != 0); }

EMU_INLINE unsigned __reduce_add_sync(unsigned mask, unsigned v) {
    return ::emu::warp_reduce(::emu::Reduce::Add, mask, v);
}
EMU_INLINE unsigned __reduce_min_sync(unsigned mask, unsigned v) {
    return ::emu::warp_reduce(::emu::Reduce::Min, mask, v);
}
EMU_INLINE unsigned __reduce_max_sync(unsigned mask, unsigned v) {
    return ::emu::warp_reduce(::emu::Reduce::Max, mask, v);
}
EMU_INLINE unsigned __reduce_and_sync(unsigned mask, unsigned v) {
    return ::emu::warp_reduce(::emu::Reduce::And, mask, v);
}
EMU_INLINE unsigned __reduce_or_sync(unsigned mask, unsigned v) {
    return ::emu::warp_reduce(::emu::Reduce::Or, mask, v);
}

#endif
