/* arithmetic.cpp - see arithmetic.h. Integers throughout; 32 output columns at a time in vectors. */
#include "arithmetic.h"

#include <cstring>

namespace emu {

namespace {

constexpr int LANES = 32;
typedef int16_t Short __attribute__((vector_size(2 * LANES)));
typedef uint16_t Ushort __attribute__((vector_size(2 * LANES)));
typedef int32_t Int __attribute__((vector_size(4 * LANES)));
typedef uint32_t Uint __attribute__((vector_size(4 * LANES)));
typedef int64_t Long __attribute__((vector_size(8 * LANES)));

constexpr int16_t NO_EXPONENT = -4000; /* of zero: never the largest, whatever is added to it */
constexpr uint32_t NAN_RESULT = 0x7FFFFFFFu;

uint32_t bits_of(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

float float_of(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

/* An FP32 addend: value = significand * 2^(exponent - 23). */
struct Addend {
    int32_t exponent;
    uint32_t significand;
    bool negative;
};

Addend take_apart(uint32_t u) {
    Addend c;
    const uint32_t field = u >> 23 & 0xFF, fraction = u & 0x7FFFFFu;
    c.negative = u >> 31;
    c.significand = field ? fraction | 0x800000u : fraction;
    c.exponent = c.significand ? (field ? (int32_t)field - 127 : -126) : NO_EXPONENT;
    return c;
}

/* `sum` * 2^scale, rounded toward zero to `fraction_bits` below the leading bit (fewer for subnormals). */
uint32_t put_together(int64_t sum, int scale, int fraction_bits) {
    if (sum == 0) {
        return 0;
    }
    const uint32_t sign = sum < 0 ? 0x80000000u : 0;
    uint64_t magnitude = sum < 0 ? (uint64_t)-sum : (uint64_t)sum;
    const int top = 63 - __builtin_clzll(magnitude);
    const int exponent = top + scale; /* of the leading bit */
    if (exponent > 127) {
        return sign | 0x7F800000u;
    }
    const int lowest =
        exponent >= -126 ? exponent - fraction_bits : -126 - fraction_bits; /* weight of the last bit */
    if (lowest > scale) {
        const int drop = lowest - scale;
        magnitude = drop > 63 ? 0 : magnitude >> drop << drop;
    }
    if (magnitude == 0) {
        return sign;
    }
    if (exponent < -126) {
        const int up = scale + 149; /* a subnormal's fraction counts 2^-149 */
        return sign | (uint32_t)(up >= 0 ? magnitude << up : magnitude >> -up);
    }
    const uint64_t fraction = top >= 23 ? magnitude >> (top - 23) : magnitude << (23 - top);
    return sign | (uint32_t)(exponent + 127) << 23 | ((uint32_t)fraction & 0x7FFFFFu);
}

/* One row of A against 32 columns. GUARD: bits that a product (6 fraction bits) is shifted up by. */
template <int F> void row_step(const Operand &a, int row, const Operand &b, int column, int valid, float *d) {
    constexpr int GUARD = F - 6;
    Addend c[LANES];
    Int emax;
    for (int j = 0; j < LANES; j++) {
        c[j] = take_apart(j < valid ? bits_of(d[j]) : 0);
        emax[j] = c[j].exponent;
    }
    Short top;
    for (int j = 0; j < LANES; j++) {
        top[j] = (int16_t)emax[j];
    }
    Short e[STEP_K];
    for (int k = 0; k < STEP_K; k++) {
        Short eb;
        memcpy(&eb, &b.exponent[(size_t)k * b.padded + column], sizeof eb);
        e[k] = eb + a.exponent[(size_t)k * a.padded + row];
        top = e[k] > top ? e[k] : top;
    }
    int64_t sum[LANES];
    if (F == 13) { /* all 32 products fit 16 bits each, their sum 32 */
        Int total = {0};
        for (int k = 0; k < STEP_K; k++) {
            Ushort m;
            Short sign, shift = top - e[k];
            memcpy(&m, &b.magnitude[(size_t)k * b.padded + column], sizeof m);
            memcpy(&sign, &b.sign[(size_t)k * b.padded + column], sizeof sign);
            shift = shift > 15 ? (Short){} + (int16_t)15 : shift;
            m = (m * a.magnitude[(size_t)k * a.padded + row] << 7) >> (Ushort)shift;
            sign ^= a.sign[(size_t)k * a.padded + row];
            total += __builtin_convertvector(((Short)m ^ sign) - sign, Int);
        }
        for (int j = 0; j < LANES; j++) {
            sum[j] = total[j];
        }
    } else {
        Long total = {0};
        for (int k = 0; k < STEP_K; k++) {
            Ushort m;
            Short sign;
            memcpy(&m, &b.magnitude[(size_t)k * b.padded + column], sizeof m);
            memcpy(&sign, &b.sign[(size_t)k * b.padded + column], sizeof sign);
            Int shift = __builtin_convertvector(top - e[k], Int);
            shift = shift > 31 ? (Int){} + 31 : shift;
            Uint p = __builtin_convertvector((Ushort)(m * a.magnitude[(size_t)k * a.padded + row]), Uint);
            p = (p << GUARD) >> (Uint)shift;
            const Int s = __builtin_convertvector((Short)(sign ^ a.sign[(size_t)k * a.padded + row]), Int);
            total += __builtin_convertvector(((Int)p ^ s) - s, Long);
        }
        for (int j = 0; j < LANES; j++) {
            sum[j] = total[j];
        }
    }
    for (int j = 0; j < valid; j++) {
        const uint32_t old = bits_of(d[j]);
        if ((old & 0x7FFF0000u) == 0x7FFB0000u) { /* a taint (runtime.h) */
            continue;
        }
        if (a.nan[(size_t)row] || b.nan[(size_t)(column + j)] || (old & 0x7FFFFFFFu) > 0x7F800000u) {
            d[j] = float_of(NAN_RESULT);
            continue;
        }
        if ((old & 0x7FFFFFFFu) == 0x7F800000u) {
            continue;
        }
        if (top[j] <= NO_EXPONENT / 2) { /* nothing but zeros */
            d[j] = 0.0f;
            continue;
        }
        const int shift = 23 - F + top[j] - c[j].exponent;
        int64_t addend = 0;
        if (shift < 0) {
            addend = (int64_t)c[j].significand << -shift;
        } else if (shift < 32) {
            addend = c[j].significand >> shift;
        }
        d[j] = float_of(put_together(sum[j] + (c[j].negative ? -addend : addend), top[j] - F, F == 13 ? 13 : 23));
    }
}

} // namespace

void Operand::set(const uint8_t *bytes, int num_rows, const uint8_t *scale) {
    rows = num_rows;
    padded = (rows + LANES - 1) / LANES * LANES;
    exponent.assign((size_t)padded * STEP_K, NO_EXPONENT);
    magnitude.assign((size_t)padded * STEP_K, 0);
    sign.assign((size_t)padded * STEP_K, 0);
    nan.assign((size_t)padded, 0);
    for (int r = 0; r < rows; r++) {
        const int shift = scale ? scale[r] - 127 : 0;
        nan[(size_t)r] = scale && scale[r] == 0xFF;
        for (int k = 0; k < STEP_K; k++) {
            const uint8_t byte = bytes[r * STEP_K + k];
            const int field = byte >> 3 & 15, fraction = byte & 7;
            const size_t at = (size_t)k * (size_t)padded + (size_t)r;
            nan[(size_t)r] |= (byte & 0x7F) == 0x7F;
            sign[at] = byte & 0x80 ? -1 : 0;
            magnitude[at] = (uint16_t)(field ? fraction | 8 : fraction);
            exponent[at] = (int16_t)(magnitude[at] == 0 ? NO_EXPONENT : (field ? field - 7 : -6) + shift);
        }
    }
}

void multiply_step(Machine machine, const Operand &a, const Operand &b, float *d, int stride) {
    for (int row = 0; row < a.rows; row++) {
        for (int column = 0; column < b.rows; column += LANES) {
            const int valid = b.rows - column < LANES ? b.rows - column : LANES;
            float *out = d + (size_t)row * (size_t)stride + column;
            if (machine == Machine::Hopper) {
                row_step<13>(a, row, b, column, valid, out);
            } else {
                row_step<25>(a, row, b, column, valid, out);
            }
        }
    }
}

} // namespace emu

/* For tests: one step on plain arrays, a [rows][32], b [columns][32], scales per row or NULL, d [rows][columns]. */
extern "C" void emu_multiply_step(int blackwell, const uint8_t *a, const uint8_t *a_scale, int rows, const uint8_t *b,
                                  const uint8_t *b_scale, int columns, float *d) {
    emu::Operand left, right;
    left.set(a, rows, a_scale);
    right.set(b, columns, b_scale);
    emu::multiply_step(blackwell ? emu::Machine::Blackwell : emu::Machine::Hopper, left, right, d, columns);
}
