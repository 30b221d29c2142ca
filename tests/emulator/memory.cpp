/*
 * memory.cpp - shared and global memory: where it lies, and whether an access to it is allowed.
 *
 * Shared memory of a block is a slot of one memory file. The array that a kernel declares as `extern __shared__` is a
 * window onto the slot of the block that runs, so ordinary pointers into it work too. Every byte remembers who wrote it,
 * every 16 bytes who has read them since; an access that is not ordered after them is an error.
 *
 * Global memory is the caller's buffers, registered with their extent. A byte written by an earlier kernel of a chain of
 * overlapping launches may be read only after griddepcontrol.wait; one written by another cluster of the same launch
 * never.
 *
 * The compiler calls the functions at the end for every memory access of a kernel (-fsanitize=thread, without its
 * library) and for every misaligned or out-of-range one (-fsanitize=alignment,bounds,...).
 */
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "memory.h"
#include "runtime.h"

namespace emu {

namespace {

constexpr uint8_t UNWRITTEN = 0xCB; /* what shared memory holds at the start: no useful number */

int memory_file = -1;
std::vector<uint8_t *> slots;
uint8_t *window_low, *window_high;

struct Range {
    const char *low, *high;
};
std::vector<Range> images;
Range parameters;

/* ---- shared memory --------------------------------------------------------------------------------------- */

uint8_t *slot(uint32_t number) {
    if (memory_file < 0) {
        memory_file = memfd_create("emulated shared memory", 0);
    }
    while (slots.size() <= number) {
        const size_t offset = slots.size() * SLOT_BYTES;
        void *p = MAP_FAILED;
        if (memory_file >= 0 && ftruncate(memory_file, (off_t)(offset + SLOT_BYTES)) == 0) {
            p = mmap(nullptr, SLOT_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, memory_file, (off_t)offset);
        }
        if (p == MAP_FAILED) {
            fail("out of memory for the shared memory of %zu blocks", slots.size() + 1);
        }
        slots.push_back((uint8_t *)p);
    }
    return slots[number];
}

std::string name_of(Epoch e) {
    const AgentInfo &info = cluster->agents[e.agent];
    if (!info.thread) {
        return info.name;
    }
    char text[96];
    snprintf(text, sizeof text, "thread %u of block %u", info.thread->number, info.thread->block->number);
    return text;
}

/* Whether the thread that wrote `e` has since executed fence.proxy.async, and the viewer knows it. */
bool fenced(Epoch e, const View &view) {
    const Thread *writer = cluster->agents[e.agent].thread;
    const auto &fences = writer->proxy_fences;
    auto first = std::lower_bound(fences.begin(), fences.end(), e.clock);
    return first != fences.end() && view.knows({e.agent, *first});
}

void check_writer(const Block &block, uint32_t offset, Epoch writer, const View &view, bool async, bool reading,
                  const char *what) {
    if (writer.agent == 0) {
        if (reading) {
            fail("%s reads %s, which nobody has written", what, describe(block, offset).c_str());
        }
        return;
    }
    if (!view.knows(writer)) {
        fail("race: %s %s %s, written by %s without an order between the two", what, reading ? "reads" : "overwrites",
             describe(block, offset).c_str(), name_of(writer).c_str());
    }
    const Thread *thread = cluster->agents[writer.agent].thread;
    if (thread && thread->block != view.block && !view.knows({writer.agent + PUBLISHED, writer.clock})) {
        fail("race: %s %s %s, written by %s of another block: the barrier between the two has no cluster scope", what,
             reading ? "reads" : "overwrites", describe(block, offset).c_str(), name_of(writer).c_str());
    }
    if (async && thread && !fenced(writer, view)) {
        fail("%s %s %s, written by %s with an ordinary store: that thread's fence.proxy.async is missing", what,
             reading ? "reads" : "overwrites", describe(block, offset).c_str(), name_of(writer).c_str());
    }
}

void check_not_barrier(const Block &block, uint32_t offset, uint32_t bytes, const char *what) {
    for (uint32_t word = offset / 8; word <= (offset + bytes - 1) / 8; word++) {
        if (block.barriers[word] && block.barriers[word]->live) {
            fail("%s touches the mbarrier at %s", what, describe(block, word * 8).c_str());
        }
    }
}

} // namespace

std::string describe(const Block &block, uint32_t offset) {
    char text[64];
    snprintf(text, sizeof text, "shared+0x%X of block %u", offset, block.number);
    return text;
}

SharedRef shared_ref(uint32_t address, uint32_t bytes, uint32_t align, bool may_be_remote, const char *what) {
    const uint32_t rank = address >> RANK_SHIFT, start = address & OFFSET_MASK;
    const uint32_t own = current_thread ? current_thread->block->rank : rank;
    if (rank >= cluster->blocks.size()) {
        fail("%s: address 0x%08X names block %u of a cluster of %zu", what, address, rank, cluster->blocks.size());
    }
    if (!may_be_remote && rank != own) {
        fail("%s: address 0x%08X lies in block %u of the cluster, the instruction takes only the own block's (%u)",
             what, address, rank, own);
    }
    Block &block = *cluster->blocks[rank];
    if (start < WINDOW_START || start - WINDOW_START + (uint64_t)bytes > block.shared_bytes) {
        fail("%s: %u bytes at shared address 0x%08X (shared+0x%X) lie outside the block's %u bytes", what, bytes,
             address, start - WINDOW_START, block.shared_bytes);
    }
    if (address % align != 0) {
        fail("%s: address 0x%08X must be a multiple of %u", what, address, align);
    }
    if (rank != own && block.live == 0) {
        fail("%s: block %u of the cluster has exited", what, rank);
    }
    return {&block, start - WINDOW_START};
}

void note_read(Block &block, uint32_t offset, uint32_t bytes, const View &view, Epoch as, bool async,
               const char *what) {
    if (!options.check_races || bytes == 0) {
        return;
    }
    if (!async) {
        check_not_barrier(block, offset, bytes, what);
    }
    for (uint32_t end = offset + bytes; offset < end;) {
        Granule &g = block.granules[offset / 16];
        const uint32_t first = offset % 16, n = std::min(16 - first, end - offset);
        for (uint32_t i = first; i < first + n; i++) {
            const Epoch w = g.writer[i];
            if (i == first || w.agent != g.writer[i - 1].agent || w.clock != g.writer[i - 1].clock) {
                check_writer(block, offset - first + i, w, view, async, true, what);
            }
        }
        const uint16_t mask = (uint16_t)(((1u << n) - 1) << first);
        bool noted = false;
        for (Reader &r : g.readers) {
            if (r.epoch.agent == as.agent) {
                if (r.epoch.clock == as.clock) {
                    r.mask |= mask;
                } else if ((r.mask & ~mask) == 0) {
                    r = {as, mask};
                } else {
                    continue;
                }
                noted = true;
                break;
            }
        }
        if (!noted) {
            g.readers.push_back({as, mask});
        }
        offset += n;
    }
}

void note_write(Block &block, uint32_t offset, uint32_t bytes, const View &view, Epoch as, bool async,
                const char *what) {
    if (!options.check_races || bytes == 0) {
        return;
    }
    if (!async || as.agent == 0) {
        check_not_barrier(block, offset, bytes, what);
    }
    for (uint32_t end = offset + bytes; offset < end;) {
        Granule &g = block.granules[offset / 16];
        const uint32_t first = offset % 16, n = std::min(16 - first, end - offset);
        const uint16_t mask = (uint16_t)(((1u << n) - 1) << first);
        for (uint32_t i = first; i < first + n; i++) {
            const Epoch w = g.writer[i];
            if (i == first || w.agent != g.writer[i - 1].agent || w.clock != g.writer[i - 1].clock) {
                check_writer(block, offset - first + i, w, view, async, false, what);
            }
            g.writer[i] = as;
        }
        for (size_t i = 0; i < g.readers.size();) {
            Reader &r = g.readers[i];
            if (r.mask & mask) {
                if (!view.knows(r.epoch)) {
                    fail("race: %s overwrites %s, read by %s without an order between the two", what,
                         describe(block, offset).c_str(), name_of(r.epoch).c_str());
                }
                r.mask = (uint16_t)(r.mask & ~mask);
                if (r.mask == 0) {
                    r = g.readers.back();
                    g.readers.pop_back();
                    continue;
                }
            }
            i++;
        }
        offset += n;
    }
}

void begin_block_memory(Block &block, uint32_t slot_number) {
    block.memory = slot(slot_number);
    memset(block.memory, UNWRITTEN, SLOT_BYTES);
    block.granules.resize((block.shared_bytes + 15) / 16);
    block.barriers.resize(block.shared_bytes / 8 + 1);
}

void map_window(const Block &block) {
    if (!window_low || block.memory == nullptr) {
        return;
    }
    const off_t offset = (off_t)(block.rank * SLOT_BYTES);
    void *p = mmap(window_low, SLOT_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_POPULATE, memory_file,
                   offset);
    if (p == MAP_FAILED) {
        fail("cannot map the shared memory of block %u", block.number);
    }
}

void set_window(void *p, size_t bytes) {
    window_low = (uint8_t *)p;
    window_high = window_low + (bytes < SLOT_BYTES ? bytes : SLOT_BYTES);
}

void add_image(const void *low, const void *high) { images.push_back({(const char *)low, (const char *)high}); }

void set_parameters(const void *low, size_t bytes) { parameters = {(const char *)low, (const char *)low + bytes}; }

/* ---- rows that nobody needs ------------------------------------------------------------------------------- */

static std::vector<std::string> taints;

uint32_t taint(const std::string &message) {
    size_t i = 0;
    while (i < taints.size() && taints[i] != message) {
        i++;
    }
    if (i == taints.size()) {
        taints.push_back(message);
    }
    return 0x7FFB0000u | (uint32_t)(i & 0xFFFF);
}

Epoch writer_of(const Block &block, uint32_t offset) { return block.granules[offset / 16].writer[offset % 16]; }

bool foreign_row(const Block &block, const uint32_t (&offsets)[2], Epoch first) {
    for (uint32_t offset : offsets) {
        const Epoch w = writer_of(block, offset);
        const bool by_thread = cluster->agents[w.agent].thread != nullptr;
        if (w.agent == 0 || by_thread != (cluster->agents[first.agent].thread != nullptr) ||
            (!by_thread && (w.agent != first.agent || w.clock != first.clock))) {
            return true;
        }
    }
    return false;
}

void use_value(float value) {
    EMU_SITE();
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (is_taint(bits)) {
        fail("uses a product of %s", taints[bits & 0xFFFF].c_str());
    }
}

/* ---- shared memory by address ---------------------------------------------------------------------------- */

uint32_t shared_address(const void *p) {
    const uint8_t *byte = (const uint8_t *)p;
    if (byte < window_low || byte > window_high) {
        fail("__cvta_generic_to_shared: %p is no address of shared memory", p);
    }
    return current_thread->block->rank << RANK_SHIFT | (WINDOW_START + (uint32_t)(byte - window_low));
}

/* PTX ISA, "mapa". */
uint32_t map_address(uint32_t address, uint32_t rank) {
    EMU_SITE();
    if (rank >= cluster->blocks.size()) {
        fail("mapa: rank %u of a cluster of %zu", rank, cluster->blocks.size());
    }
    return (address & OFFSET_MASK) | rank << RANK_SHIFT;
}

void shared_load(uint32_t address, void *out, uint32_t bytes) {
    EMU_SITE();
    Thread &t = *current_thread;
    const SharedRef ref = shared_ref(address, bytes, bytes, false, "ld.shared");
    note_read(*ref.block, ref.offset, bytes, t.view(), {t.self, t.clock}, false, "ld.shared");
    memcpy(out, ref.data(), bytes);
}

void shared_store(uint32_t address, const void *value, uint32_t bytes, bool may_be_remote) {
    EMU_SITE();
    Thread &t = *current_thread;
    const char *what = may_be_remote ? "st.shared::cluster" : "st.shared";
    const SharedRef ref = shared_ref(address, bytes, bytes, may_be_remote, what);
    note_write(*ref.block, ref.offset, bytes, t.view(), {t.self, t.clock}, false, what);
    memcpy(ref.data(), value, bytes);
}

/* PTX ISA, "ldmatrix" and "stmatrix", .m8n8.b16: lane 8 m + r names row r of matrix m; lane l holds the two 16-bit
 * elements 2 (l % 4) and + 1 of row l / 4 (of column l / 4 when transposed). */
static void matrix_rows(const char *what, uint32_t address, uint32_t count, bool store,
                        SharedRef (&rows)[WARP_SIZE]) {
    Thread &t = *current_thread;
    auto m = meet(what, 0xFFFFFFFFu, address);
    for (uint32_t i = 0; i < 8 * count; i++) {
        rows[i] = shared_ref(m->values[i], 16, 16, false, what);
    }
    if (t.lane < 8 * count) {
        const SharedRef own = rows[t.lane];
        if (store) {
            note_write(*own.block, own.offset, 16, t.view(), {t.self, t.clock}, false, what);
        } else {
            note_read(*own.block, own.offset, 16, t.view(), {t.self, t.clock}, false, what);
        }
    }
}

void matrix_load(uint32_t address, uint32_t *d, uint32_t count, bool transposed) {
    EMU_SITE();
    SharedRef rows[WARP_SIZE];
    matrix_rows("ldmatrix", address, count, false, rows);
    const uint32_t lane = current_thread->lane, r = lane / 4, c = 2 * (lane % 4);
    for (uint32_t i = 0; i < count; i++) {
        uint16_t v[2];
        for (uint32_t j = 0; j < 2; j++) {
            memcpy(&v[j], rows[8 * i + (transposed ? c + j : r)].data() + 2 * (transposed ? r : c + j), 2);
        }
        d[i] = v[0] | (uint32_t)v[1] << 16;
    }
    meet("ldmatrix", 0xFFFFFFFFu);
}

void matrix_store(uint32_t address, const uint32_t *d, uint32_t count, bool transposed) {
    EMU_SITE();
    SharedRef rows[WARP_SIZE];
    matrix_rows("stmatrix", address, count, true, rows);
    const uint32_t lane = current_thread->lane, r = lane / 4, c = 2 * (lane % 4);
    for (uint32_t i = 0; i < count; i++) {
        for (uint32_t j = 0; j < 2; j++) {
            const uint16_t v = (uint16_t)(d[i] >> 16 * j);
            memcpy(rows[8 * i + (transposed ? c + j : r)].data() + 2 * (transposed ? r : c + j), &v, 2);
        }
    }
    meet("stmatrix", 0xFFFFFFFFu);
}

/* PTX ISA, "Async proxy": ordinary accesses before the fence, asynchronous ones after it. */
void proxy_fence_async() {
    EMU_SITE();
    current_thread->proxy_fences.push_back(current_thread->clock);
    current_thread->clock++;
}

/* ---- global memory --------------------------------------------------------------------------------------- */

namespace {

struct Buffer {
    char *low, *high;
    std::string name;
    std::vector<uint16_t> writer; /* by byte: cluster of this launch + 1; EARLIER: an earlier kernel of the chain */
};
constexpr uint16_t EARLIER = 0xFFFF;
std::map<const char *, Buffer> buffers; /* by upper end */
Buffer *latest_buffer;

Buffer *find_buffer(const char *p) {
    if (latest_buffer && p >= latest_buffer->low && p < latest_buffer->high) {
        return latest_buffer;
    }
    auto it = buffers.upper_bound(p);
    if (it == buffers.end() || p < it->second.low) {
        return nullptr;
    }
    return latest_buffer = &it->second;
}

/* "8 bytes before 'w'" */
std::string nearest_buffer(const char *p) {
    char text[256] = "no buffer is registered";
    uint64_t best = UINT64_MAX;
    for (auto &entry : buffers) {
        const Buffer &b = entry.second;
        const uint64_t before = p < b.low ? (uint64_t)(b.low - p) : UINT64_MAX;
        const uint64_t after = p >= b.high ? (uint64_t)(p - b.high) : UINT64_MAX;
        if (std::min(before, after) < best) {
            best = std::min(before, after);
            snprintf(text, sizeof text, "%llu bytes %s of '%s' (%zu bytes)", (unsigned long long)best,
                     before < after ? "before the start" : "after the end", b.name.c_str(), (size_t)(b.high - b.low));
        }
    }
    return text;
}

} // namespace

void register_buffer(void *p, size_t bytes, const char *name) {
    if (bytes) {
        buffers[(char *)p + bytes] = {(char *)p, (char *)p + bytes, name, {}};
    }
    latest_buffer = nullptr;
}

void forget_buffers() {
    buffers.clear();
    latest_buffer = nullptr;
}

void begin_global_launch(bool overlaps) {
    for (auto &entry : buffers) {
        for (uint16_t &w : entry.second.writer) {
            w = w && overlaps ? EARLIER : 0;
        }
    }
}

void global_check(const void *p, size_t bytes, bool write, const View &view, const char *what) {
    const char *byte = (const char *)p;
    Buffer *b = find_buffer(byte);
    if (!b || byte + bytes > b->high) {
        fail("%s: %zu bytes at %p lie outside every registered buffer: %s", what, bytes, p,
             b ? ("'" + b->name + "' ends before them").c_str() : nearest_buffer(byte).c_str());
    }
    if (!options.check_races || (!write && b->writer.empty())) {
        return;
    }
    if (b->writer.empty()) {
        b->writer.resize((size_t)(b->high - b->low));
    }
    const uint16_t me = (uint16_t)(cluster->blocks[0]->number / launch->cluster % 0xFFFE + 1);
    const bool known = view.knows({GRID_AGENT, 1});
    for (size_t i = (size_t)(byte - b->low), end = i + bytes; i < end; i++) {
        uint16_t &w = b->writer[i];
        if (w == EARLIER && !known) {
            fail("%s %s '%s' + %zu, which an earlier kernel wrote, before griddepcontrol.wait", what,
                 write ? "overwrites" : "reads", b->name.c_str(), i);
        }
        if (w != 0 && w != EARLIER && w != me) {
            fail("race: %s %s '%s' + %zu, which another cluster of the same launch writes", what,
                 write ? "overwrites" : "reads", b->name.c_str(), i);
        }
        if (write) {
            w = me;
        }
    }
}

void global_load(const void *p, void *out, uint32_t bytes) {
    EMU_SITE();
    if ((uintptr_t)p % bytes != 0) {
        fail("ld.global: address %p must be a multiple of %u", p, bytes);
    }
    global_check(p, bytes, false, current_thread->view(), "ld.global");
    memcpy(out, p, bytes);
}

void global_store(void *p, const void *value, uint32_t bytes) {
    EMU_SITE();
    if ((uintptr_t)p % bytes != 0) {
        fail("st.global: address %p must be a multiple of %u", p, bytes);
    }
    global_check(p, bytes, true, current_thread->view(), "st.global");
    memcpy(p, value, bytes);
}

/* ---- every access of the kernels' own code --------------------------------------------------------------- */

static void check_access(const void *p, size_t bytes, bool write, const void *site) {
    Thread *t = current_thread;
    if (!t) {
        return;
    }
    const char *byte = (const char *)p;
    if (byte >= t->stack_low && byte < t->stack_high) {
        return;
    }
    t->site = site;
    if (byte >= (char *)window_low && byte < (char *)window_high) {
        const uint32_t offset = (uint32_t)(byte - (char *)window_low);
        const char *what = write ? "a store" : "a load";
        if (offset + bytes > t->block->shared_bytes) {
            fail("%s of %zu bytes at shared+0x%X lies outside the block's %u bytes", what, bytes, offset,
                 t->block->shared_bytes);
        }
        if (write) {
            note_write(*t->block, offset, (uint32_t)bytes, t->view(), {t->self, t->clock}, false, what);
        } else {
            note_read(*t->block, offset, (uint32_t)bytes, t->view(), {t->self, t->clock}, false, what);
        }
        return;
    }
    if (!write && byte >= parameters.low && byte + bytes <= parameters.high) {
        return;
    }
    for (const Range &image : images) {
        if (!write && byte >= image.low && byte + bytes <= image.high) {
            return;
        }
    }
    global_check(p, bytes, write, t->view(), write ? "a store" : "a load");
}

} // namespace emu

#define EMU_ACCESS(SIZE)                                                                                             \
    extern "C" void __tsan_read##SIZE(void *p) { emu::check_access(p, SIZE, false, __builtin_return_address(0)); }   \
    extern "C" void __tsan_write##SIZE(void *p) { emu::check_access(p, SIZE, true, __builtin_return_address(0)); }   \
    extern "C" void __tsan_unaligned_read##SIZE(void *p) {                                                           \
        emu::check_access(p, SIZE, false, __builtin_return_address(0));                                              \
    }                                                                                                                \
    extern "C" void __tsan_unaligned_write##SIZE(void *p) {                                                          \
        emu::check_access(p, SIZE, true, __builtin_return_address(0));                                               \
    }                                                                                                                \
    extern "C" void __tsan_volatile_read##SIZE(void *p) {                                                            \
        emu::check_access(p, SIZE, false, __builtin_return_address(0));                                              \
    }                                                                                                                \
    extern "C" void __tsan_volatile_write##SIZE(void *p) {                                                           \
        emu::check_access(p, SIZE, true, __builtin_return_address(0));                                               \
    }
EMU_ACCESS(1)
EMU_ACCESS(2)
EMU_ACCESS(4)
EMU_ACCESS(8)
EMU_ACCESS(16)

extern "C" void __tsan_read_range(void *p, size_t n) { emu::check_access(p, n, false, __builtin_return_address(0)); }
extern "C" void __tsan_write_range(void *p, size_t n) { emu::check_access(p, n, true, __builtin_return_address(0)); }
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void *) {}
extern "C" void __tsan_func_exit() {}

/* The first member of every description that the compiler passes. */
struct emu_source_location {
    const char *file;
    uint32_t line, column;
};

#define EMU_UNDEFINED(NAME, TEXT)                                                                                    \
    extern "C" void __ubsan_handle_##NAME(const emu_source_location *at, uintptr_t, uintptr_t) {                     \
        emu::fail("%s at %s:%u", TEXT, at->file, at->line);                                                          \
    }
EMU_UNDEFINED(type_mismatch_v1, "misaligned access")
EMU_UNDEFINED(out_of_bounds, "array index out of range")
EMU_UNDEFINED(shift_out_of_bounds, "shift by an amount that C++ leaves undefined")
EMU_UNDEFINED(add_overflow, "signed overflow")
EMU_UNDEFINED(sub_overflow, "signed overflow")
EMU_UNDEFINED(mul_overflow, "signed overflow")
EMU_UNDEFINED(negate_overflow, "signed overflow")
EMU_UNDEFINED(divrem_overflow, "signed overflow or division by zero")
