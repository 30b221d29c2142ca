/*
 * tcgen05.cpp - PTX ISA, "TensorCore 5th Generation Family Instructions": tensor memory and block-scaled products.
 *
 * mma, cp and commit of one thread form a stream that is carried out in issue order, later, like any asynchronous work.
 * Section "Pipelined tcgen05 Instructions" says which of them may rely on that order: cp before mma, mma before mma.
 * Everything else needs a commit, an mbarrier and tcgen05.fence::after_thread_sync; so do loads, whose end is made known
 * by tcgen05.wait::ld and fence::before_thread_sync.
 *
 * A cell of tensor memory remembers who wrote it and who has read it, like a byte of shared memory.
 */
#include "tcgen05.h"

#include <algorithm>
#include <cstring>

#include "arithmetic.h"
#include "runtime.h"

namespace emu {

constexpr uint32_t COLUMNS = 512, LANES = 128; /* "Tensor Memory Addressing" */

struct Cell {
    Epoch writer;
    Epoch readers[2];
};

struct TensorMemory {
    std::vector<uint32_t> words = std::vector<uint32_t>(COLUMNS * LANES, 0xCBCBCBCBu);
    std::vector<Cell> cells = std::vector<Cell>(COLUMNS * LANES);
    uint32_t base = 0, columns = 0; /* what the block has allocated; 0 columns: nothing */
    uint32_t largest = 0;           /* "the number of columns must not grow from one allocation to the next" */
    bool relinquished = false;
    int group = 0; /* .cta_group of the kernel, once one was seen */

    size_t at(uint32_t lane, uint32_t column) const { return (size_t)lane * COLUMNS + column; }
};

/* A thread's tcgen05 side. */
struct Stream {
    AgentId work = 0; /* mma and cp, clock = place in the stream */
    Clock issued = 0;
    std::deque<std::function<void()>> operations;
    AgentId loads = 0; /* tcgen05.ld, clock = number of the load */
    Clock started = 0, waited = 0;
    Past fenced; /* what the thread knew at its latest fence::after_thread_sync */
    struct Load {
        uint32_t *registers;
        uint32_t lane, column, count;
    };
    std::vector<Load> pending;
};

namespace {

Stream &stream_of(Thread &t) {
    if (!t.tcgen05) {
        char name[96];
        t.tcgen05 = std::make_shared<Stream>();
        snprintf(name, sizeof name, "tcgen05 operations of thread %u of block %u", t.number, t.block->number);
        t.tcgen05->work = new_agent(name);
        snprintf(name, sizeof name, "tcgen05 loads of thread %u of block %u", t.number, t.block->number);
        t.tcgen05->loads = new_agent(name);
        t.tcgen05->fenced = t.past;
    }
    return *t.tcgen05;
}

void check_group(Block &block, int group, const char *what) {
    TensorMemory &m = *block.tensor_memory;
    if (launch->capability < 100) {
        fail("%s: needs compute capability 10.0", what);
    }
    if (m.group != 0 && m.group != group) {
        fail("%s: cta_group::%d, but an earlier instruction of the kernel used cta_group::%d", what, group, m.group);
    }
    m.group = group;
    if (group == 2 && cluster->blocks.size() % 2 != 0) {
        fail("%s: cta_group::2 in a cluster of %zu", what, cluster->blocks.size());
    }
}

/* The blocks an instruction works on: its own, or both of the pair (ranks that differ in the last bit), even one first. */
std::vector<Block *> group_blocks(Block &block, int group) {
    if (group == 1) {
        return {&block};
    }
    return {cluster->blocks[block.rank & ~1u].get(), cluster->blocks[block.rank | 1u].get()};
}

void check_allocated(const Block &block, uint32_t lane, uint32_t column, uint32_t columns, const char *what) {
    const TensorMemory &m = *block.tensor_memory;
    if (lane >= LANES || column < m.base || column + columns > m.base + m.columns) {
        fail("%s: lane %u, columns %u to %u of tensor memory; block %u has allocated %u columns from %u on", what,
             lane, column, column + columns - 1, block.number, m.columns, m.base);
    }
}

/* ---- cells ----------------------------------------------------------------------------------------------- */

std::string place(const Block &block, uint32_t lane, uint32_t column) {
    char text[96];
    snprintf(text, sizeof text, "tensor memory lane %u column %u of block %u", lane, column, block.number);
    return text;
}

void note_cell_read(Block &block, uint32_t lane, uint32_t column, const View &view, Epoch as, const char *what) {
    Cell &c = block.tensor_memory->cells[block.tensor_memory->at(lane, column)];
    if (c.writer.agent == 0) {
        fail("%s reads %s, which nobody has written", what, place(block, lane, column).c_str());
    }
    if (!view.knows(c.writer)) {
        fail("race: %s reads %s, written by %s without an order between the two (commit, mbarrier, "
             "tcgen05.fence::after_thread_sync)",
             what, place(block, lane, column).c_str(), cluster->agents[c.writer.agent].name.c_str());
    }
    for (Epoch &r : c.readers) {
        if (r.agent == 0 || r.agent == as.agent || view.knows(r)) {
            r = as;
            return;
        }
    }
    fail("%s: three readers of %s without an order between them", what, place(block, lane, column).c_str());
}

/* `follows`: what of the stream's own earlier work the write may come after without waiting. */
void note_cell_write(Block &block, uint32_t lane, uint32_t column, const View &view, const View &follows, Epoch as,
                     const char *what) {
    Cell &c = block.tensor_memory->cells[block.tensor_memory->at(lane, column)];
    if (!follows.knows(c.writer) && c.writer.agent != 0) {
        fail("race: %s overwrites %s, written by %s without an order between the two", what,
             place(block, lane, column).c_str(), cluster->agents[c.writer.agent].name.c_str());
    }
    for (Epoch &r : c.readers) {
        if (r.agent != 0 && !(r.agent == as.agent ? follows : view).knows(r)) {
            fail("race: %s overwrites %s, read by %s without an order between the two", what,
                 place(block, lane, column).c_str(), cluster->agents[r.agent].name.c_str());
        }
        r = Epoch();
    }
    c.writer = as;
}

/* Puts an operation at the end of the thread's stream. */
void issue(Thread &t, const char *what, std::function<void()> operation) {
    auto stream = t.tcgen05;
    stream->operations.push_back(std::move(operation));
    queue_async(what, [stream]() {
        auto next = std::move(stream->operations.front());
        stream->operations.pop_front();
        next();
    });
}

/* ---- descriptors ----------------------------------------------------------------------------------------- */

/* "Shared memory descriptor". */
struct Matrix {
    uint32_t start, leading, stride, swizzle_bytes;
};

Matrix decode_matrix(uint64_t bits, const char *what) {
    static const uint32_t WIDTHS[8] = {16, 0, 128, 0, 64, 0, 32, 0};
    if ((bits >> 46 & 7) != 1 || (bits & 0x1FE0C000C000C000ull & ~(7ull << 46)) != 0) {
        fail("%s: constant or reserved bits of descriptor 0x%016llX are wrong", what, (unsigned long long)bits);
    }
    if (bits >> 52 & 1) {
        fail("%s: descriptor 0x%016llX has an absolute leading dimension, which is for K = 96 only", what,
             (unsigned long long)bits);
    }
    const Matrix m = {(uint32_t)(bits & 0x3FFF) << 4, (uint32_t)(bits >> 16 & 0x3FFF) << 4,
                      (uint32_t)(bits >> 32 & 0x3FFF) << 4, WIDTHS[bits >> 61]};
    const uint32_t base_offset = bits >> 49 & 7;
    if (m.swizzle_bytes == 0) {
        fail("%s: swizzle mode %u is not emulated", what, (unsigned)(bits >> 61));
    }
    if (base_offset != 0 || (m.swizzle_bytes > 16 && m.start / m.swizzle_bytes % 8 != 0)) {
        fail("%s: the matrix starts at 0x%X with base offset %u; its %u-byte swizzle pattern must start at a "
             "multiple of "
             "%u",
             what, m.start, base_offset, m.swizzle_bytes, 8 * m.swizzle_bytes);
    }
    if (m.leading > 16) { /* "Strides": not used where a swizzle row, or a single 16-byte column, holds all of K */
        fail("%s: the leading-dimension offset is not used here and must be 0 or 1, got %u", what, m.leading >> 4);
    }
    return m;
}

/* Offset in the window of 16 bytes of a K-major operand: row, and which half of the 32 bytes of K. */
uint32_t chunk_address(const Matrix &m, uint32_t row, uint32_t half) {
    const uint32_t address = m.start + row / 8 * m.stride + row % 8 * m.swizzle_bytes + 16 * half;
    return address ^ (address >> 7 & (m.swizzle_bytes / 16 - 1)) << 4;
}

SharedRef chunk(Block &block, uint32_t address, const char *what) {
    return shared_ref(block.rank << RANK_SHIFT | address, 16, 16, true, what);
}

/* "Instruction descriptor", table for .kind::mxf8f6f4. */
struct Instruction {
    uint32_t m, n, a_id, b_id;
    bool negate_a, negate_b;
};

Instruction decode_instruction(uint32_t bits, int group) {
    const char *what = "tcgen05.mma";
    Instruction i;
    if (bits & 0x8700004Bu) {
        fail("%s: reserved bits of the instruction descriptor 0x%08X are set", what, bits);
    }
    if (bits >> 2 & 1) {
        fail("%s: sparse products are not emulated", what);
    }
    if ((bits >> 7 & 7) != 0 || (bits >> 10 & 7) != 0) {
        fail("%s: formats %u and %u of A and B; only e4m3 (0) is emulated", what, bits >> 7 & 7, bits >> 10 & 7);
    }
    if (bits >> 15 & 3) {
        fail("%s: MN-major operands are not emulated", what);
    }
    if (!(bits >> 23 & 1)) {
        fail("%s: the scale format of kind::mxf8f6f4 is UE8M0 (1)", what);
    }
    i.m = (bits >> 27 & 3) * 128;
    i.n = (bits >> 17 & 63) * 8;
    i.a_id = bits >> 29 & 3;
    i.b_id = bits >> 4 & 3;
    i.negate_a = bits >> 13 & 1;
    i.negate_b = bits >> 14 & 1;
    if (group == 1 ? i.m != 128 : i.m != 256) {
        fail("%s: M = %u with cta_group::%d (emulated: 128 with 1, 256 with 2)", what, i.m, group);
    }
    if (i.n < 8u * group || i.n > 256 || i.n % (8 * group) != 0) {
        fail("%s: N = %u with cta_group::%d must be a multiple of %d up to 256", what, i.n, group, 8 * group);
    }
    return i;
}

} // namespace

/* ---- allocation ------------------------------------------------------------------------------------------ */

/* "tcgen05.alloc": a power of two from 32 to 512; in a pair both blocks do it, and get the same columns. */
void tcgen05_alloc(int group, uint32_t slot, uint32_t columns) {
    EMU_SITE();
    const char *what = "tcgen05.alloc";
    Thread &t = *current_thread;
    Block &block = *t.block;
    TensorMemory &m = *block.tensor_memory;
    check_group(block, group, what);
    meet(what, 0xFFFFFFFFu);
    const SharedRef to = shared_ref(slot, 4, 4, false, what);
    if (t.lane == 0) {
        if (columns < 32 || columns > COLUMNS || (columns & (columns - 1))) {
            fail("%s: the number of columns must be a power of two from 32 to 512, got %u", what, columns);
        }
        if (m.columns || m.relinquished) {
            fail(m.columns ? "%s: a second allocation is not emulated" : "%s after relinquish_alloc_permit", what);
        }
        if (m.largest && columns > m.largest) {
            fail("%s: %u columns after an allocation of %u", what, columns, m.largest);
        }
        m.largest = columns;
        m.columns = columns;
        m.base = columns <= COLUMNS / 2 ? COLUMNS - columns : 0; /* not 0 where another block could have been first */
        note_write(block, to.offset, 4, t.view(), {t.self, t.clock}, false, what);
        memcpy(to.data(), &m.base, 4);
        counters["tcgen05.alloc"]++;
    }
    meet(what, 0xFFFFFFFFu);
}

void tcgen05_dealloc(int group, uint32_t address, uint32_t columns) {
    EMU_SITE();
    const char *what = "tcgen05.dealloc";
    Thread &t = *current_thread;
    TensorMemory &m = *t.block->tensor_memory;
    check_group(*t.block, group, what);
    meet(what, 0xFFFFFFFFu);
    if (t.lane == 0) {
        if (m.columns == 0 || address != m.base || columns != m.columns) {
            fail("%s: %u columns at 0x%X; allocated are %u at 0x%X", what, columns, address, m.columns, m.base);
        }
        for (const Thread &other : t.block->threads) {
            if (other.tcgen05 && (!other.tcgen05->operations.empty() || !other.tcgen05->pending.empty())) {
                fail("%s: tcgen05 operations of thread %u are still under way", what, other.number);
            }
        }
        m.columns = 0;
    }
    meet(what, 0xFFFFFFFFu);
}

void tcgen05_relinquish(int group) {
    EMU_SITE();
    Thread &t = *current_thread;
    check_group(*t.block, group, "tcgen05.relinquish_alloc_permit");
    meet("tcgen05.relinquish_alloc_permit", 0xFFFFFFFFu);
    t.block->tensor_memory->relinquished = true;
}

/* ---- copies of scales ------------------------------------------------------------------------------------ */

/* "tcgen05.cp" .32x128b.warpx4: 32 rows of 16 bytes; word c of row L to column c of lanes L, L + 32, L + 64, L + 96. */
void tcgen05_copy_32x128b_warpx4(int group, uint32_t address, uint64_t descriptor) {
    EMU_SITE();
    const char *what = "tcgen05.cp";
    Thread &t = *current_thread;
    check_group(*t.block, group, what);
    Stream &s = stream_of(t);
    address = flipped("tcgen05.cp.address", address);
    const Matrix m = decode_matrix(flipped("tcgen05.cp", descriptor), what);
    const uint32_t column = address & 0xFFFF;
    const Epoch as = {s.work, ++s.issued};
    const View view = {&s.fenced, {}, t.block};
    if (m.swizzle_bytes != 16) {
        fail("%s: a swizzled source of scales is not emulated", what);
    }
    if (address >> 16 != 0) {
        fail("%s: .warpx4 fills all lanes; the address names lane %u", what, address >> 16);
    }
    for (Block *block : group_blocks(*t.block, group)) {
        check_allocated(*block, 0, column, 4, what);
        for (uint32_t row = 0; row < 32; row++) {
            const SharedRef from = chunk(*block, m.start + row / 8 * m.stride + row % 8 * 16, what);
            note_read(*block, from.offset, 16, t.view(), as, true, what);
            for (uint32_t lane = row; lane < LANES; lane += 32) {
                for (uint32_t c = 0; c < 4; c++) {
                    note_cell_write(*block, lane, column + c, view, view, as, what);
                }
            }
        }
        counters["tcgen05.cp"]++;
    }
    const std::vector<Block *> blocks = group_blocks(*t.block, group);
    issue(t, what, [=]() {
        for (Block *block : blocks) {
            TensorMemory &memory = *block->tensor_memory;
            for (uint32_t row = 0; row < 32; row++) {
                uint32_t words[4];
                memcpy(words, block->memory + m.start + row / 8 * m.stride + row % 8 * 16 - WINDOW_START, 16);
                for (uint32_t lane = row; lane < LANES; lane += 32) {
                    memcpy(&memory.words[memory.at(lane, column)], words, 16);
                }
            }
        }
    });
}

/* ---- products -------------------------------------------------------------------------------------------- */

namespace {

/* Checks the reads of an operand's rows in one block; `taints`: rows that nobody should need (runtime.h). */
void check_operand(Block &block, const Matrix &m, const char *operand, uint32_t rows, const View &view, Epoch as,
                   uint32_t *taints) {
    const Epoch writer = writer_of(block, chunk(block, chunk_address(m, 0, 0), "tcgen05.mma").offset);
    for (uint32_t r = 0; r < rows; r++) {
        const uint32_t offsets[2] = {chunk(block, chunk_address(m, r, 0), "tcgen05.mma").offset,
                                     chunk(block, chunk_address(m, r, 1), "tcgen05.mma").offset};
        taints[r] = 0;
        if (r > 0 && foreign_row(block, offsets, writer)) {
            if (*operand == 'B') { /* its number of rows, N, is the program's choice */
                fail("tcgen05.mma: reads row %u of operand B, at %s, which is not part of what was copied there", r,
                     describe(block, offsets[0]).c_str());
            }
            taints[r] = taint_of_row("tcgen05.mma", block, r, offsets[0]);
            continue;
        }
        note_read(block, offsets[0], 16, view, as, true, "tcgen05.mma");
        note_read(block, offsets[1], 16, view, as, true, "tcgen05.mma");
    }
}

void gather(const Block &block, const Matrix &m, uint32_t rows, bool negate, uint8_t *out) {
    for (uint32_t r = 0; r < rows; r++) {
        for (uint32_t half = 0; half < 2; half++) {
            memcpy(out + r * STEP_K + 16 * half, block.memory + chunk_address(m, r, half) - WINDOW_START, 16);
        }
    }
    for (uint32_t i = 0; negate && i < rows * STEP_K; i++) {
        out[i] ^= 0x80;
    }
}

/* "Scale Factor layout": row r in column r / 32 of lane r % 32, repeated in all four quarters; byte `id` of the word. */
void check_scales(Block &block, uint32_t column, uint32_t rows, const View &view, Epoch as) {
    check_allocated(block, 0, column, (rows + 31) / 32, "tcgen05.mma (scales)");
    for (uint32_t r = 0; r < rows; r++) {
        for (uint32_t quarter = 0; quarter < LANES; quarter += 32) {
            note_cell_read(block, r % 32 + quarter, column + r / 32, view, as, "tcgen05.mma (scales)");
        }
    }
}

void gather_scales(const Block &block, uint32_t column, uint32_t rows, uint32_t id, uint8_t *out) {
    const TensorMemory &m = *block.tensor_memory;
    for (uint32_t r = 0; r < rows; r++) {
        const uint32_t word = m.words[m.at(r % 32, column + r / 32)];
        for (uint32_t quarter = 32; quarter < LANES; quarter += 32) {
            if (m.words[m.at(r % 32 + quarter, column + r / 32)] != word) {
                fail("tcgen05.mma: the scale of row %u differs between the quarters of the lanes", r);
            }
        }
        out[r] = (uint8_t)(word >> 8 * id);
    }
}

} // namespace

/* "tcgen05.mma" .kind::mxf8f6f4 .block_scale: D = (A * SFA) (B * SFB) (+ D). In a pair each block holds its 128 rows of A
 * and D and half of B's rows, and all of B's scales. */
void tcgen05_mma_mxf8(int group, uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t sfa, uint32_t sfb,
                      bool accumulate) {
    EMU_SITE();
    const char *what = "tcgen05.mma";
    Thread &t = *current_thread;
    check_group(*t.block, group, what);
    Stream &s = stream_of(t);
    const Instruction in = decode_instruction((uint32_t)flipped("tcgen05.idesc", instruction), group);
    const Matrix left = decode_matrix(flipped("tcgen05.a", a), "tcgen05.mma (A)");
    const Matrix right = decode_matrix(flipped("tcgen05.b", b), "tcgen05.mma (B)");
    d = (uint32_t)flipped("tcgen05.d", d);
    sfa = (uint32_t)flipped("tcgen05.sfa", sfa);
    sfb = (uint32_t)flipped("tcgen05.sfb", sfb);
    accumulate = flipped("tcgen05.accumulate", accumulate);
    for (const Matrix &m : {left, right}) {
        if (m.swizzle_bytes == 16 || m.start % m.swizzle_bytes + STEP_K > m.swizzle_bytes) {
            fail("%s: an operand of 32 bytes from 0x%X in rows of %u", what, m.start, m.swizzle_bytes);
        }
    }
    if (group == 2 && t.block->rank % 2 != 0) {
        fail("%s: cta_group::2 is issued by the even block of a pair", what);
    }
    if ((d | sfa | sfb) >> 16) {
        fail("%s: D and scales of 128 rows start at lane 0; got addresses 0x%X, 0x%X, 0x%X", what, d, sfa, sfb);
    }
    const std::vector<Block *> blocks = group_blocks(*t.block, group);
    const Epoch as = {s.work, ++s.issued};
    const View after_fence = {&s.fenced, {}, t.block}, in_order = {&s.fenced, {s.work, s.issued}, t.block};
    const uint32_t rows_of_b = in.n / (uint32_t)group;
    auto a_taints = std::make_shared<std::vector<uint32_t>>(in.m);
    std::vector<uint32_t> b_taints(in.n); /* stay 0 */
    for (uint32_t i = 0; i < blocks.size(); i++) {
        Block &block = *blocks[i];
        check_operand(block, left, "A", 128, t.view(), as, &(*a_taints)[i * 128]);
        check_operand(block, right, "B", rows_of_b, t.view(), as, &b_taints[i * rows_of_b]);
        check_scales(block, sfa, 128, in_order, as);
        check_scales(block, sfb, in.n, in_order, as);
        check_allocated(block, 0, d, in.n, "tcgen05.mma (D)");
        for (uint32_t lane = 0; lane < LANES; lane++) {
            for (uint32_t n = 0; n < in.n; n++) {
                if (accumulate) {
                    note_cell_read(block, lane, d + n, in_order, as, "tcgen05.mma (D)");
                }
                note_cell_write(block, lane, d + n, after_fence, in_order, as, "tcgen05.mma (D)");
            }
        }
    }
    counters["tcgen05.mma"]++;
    issue(t, what, [=]() {
        std::vector<uint8_t> bytes(256 * STEP_K), scales(256);
        Operand columns;
        for (uint32_t i = 0; i < blocks.size(); i++) {
            gather(*blocks[i], right, rows_of_b, in.negate_b, &bytes[i * rows_of_b * STEP_K]);
        }
        const std::vector<uint8_t> all_of_b = bytes;
        for (uint32_t i = 0; i < blocks.size(); i++) {
            Operand rows;
            TensorMemory &m = *blocks[i]->tensor_memory;
            std::vector<float> sums(128 * in.n);
            gather_scales(*blocks[i], sfb, in.n, in.b_id, scales.data());
            columns.set(all_of_b.data(), (int)in.n, scales.data());
            gather_scales(*blocks[i], sfa, 128, in.a_id, scales.data());
            gather(*blocks[i], left, 128, in.negate_a, bytes.data());
            rows.set(bytes.data(), 128, scales.data());
            for (uint32_t lane = 0; accumulate && lane < 128; lane++) {
                memcpy(&sums[lane * in.n], &m.words[m.at(lane, d)], 4 * in.n);
            }
            multiply_step(Machine::Blackwell, rows, columns, sums.data(), (int)in.n);
            for (uint32_t lane = 0; lane < 128; lane++) {
                memcpy(&m.words[m.at(lane, d)], &sums[lane * in.n], 4 * in.n);
                if ((*a_taints)[i * 128 + lane]) {
                    std::fill_n(&m.words[m.at(lane, d)], in.n, (*a_taints)[i * 128 + lane]);
                }
            }
        }
    });
}

/* "tcgen05.commit": one arrival when all that this thread has issued is done; `ranks`: multicast over the cluster. */
void tcgen05_commit(int group, uint32_t barrier, uint32_t ranks) {
    EMU_SITE();
    const char *what = "tcgen05.commit";
    Thread &t = *current_thread;
    check_group(*t.block, group, what);
    Stream &s = stream_of(t);
    const Epoch done = {s.work, s.issued};
    std::vector<SharedRef> bars;
    for (uint32_t rank = 0; rank < 16; rank++) {
        if (ranks ? !(ranks >> rank & 1) : rank != barrier >> RANK_SHIFT) {
            continue;
        }
        const SharedRef ref = shared_ref((barrier & OFFSET_MASK) | rank << RANK_SHIFT, 8, 8, true, what);
        mbarrier_known(mbarrier_at(ref, what), ref, t.view(), true, what);
        bars.push_back(ref);
    }
    /* Whoever sees the operations done knows what happened before they were issued: that their operands had arrived. The
     * thread's own stores are not published. */
    const Past before = t.past;
    counters["tcgen05.commit"]++;
    issue(t, what, [=]() {
        for (const SharedRef &ref : bars) {
            mbarrier_arrive_for(ref, 1, visible_to(before, *ref.block), done, false, what);
        }
    });
}

/* ---- loads ----------------------------------------------------------------------------------------------- */

/* "tcgen05.ld" .32x32b: register i of a lane is column i of the lane's row; a warp reaches its own quarter of the lanes. */
void tcgen05_load_32x32b(uint32_t *registers, uint32_t count, uint32_t address) {
    EMU_SITE();
    const char *what = "tcgen05.ld";
    Thread &t = *current_thread;
    Stream &s = stream_of(t);
    check_group(*t.block, t.block->tensor_memory->group, what);
    auto m = meet(what, 0xFFFFFFFFu, address);
    if (m->values[0] != address) {
        fail("%s: lanes pass different addresses", what);
    }
    const uint32_t quarter = t.number / WARP_SIZE % 4 * 32, lane = (address >> 16) + t.lane,
                   column = address & 0xFFFF;
    if (address >> 16 != quarter) {
        fail("%s: warp %u reaches lanes %u to %u, the address names lane %u", what, t.number / WARP_SIZE, quarter,
             quarter + 31, address >> 16);
    }
    check_allocated(*t.block, lane, column, count, what);
    const View view = {&s.fenced, {s.loads, s.started}, t.block};
    s.started++;
    for (uint32_t i = 0; i < count; i++) {
        note_cell_read(*t.block, lane, column + i, view, {s.loads, s.started}, what);
        registers[i] = TAINT_OF_LOAD;
    }
    s.pending.push_back({registers, lane, column, count});
    counters["tcgen05.ld"]++;
}

/* "tcgen05.wait::ld". */
void tcgen05_wait_load() {
    EMU_SITE();
    Thread &t = *current_thread;
    Stream &s = stream_of(t);
    const TensorMemory &m = *t.block->tensor_memory;
    meet("tcgen05.wait::ld", 0xFFFFFFFFu);
    for (const Stream::Load &load : s.pending) {
        memcpy(load.registers, &m.words[m.at(load.lane, load.column)], 4 * load.count);
    }
    s.pending.clear();
    s.waited = s.started;
}

/* "tcgen05.fence": before, what this thread's tcgen05 work has finished is passed on by its next arrival; after, what the
 * thread has learned counts for its next tcgen05 work. */
void tcgen05_fence_before() {
    EMU_SITE();
    Stream &s = stream_of(*current_thread);
    if (s.waited) {
        learn(current_thread, Epoch{s.loads, s.waited});
    }
}

void tcgen05_fence_after() {
    EMU_SITE();
    stream_of(*current_thread).fenced = current_thread->past;
}

/* ---- hooks ----------------------------------------------------------------------------------------------- */

void tcgen05_begin_block(Block &block) {
    if (launch->capability >= 100) {
        block.tensor_memory = std::make_shared<TensorMemory>();
    }
}

void tcgen05_end_of_block(Block &block) {
    if (block.tensor_memory && block.tensor_memory->columns) {
        fail("block %u ends with %u columns of tensor memory allocated", block.number, block.tensor_memory->columns);
    }
}

} // namespace emu
