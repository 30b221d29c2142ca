/*
 * wgmma.cpp - PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions": wgmma.mma_async m64nNk32 on e4m3, K-major.
 *
 * Each warp of the warpgroup owns 16 rows of the result. A product is checked when it is issued; it is carried out when
 * wgmma.wait_group needs it. Until then the accumulator registers hold a pattern that shows whether the program touched
 * them.
 */
#include <algorithm>
#include <cstring>

#include "arithmetic.h"
#include "runtime.h"

namespace emu {

namespace {

constexpr uint32_t PENDING_BITS = 0x7FADBEEFu; /* a NaN that no computation gives */
constexpr uint32_t ROWS = 16, MAX_REGISTERS = 128;

} // namespace

struct Product {
    float *d[WARP_SIZE];
    uint32_t a_registers[WARP_SIZE][4];
    bool a_in_registers;
    uint32_t count[WARP_SIZE];
    uint64_t a[WARP_SIZE], b[WARP_SIZE];
    bool accumulate[WARP_SIZE];
    std::vector<uint32_t> a_taints, b_taints; /* by row of the operand; those of B stay 0 */
};

/* Accumulator registers while products on them are under way: [16 rows][2 * count columns]. */
struct Accumulator {
    float *key; /* lane 0's registers */
    float *d[WARP_SIZE];
    uint32_t count;
    uint32_t pending;
    std::vector<float> values;
};

struct WgmmaState {
    AgentId agent = 0; /* reads of shared memory by group g have clock g + 1 */
    Product next;      /* filled in by the lanes */
    bool fenced = false;
    std::vector<Product> open;
    std::deque<std::vector<Product>> groups;
    uint64_t committed = 0, finished = 0;
    uint64_t products = 0;
    std::vector<Accumulator> accumulators;
};

namespace {

/* ---- descriptors ----------------------------------------------------------------------------------------- */

/* PTX ISA, "Matrix Descriptor Format" of wgmma. */
struct Descriptor {
    uint32_t start, leading, stride;
    uint32_t base_offset;
    uint32_t swizzle_bytes; /* of a row: 16 (none), 32, 64, 128 */
};

Descriptor decode(uint64_t bits, const char *operand) {
    static const uint32_t WIDTHS[4] = {16, 128, 64, 32};
    Descriptor d;
    if (bits & 0x3FF1C000C000C000ull) {
        fail("wgmma: reserved bits of the descriptor of %s are set: 0x%016llX", operand, (unsigned long long)bits);
    }
    d.start = (uint32_t)(bits & 0x3FFF) << 4;
    d.leading = (uint32_t)(bits >> 16 & 0x3FFF) << 4;
    d.stride = (uint32_t)(bits >> 32 & 0x3FFF) << 4;
    d.base_offset = bits >> 49 & 7;
    d.swizzle_bytes = WIDTHS[bits >> 62];
    if (d.swizzle_bytes > 16) {
        /* "Strides": the leading dimension is not used with swizzled K-major layouts; assumed 1. */
        if (d.leading > 16) {
            fail("wgmma: the leading-dimension offset of %s must be 1 with a swizzle, got %u", operand,
                 d.leading >> 4);
        }
        /* "Matrix base offset": the repeating pattern of 8 rows starts on its own size, else its phase is given here. */
        if (d.start / d.swizzle_bytes % 8 != 0 || d.base_offset != 0) {
            fail("wgmma: %s starts at 0x%X with base offset %u; its %u-byte swizzle pattern must start at a multiple "
                 "of "
                 "%u",
                 operand, d.start, d.base_offset, d.swizzle_bytes, 8 * d.swizzle_bytes);
        }
        if (d.start % d.swizzle_bytes + 32 > d.swizzle_bytes) {
            fail("wgmma: 32 bytes from 0x%X leave the %u-byte row of %s", d.start, d.swizzle_bytes, operand);
        }
    } else if (d.base_offset != 0) {
        fail("wgmma: base offset %u of %s without a swizzle", d.base_offset, operand);
    }
    return d;
}

/* Offset in the window of the 16 bytes `half` of row `row`. "Shared Memory Matrix Layout", K-major. */
uint32_t chunk_address(const Descriptor &d, uint32_t row, uint32_t half) {
    uint32_t address = d.start + row / 8 * d.stride + row % 8 * d.swizzle_bytes;
    if (d.swizzle_bytes == 16) {
        return address + half * d.leading;
    }
    address += 16 * half;
    return address ^ (address >> 7 & (d.swizzle_bytes / 16 - 1)) << 4;
}

SharedRef chunk_ref(Block &block, const Descriptor &d, uint32_t row, uint32_t half) {
    return shared_ref(block.rank << RANK_SHIFT | chunk_address(d, row, half), 16, 16, false, "wgmma");
}

/* Checks and notes the reads of rows [first, first + rows); `taints`: 0, or what the row's results become. */
void check_rows(Block &block, const Descriptor &d, const char *operand, uint32_t first, uint32_t rows,
                const View &view, Epoch as, std::vector<uint32_t> &taints) {
    const Epoch writer = writer_of(block, chunk_ref(block, d, 0, 0).offset);
    taints.assign(rows, 0);
    for (uint32_t r = 0; r < rows; r++) {
        const uint32_t offsets[2] = {chunk_ref(block, d, first + r, 0).offset,
                                     chunk_ref(block, d, first + r, 1).offset};
        if (first + r > 0 && foreign_row(block, offsets, writer)) {
            if (*operand == 'B') { /* its number of rows, N, is the program's choice */
                fail("wgmma.mma_async: reads row %u of operand B, at %s, which is not part of what was copied there",
                     first + r, describe(block, offsets[0]).c_str());
            }
            taints[r] = taint_of_row("wgmma", block, first + r, offsets[0]);
            counters["wgmma.foreign_rows"]++;
            continue;
        }
        note_read(block, offsets[0], 16, view, as, true, "wgmma");
        note_read(block, offsets[1], 16, view, as, true, "wgmma");
    }
}

/* Copies rows of 32 bytes out of shared memory. */
void gather(const Block &block, const Descriptor &d, uint32_t first, uint32_t rows, uint8_t *out) {
    for (uint32_t r = 0; r < rows; r++) {
        for (uint32_t half = 0; half < 2; half++) {
            memcpy(out + r * STEP_K + 16 * half, block.memory + chunk_address(d, first + r, half) - WINDOW_START, 16);
        }
    }
}

/* ---- fragments ------------------------------------------------------------------------------------------- */

/* "Register Fragments": element (row, column) of the warp's 16 rows of D, for register i of a lane. */
void place_of(uint32_t lane, uint32_t i, uint32_t &row, uint32_t &column) {
    row = lane / 4 + 8 * (i / 2 % 2);
    column = i / 4 * 8 + 2 * (lane % 4) + i % 2;
}

/* A in registers: four bytes of row lane / 4 (+ 8 in registers 1 and 3), from column 4 * (lane % 4) (+ 16 in 2 and 3). */
void a_from_registers(const Product &p, uint8_t *out) {
    for (uint32_t lane = 0; lane < WARP_SIZE; lane++) {
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t row = lane / 4 + 8 * (i % 2), column = 4 * (lane % 4) + 16 * (i / 2);
            memcpy(out + row * STEP_K + column, &p.a_registers[lane][i], 4);
        }
    }
}

/* ---- products -------------------------------------------------------------------------------------------- */

void execute(Warp &warp, const Product &p) {
    WgmmaState &s = *warp.wgmma;
    uint8_t a[ROWS * STEP_K];
    std::vector<uint8_t> b((size_t)p.count[0] * 2 * STEP_K);
    Operand left, right;
    if (p.a_in_registers) {
        a_from_registers(p, a);
    } else {
        gather(*warp.block, decode(p.a[0], "A"), warp.number % 4 * ROWS, ROWS, a);
    }
    gather(*warp.block, decode(p.b[0], "B"), 0, p.count[0] * 2, b.data());
    left.set(a, ROWS, nullptr);
    right.set(b.data(), (int)p.count[0] * 2, nullptr);
    auto acc = std::find_if(s.accumulators.begin(), s.accumulators.end(),
                            [&](const Accumulator &x) { return x.key == p.d[0]; });
    if (!p.accumulate[0]) {
        std::fill(acc->values.begin(), acc->values.end(), 0.0f);
    }
    multiply_step(Machine::Hopper, left, right, acc->values.data(), (int)p.count[0] * 2);
    for (uint32_t row = 0; row < ROWS; row++) {
        for (uint32_t column = 0; column < p.count[0] * 2; column++) {
            if (!p.a_in_registers && p.a_taints[row]) {
                memcpy(&acc->values[row * p.count[0] * 2 + column], &p.a_taints[row], 4);
            }
        }
    }
    if (--acc->pending > 0) {
        return;
    }
    for (uint32_t lane = 0; lane < WARP_SIZE; lane++) {
        for (uint32_t i = 0; i < acc->count; i++) {
            uint32_t row, column;
            place_of(lane, i, row, column);
            acc->d[lane][i] = acc->values[row * acc->count * 2 + column];
        }
    }
    s.accumulators.erase(acc);
}

/* Takes the accumulator away from the lanes, or checks that nobody touched it since the last product. */
void hold_accumulator(WgmmaState &s, const Product &p) {
    auto acc = std::find_if(s.accumulators.begin(), s.accumulators.end(),
                            [&](const Accumulator &x) { return x.key == p.d[0]; });
    if (acc != s.accumulators.end()) {
        if (acc->count != p.count[0]) {
            fail("wgmma.mma_async: products of different shapes share accumulator registers");
        }
        for (uint32_t lane = 0; lane < WARP_SIZE; lane++) {
            for (uint32_t i = 0; i < p.count[0]; i++) {
                uint32_t bits;
                memcpy(&bits, &p.d[lane][i], 4);
                if (bits != PENDING_BITS) {
                    fail("wgmma.mma_async: accumulator register %u of lane %u was written while a product on it is "
                         "under "
                         "way",
                         i, lane);
                }
            }
        }
        acc->pending++;
        return;
    }
    if (!s.fenced) {
        fail("wgmma.mma_async: wgmma.fence is missing between other uses of the accumulator registers and this "
             "product");
    }
    Accumulator fresh;
    fresh.key = p.d[0];
    memcpy(fresh.d, p.d, sizeof fresh.d);
    fresh.count = p.count[0];
    fresh.pending = 1;
    fresh.values.resize(ROWS * 2 * (size_t)fresh.count);
    for (uint32_t lane = 0; lane < WARP_SIZE; lane++) {
        for (uint32_t i = 0; i < fresh.count; i++) {
            uint32_t row, column;
            place_of(lane, i, row, column);
            fresh.values[row * fresh.count * 2 + column] = p.d[lane][i];
            memcpy(&p.d[lane][i], &PENDING_BITS, 4);
        }
    }
    s.accumulators.push_back(std::move(fresh));
}

void finish_groups(Warp &warp, size_t keep) {
    WgmmaState &s = *warp.wgmma;
    while (s.groups.size() > keep) {
        for (const Product &p : s.groups.front()) {
            execute(warp, p);
        }
        s.groups.pop_front();
        s.finished++;
    }
}

void issue(Warp &warp) {
    WgmmaState &s = *warp.wgmma;
    Product &p = s.next;
    for (uint32_t lane = 1; lane < WARP_SIZE; lane++) {
        if (p.count[lane] != p.count[0] || p.b[lane] != p.b[0] || p.accumulate[lane] != p.accumulate[0] ||
            (!p.a_in_registers && p.a[lane] != p.a[0])) {
            fail("wgmma.mma_async: lanes 0 and %u of the warp pass different operands", lane);
        }
    }
    p.a[0] = flipped("wgmma.a", p.a[0]);
    p.b[0] = flipped("wgmma.b", p.b[0]);
    const Past past = joint_past(warp);
    const View view = {&past, {}, warp.block};
    const Epoch as = {s.agent, (Clock)s.committed + 1};
    if (!p.a_in_registers) {
        check_rows(*warp.block, decode(p.a[0], "A"), "A", warp.number % 4 * ROWS, ROWS, view, as, p.a_taints);
    }
    check_rows(*warp.block, decode(p.b[0], "B"), "B", 0, p.count[0] * 2, view, as, p.b_taints);
    hold_accumulator(s, p);
    s.open.push_back(p);
    s.products++;
    counters["wgmma"]++;
}

WgmmaState &state() { return *current_thread->warp->wgmma; }

} // namespace

void wgmma_fence() {
    EMU_SITE();
    meet("wgmma.fence", 0xFFFFFFFFu, 0, 0, false, [](Meeting &) { state().fenced = true; });
}

void wgmma_multiply(float *d, uint32_t count, const uint32_t *a, uint64_t a_descriptor, uint64_t b_descriptor,
                    bool accumulate) {
    EMU_SITE();
    const uint32_t lane = current_thread->lane;
    Warp &warp = *current_thread->warp;
    if (count > MAX_REGISTERS || count % 4 != 0 || count == 0) {
        fail("wgmma.mma_async: N must be a multiple of 8 up to 256, got %u", 2 * count);
    }
    if (warp.lanes.size() != WARP_SIZE || warp.number / 4 * 4 + 4 > warp.block->warps.size()) {
        fail("wgmma.mma_async: warp %u is not part of a whole warpgroup", warp.number);
    }
    Product &p = warp.wgmma->next;
    p.d[lane] = d;
    p.count[lane] = count;
    p.a_in_registers = a != nullptr;
    if (a) {
        memcpy(p.a_registers[lane], a, sizeof p.a_registers[lane]);
    }
    p.a[lane] = a_descriptor;
    p.b[lane] = b_descriptor;
    p.accumulate[lane] = accumulate;
    meet("wgmma.mma_async", 0xFFFFFFFFu, 0, 0, false, [&](Meeting &) { issue(warp); });
}

void wgmma_commit() {
    EMU_SITE();
    Warp &warp = *current_thread->warp;
    meet("wgmma.commit_group", 0xFFFFFFFFu, 0, 0, false, [&](Meeting &) {
        WgmmaState &s = *warp.wgmma;
        s.groups.push_back(std::move(s.open));
        s.open.clear();
        s.committed++;
    });
}

void wgmma_wait(uint32_t groups) {
    EMU_SITE();
    Warp &warp = *current_thread->warp;
    meet("wgmma.wait_group", 0xFFFFFFFFu, 0, 0, false, [&](Meeting &) {
        finish_groups(warp, groups);
        warp.wgmma->fenced = false; /* registers may be used now, so the next fresh product needs a fence */
    });
    learn(current_thread, Epoch{warp.wgmma->agent, (Clock)warp.wgmma->finished});
}

void wgmma_begin_block(Block &block) {
    for (Warp &warp : block.warps) {
        warp.wgmma = std::make_shared<WgmmaState>();
        char name[64];
        snprintf(name, sizeof name, "wgmma of warp %u of block %u", warp.number, block.number);
        warp.wgmma->agent = new_agent(name);
    }
}

void wgmma_end_of_thread(Thread &thread) {
    Warp &warp = *thread.warp;
    WgmmaState &s = *warp.wgmma;
    if (!s.open.empty() || !s.groups.empty()) {
        fail("the thread exits while products of its warp are under way: wgmma.wait_group is missing");
    }
    if (s.products == 0) {
        return;
    }
    for (uint32_t i = warp.number / 4 * 4; i < warp.number / 4 * 4 + 4; i++) {
        const Warp &other = thread.block->warps[i];
        if (other.lanes[0]->state == State::Done && other.wgmma->products != s.products) {
            fail("warps %u and %u of one warpgroup issued %llu and %llu products", warp.number, i,
                 (unsigned long long)s.products, (unsigned long long)other.wgmma->products);
        }
    }
}

} // namespace emu
