/*
 * arithmetic.h - what the tensor cores compute, bit for bit: one step of 32 products per output element.
 *
 * The public models of Hopper's wgmma and of Blackwell's tcgen05.mma kind::mxf8f6f4 (MMA-Sim, arXiv 2511.10909, and
 * tcgen05-model) agree on this scheme, with F = 13 for the former and F = 25 for the latter:
 *
 *   1. Every product of two e4m3 numbers is exact: significand in [1, 4), or below for subnormals, times 2^e with
 *      e = ea + eb (+ the exponents of both block scales). A subnormal e4m3 number has exponent -6.
 *   2. emax is the largest e of the non-zero products and of the non-zero addend C.
 *   3. Each product and C is cut, toward zero, to a multiple of 2^(emax - F); the 33 numbers are added exactly.
 *   4. The sum is rounded toward zero: Blackwell to FP32, Hopper to 13 fraction bits of an FP32. An exact zero is +0.
 *   5. NaN in any element (or block scale) gives 0x7FFFFFFF; so does a NaN in C; an infinite C stays.
 */
#ifndef EMULATOR_ARITHMETIC_H
#define EMULATOR_ARITHMETIC_H

#include <cstdint>
#include <vector>

namespace emu {

constexpr int STEP_K = 32; /* elements of K per step */

/* Rows of 32 e4m3 elements, taken apart; columns of the arrays are rows of the operand, so that they go into lanes. */
struct Operand {
    int rows = 0, padded = 0;        /* padded: a multiple of the vector's lanes */
    std::vector<int16_t> exponent;   /* [32][padded] */
    std::vector<uint16_t> magnitude; /* [32][padded]: significand times 8, 0 to 15 */
    std::vector<int16_t> sign;       /* [32][padded]: 0 or -1 */
    std::vector<uint8_t> nan;        /* [padded] */

    /* `bytes`: rows x 32; `scale`: a UE8M0 byte per row, or NULL for 2^0. */
    void set(const uint8_t *bytes, int rows, const uint8_t *scale);
};

/* d[m][n] += a[m][32] * b[n][32]^T. Fraction bits and rounding of the two machines. */
enum class Machine { Hopper, Blackwell };
void multiply_step(Machine machine, const Operand &a, const Operand &b, float *d, int stride);

} // namespace emu

#endif
