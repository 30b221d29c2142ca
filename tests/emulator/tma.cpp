/*
 * tma.cpp - the copy engine: PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy" (cp.async.bulk and
 * cp.async.bulk.tensor, tile mode) and st.async.
 *
 * A copy is checked when it is issued and carried out later, in an order of the scheduler's choosing. From the issue on,
 * what it writes belongs to the agent of the mbarrier that it reports to, in the phase that runs: nobody may touch it
 * before that phase has completed and been waited for.
 */
#include "tma.h"

#include <cstring>

#include "runtime.h"

namespace emu {

namespace {

constexpr uint32_t RANKS = 16;

/* PTX ISA, "Tensor swizzling modes": bits 4 to 6 of the address are XORed with bits 7 to 9, as many as the mode has. */
uint32_t swizzled(uint32_t address, uint32_t swizzle_bytes) {
    const uint32_t mask = swizzle_bytes == 128 ? 7 : swizzle_bytes == 64 ? 3 : swizzle_bytes == 32 ? 1 : 0;
    return address ^ (address >> 7 & mask) << 4;
}

const TensorMap &checked_map(const void *map, const char *what) {
    const TensorMap &m = *(const TensorMap *)map;
    if ((uintptr_t)map % 64 != 0 || m.magic != TENSOR_MAP_MAGIC) {
        fail("%s: %p is no tensor map (64-byte aligned, encoded by cuTensorMapEncodeTiled)", what, map);
    }
    return m;
}

/* One row of a box: `bytes` bytes along dimension 0. */
struct BoxRow {
    uint32_t offset;    /* in the box, before swizzling */
    const char *global; /* NULL: the whole row lies outside the tensor */
    uint32_t low, high; /* bytes [low, high) of the row lie inside */
};

/* Calls f for every row of the box at the coordinates. */
template <class F> void for_each_row(const TensorMap &m, const int *coordinates, F f) {
    const uint32_t row_bytes = m.box[0] * m.element_bytes;
    uint32_t at[5] = {0, 0, 0, 0, 0}, offset = 0;
    for (;;) {
        BoxRow row = {offset, m.address, 0, 0};
        int64_t first = coordinates[0], last = first + m.box[0];
        first = first < 0 ? 0 : first;
        last = last > (int64_t)m.size[0] ? (int64_t)m.size[0] : last;
        for (int d = 1; d < m.rank; d++) {
            const int64_t i = (int64_t)coordinates[d] + at[d];
            if (i < 0 || i >= (int64_t)m.size[d]) {
                row.global = nullptr;
                break;
            }
            row.global += i * (int64_t)m.stride[d - 1];
        }
        if (row.global && first < last) {
            row.low = (uint32_t)(first - coordinates[0]) * m.element_bytes;
            row.high = (uint32_t)(last - coordinates[0]) * m.element_bytes;
            row.global += (int64_t)coordinates[0] * m.element_bytes; /* of byte 0, even if that one lies outside */
        } else {
            row.global = nullptr;
        }
        f(row);
        offset += row_bytes;
        int d = 1;
        while (d < m.rank && ++at[d] == m.box[d]) {
            at[d++] = 0;
        }
        if (d >= m.rank) {
            return;
        }
    }
}

uint32_t box_bytes(const TensorMap &m) {
    uint32_t bytes = m.element_bytes;
    for (int d = 0; d < m.rank; d++) {
        bytes *= m.box[d];
    }
    return bytes;
}

/* Where a copy reports: the barrier, and the phase that its bytes belong to. */
struct Report {
    SharedRef barrier;
    uint64_t phase;
    Epoch as;
};

Report report_to(uint32_t address, const SharedRef &dst, const View &view, const char *what, bool pair = false) {
    const SharedRef ref = shared_ref(address, 8, 8, true, what);
    if (ref.block != dst.block && !(pair && (ref.block->rank ^ dst.block->rank) == 1)) {
        fail("%s: the mbarrier lies in block %u of the cluster, the destination in block %u", what, ref.block->rank,
             dst.block->rank);
    }
    Mbarrier &bar = mbarrier_at(ref, what);
    mbarrier_known(bar, ref, view, true, what);
    return {ref, bar.phase, {bar.copies, (Clock)bar.phase + 1}};
}

AgentId bulk_agent(Thread &t) {
    if (t.bulk_agent == 0) {
        char name[96];
        snprintf(name, sizeof name, "bulk stores of thread %u of block %u", t.number, t.block->number);
        t.bulk_agent = new_agent(name);
    }
    return t.bulk_agent;
}

/* Opens the group that the thread's next bulk store belongs to; group g has clock g + 1. */
size_t open_group(Thread &t) {
    if (t.bulk_groups.empty() || t.bulk_groups.back().committed) {
        t.bulk_groups.emplace_back();
    }
    t.bulk_groups.back().outstanding++;
    return t.bulk_groups.size() - 1;
}

void end_group_member(Thread &t, size_t group) {
    if (--t.bulk_groups[group].outstanding == 0) {
        wake(&t); /* it may wait for this group; if it waits for something else, that wait looks again */
    }
}

void check_bulk(const char *what, const void *global, uint32_t bytes) {
    if ((uintptr_t)global % 16 != 0 || bytes % 16 != 0 || bytes == 0) {
        fail("%s: address %p and size %u must be multiples of 16", what, global, bytes);
    }
}

} // namespace

/* ---- tensor tiles ---------------------------------------------------------------------------------------- */

void tma_check_map(const void *map) {
    EMU_SITE();
    checked_map(map, "prefetch.tensormap");
}

/* Checks one copy of a tile and queues it. */
static void start_load(const TensorMap &m, const std::vector<int> &at, const SharedRef &to, const Report &report,
                       const char *what) {
    const uint32_t bytes = box_bytes(m);
    note_write(*to.block, to.offset, bytes, current_thread->view(), report.as, true, what);
    counters["tma.load"]++;
    char text[160];
    snprintf(text, sizeof text, "%s of %u bytes to %s", what, bytes, describe(*to.block, to.offset).c_str());
    queue_async(text, [=]() {
        for_each_row(m, at.data(), [&](const BoxRow &row) {
            for (uint32_t b = 0; b < (uint32_t)m.box[0] * m.element_bytes; b += 16) {
                uint8_t piece[16] = {0};
                const uint32_t low = std::max(b, row.low), high = std::min(b + 16, row.high);
                if (row.global && low < high) {
                    memcpy(piece + (low - b), row.global + low, high - low);
                }
                const uint32_t address = swizzled(WINDOW_START + to.offset + row.offset + b, m.swizzle_bytes);
                memcpy(to.block->memory + address - WINDOW_START, piece, 16);
            }
        });
        mbarrier_complete_tx(report.barrier, bytes, report.phase, what);
    });
}

/* The map, after a check that everything the copy reads may be read. */
static const TensorMap &readable_map(const void *map, const int *coordinates, int count, const char *what) {
    const TensorMap &m = checked_map(map, what);
    const View view = current_thread->view();
    if (count != m.rank) {
        fail("%s: %d coordinates for a map of %u dimensions", what, count, m.rank);
    }
    for_each_row(m, coordinates, [&](const BoxRow &row) {
        if (row.global) {
            global_check(row.global + row.low, row.high - row.low, false, view, what);
        }
    });
    return m;
}

void tma_load(uint32_t dst, const void *map, const int *coordinates, int count, uint32_t barrier, uint32_t ranks) {
    EMU_SITE();
    const char *what = ranks ? "cp.async.bulk.tensor .multicast" : "cp.async.bulk.tensor";
    const TensorMap &m = readable_map(map, coordinates, count, what);
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        if (ranks ? !(ranks >> rank & 1) : rank != dst >> RANK_SHIFT) {
            continue;
        }
        const SharedRef to = shared_ref((dst & OFFSET_MASK) | rank << RANK_SHIFT, box_bytes(m), 128, true, what);
        const Report report =
            report_to((barrier & OFFSET_MASK) | rank << RANK_SHIFT, to, current_thread->view(), what);
        start_load(m, std::vector<int>(coordinates, coordinates + count), to, report, what);
    }
}

void tma_load_pair(uint32_t dst, const void *map, const int *coordinates, int count, uint32_t barrier) {
    EMU_SITE();
    const char *what = "cp.async.bulk.tensor .cta_group::2";
    const TensorMap &m = readable_map(map, coordinates, count, what);
    const SharedRef to = shared_ref(dst, box_bytes(m), 128, false, what);
    const Report report = report_to(barrier, to, current_thread->view(), what, true);
    start_load(m, std::vector<int>(coordinates, coordinates + count), to, report, what);
}

void tma_store(const void *map, uint32_t src, const int *coordinates, int count) {
    EMU_SITE();
    const char *what = "cp.async.bulk.tensor store";
    Thread &t = *current_thread;
    const View view = t.view();
    const TensorMap m = checked_map(map, what);
    const uint32_t bytes = box_bytes(m);
    if (count != m.rank) {
        fail("%s: %d coordinates for a map of %u dimensions", what, count, m.rank);
    }
    const SharedRef from = shared_ref(src, bytes, 128, false, what);
    const AgentId agent = bulk_agent(t);
    const size_t group = open_group(t);
    note_read(*from.block, from.offset, bytes, view, {agent, (Clock)group + 1}, true, what);
    for_each_row(m, coordinates, [&](const BoxRow &row) {
        if (row.global) {
            global_check(row.global + row.low, row.high - row.low, true, view, what);
        }
    });
    counters["tma.store"]++;
    std::vector<int> at(coordinates, coordinates + count);
    queue_async(what, [=, &t]() {
        for_each_row(m, at.data(), [&](const BoxRow &row) {
            for (uint32_t b = row.low; row.global && b < row.high; b++) {
                const uint32_t address = swizzled(WINDOW_START + from.offset + row.offset + b, m.swizzle_bytes);
                ((char *)row.global)[b] = (char)from.block->memory[address - WINDOW_START];
            }
        });
        end_group_member(t, group);
    });
}

/* ---- runs of bytes --------------------------------------------------------------------------------------- */

void bulk_load(uint32_t dst, const void *src, uint32_t bytes, uint32_t barrier, uint32_t ranks) {
    EMU_SITE();
    const char *what = "cp.async.bulk load";
    const View view = current_thread->view();
    check_bulk(what, src, bytes);
    global_check(src, bytes, false, view, what);
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        if (ranks ? !(ranks >> rank & 1) : rank != dst >> RANK_SHIFT) {
            continue;
        }
        const SharedRef to = shared_ref((dst & OFFSET_MASK) | rank << RANK_SHIFT, bytes, 16, true, what);
        const Report report = report_to((barrier & OFFSET_MASK) | rank << RANK_SHIFT, to, view, what);
        note_write(*to.block, to.offset, bytes, view, report.as, true, what);
        counters["bulk.load"]++;
        queue_async(what, [=]() {
            memcpy(to.data(), src, bytes);
            mbarrier_complete_tx(report.barrier, bytes, report.phase, what);
        });
    }
}

void bulk_copy_shared(uint32_t dst, uint32_t src, uint32_t bytes, uint32_t barrier) {
    EMU_SITE();
    const char *what = "cp.async.bulk shared to shared";
    const View view = current_thread->view();
    check_bulk(what, nullptr, bytes);
    const SharedRef from = shared_ref(src, bytes, 16, false, what), to = shared_ref(dst, bytes, 16, true, what);
    const Report report = report_to(barrier, to, view, what);
    note_read(*from.block, from.offset, bytes, view, report.as, true, what);
    note_write(*to.block, to.offset, bytes, view, report.as, true, what);
    counters["bulk.copy"]++;
    queue_async(what, [=]() {
        memmove(to.data(), from.data(), bytes);
        mbarrier_complete_tx(report.barrier, bytes, report.phase, what);
    });
}

void bulk_store(void *dst, uint32_t src, uint32_t bytes) {
    EMU_SITE();
    const char *what = "cp.async.bulk store";
    Thread &t = *current_thread;
    check_bulk(what, dst, bytes);
    const SharedRef from = shared_ref(src, bytes, 16, false, what);
    global_check(dst, bytes, true, t.view(), what);
    const AgentId agent = bulk_agent(t);
    const size_t group = open_group(t);
    note_read(*from.block, from.offset, bytes, t.view(), {agent, (Clock)group + 1}, true, what);
    counters["bulk.store"]++;
    queue_async(what, [=, &t]() {
        memcpy(dst, from.data(), bytes);
        end_group_member(t, group);
    });
}

void bulk_commit() {
    Thread &t = *current_thread;
    if (t.bulk_groups.empty() || t.bulk_groups.back().committed) {
        t.bulk_groups.emplace_back();
    }
    t.bulk_groups.back().committed = true;
}

/* At most `groups` of the latest groups are still under way; .read (or not) makes no difference here, because a store
 * reads and writes in one step. */
void bulk_wait(uint32_t groups, bool read_only) {
    EMU_SITE();
    Thread &t = *current_thread;
    size_t committed = t.bulk_groups.size();
    if (committed && !t.bulk_groups.back().committed) {
        committed--;
    }
    const size_t done = committed > groups ? committed - groups : 0;
    for (size_t i = 0; i < done; i++) {
        while (t.bulk_groups[i].outstanding) {
            block_thread(read_only ? "cp.async.bulk.wait_group.read" : "cp.async.bulk.wait_group");
        }
    }
    if (done > t.bulk_waited) {
        t.bulk_waited = done;
        learn(&t, Epoch{t.bulk_agent, (Clock)done});
    }
}

/* PTX ISA, "st.async": stores to a block of the cluster that count as bytes of a barrier there. */
void shared_store_async(uint32_t address, const void *value, uint32_t bytes, uint32_t barrier) {
    EMU_SITE();
    const char *what = "st.async";
    const View view = current_thread->view();
    const SharedRef to = shared_ref(address, bytes, bytes, true, what);
    const Report report = report_to(barrier, to, view, what);
    note_write(*to.block, to.offset, bytes, view, report.as, false, what);
    std::vector<uint8_t> copy((const uint8_t *)value, (const uint8_t *)value + bytes);
    counters["st.async"]++;
    queue_async(what, [=]() {
        memcpy(to.data(), copy.data(), bytes);
        mbarrier_complete_tx(report.barrier, bytes, report.phase, what);
    });
}

} // namespace emu
