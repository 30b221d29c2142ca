/* collectives.cpp - the instructions that make threads meet: warp-wide ones, named barriers, the cluster barrier, setmaxnreg. */
#include <algorithm>
#include <cstring>

#include "runtime.h"

namespace emu {

/* ---- warp-wide instructions ------------------------------------------------------------------------------ */

Past joint_past(const Warp &warp) {
    Past past = warp.lanes[0]->past;
    auto selves = std::make_shared<Clocks>();
    for (const Thread *t : warp.lanes) {
        past = cluster->joiner.join(past, t->past);
        raise(*selves, {t->self, t->clock});
        raise(*selves, {t->self + PUBLISHED, t->clock});
    }
    return cluster->joiner.join(past, selves);
}

std::shared_ptr<Meeting> meet(const char *what, uint32_t mask, uint32_t value, uint32_t operand, bool order,
                              const std::function<void(Meeting &)> &complete) {
    Thread &t = *current_thread;
    Warp &warp = *t.warp;
    const uint32_t bit = 1u << t.lane;
    if (!(mask & bit)) {
        fail("%s: mask 0x%08X does not hold the calling lane %u", what, mask, t.lane);
    }
    for (const Thread *other : warp.lanes) {
        if ((mask >> other->lane & 1) && other->state == State::Done) {
            fail("%s: lane %u of mask 0x%08X has exited", what, other->lane, mask);
        }
    }
    if (warp.lanes.size() < WARP_SIZE && mask >> warp.lanes.size()) {
        mask &= (1u << warp.lanes.size()) - 1; /* lanes of a partial warp that do not exist */
    }
    std::shared_ptr<Meeting> m;
    for (auto &open : warp.meetings) {
        if (open->mask == mask && strcmp(open->what, what) == 0 && !(open->arrived & bit)) {
            m = open;
        } else if (open->mask & bit && open->arrived & mask) { /* each would wait for the other */
            fail("lanes of one warp meet in different instructions: %s with mask 0x%08X, %s with mask 0x%08X",
                 open->what, open->mask, what, mask);
        }
    }
    if (!m) {
        m = std::make_shared<Meeting>();
        m->what = what;
        m->mask = mask;
        warp.meetings.push_back(m);
    }
    m->values[t.lane] = value;
    m->operands[t.lane] = operand;
    m->arrived |= bit;
    if (order) {
        m->gathered.add(t.past, {t.self, t.clock});
        t.clock++;
    }
    if (m->arrived == mask) {
        m->done = true;
        warp.meetings.erase(std::find(warp.meetings.begin(), warp.meetings.end(), m));
        if (complete) {
            complete(*m);
        }
        if (order) {
            m->completed = m->gathered.take();
        }
        for (Thread *other : warp.lanes) {
            if (other != &t && (mask >> other->lane & 1)) {
                wake(other);
            }
        }
    } else {
        while (!m->done) {
            block_thread(what);
        }
    }
    if (order) {
        learn(&t, m->completed);
    }
    return m;
}

void warp_sync(uint32_t mask) {
    EMU_SITE();
    meet("__syncwarp", mask, 0, 0, true);
}

/* CUDA C++ Programming Guide, "Warp Shuffle Functions". */
uint32_t warp_shuffle(Shuffle kind, uint32_t mask, uint32_t value, uint32_t operand, uint32_t width) {
    EMU_SITE();
    static const char *const NAMES[] = {"__shfl_sync", "__shfl_up_sync", "__shfl_down_sync", "__shfl_xor_sync"};
    const uint32_t lane = current_thread->lane, segment = lane & ~(width - 1);
    uint32_t source = lane;
    if (width == 0 || width > WARP_SIZE || (width & (width - 1))) {
        fail("%s: width must be 1, 2, 4, 8, 16 or 32, got %u", NAMES[(int)kind], width);
    }
    switch (kind) {
    case Shuffle::Index:
        source = segment + (operand & (width - 1));
        break;
    case Shuffle::Up:
        source = lane - segment >= operand ? lane - operand : lane;
        break;
    case Shuffle::Down:
        source = lane - segment + operand < width ? lane + operand : lane;
        break;
    case Shuffle::Xor:
        source = (lane ^ operand) < segment + width ? lane ^ operand : lane;
        break;
    }
    auto m = meet(NAMES[(int)kind], mask, value, operand);
    if (!(m->mask >> source & 1)) {
        fail("%s: lane %u reads lane %u, which is not in mask 0x%08X", NAMES[(int)kind], lane, source, mask);
    }
    return m->values[source];
}

uint32_t warp_vote(Vote kind, uint32_t mask, bool predicate) {
    EMU_SITE();
    static const char *const NAMES[] = {"__ballot_sync", "__any_sync", "__all_sync"};
    auto m = meet(NAMES[(int)kind], mask, predicate);
    uint32_t ballot = 0;
    for (uint32_t i = 0; i < WARP_SIZE; i++) {
        ballot |= (m->mask >> i & 1) && m->values[i] ? 1u << i : 0;
    }
    return kind == Vote::Ballot ? ballot : kind == Vote::Any ? ballot != 0 : ballot == m->mask;
}

uint32_t warp_reduce(Reduce kind, uint32_t mask, uint32_t value) {
    EMU_SITE();
    auto m = meet("__reduce_sync", mask, value, (uint32_t)kind);
    uint32_t result = 0;
    bool first = true;
    for (uint32_t i = 0; i < WARP_SIZE; i++) {
        if (!(m->mask >> i & 1)) {
            continue;
        }
        const uint32_t v = m->values[i];
        if (first) {
            result = v;
            first = false;
            continue;
        }
        switch (kind) {
        case Reduce::Add:
            result += v;
            break;
        case Reduce::Min:
            result = std::min(result, v);
            break;
        case Reduce::Max:
            result = std::max(result, v);
            break;
        case Reduce::And:
            result &= v;
            break;
        case Reduce::Or:
            result |= v;
            break;
        case Reduce::Xor:
            result ^= v;
            break;
        case Reduce::MinSigned:
            result = (uint32_t)std::min((int32_t)result, (int32_t)v);
            break;
        case Reduce::MaxSigned:
            result = (uint32_t)std::max((int32_t)result, (int32_t)v);
            break;
        }
    }
    return result;
}

/* PTX ISA, "elect.sync": one lane of the mask, always the same one for the same mask. */
bool warp_elect(uint32_t mask) {
    EMU_SITE();
    auto m = meet("elect.sync", mask);
    uint32_t leader = options.elect_lane % WARP_SIZE;
    while (!(m->mask >> leader & 1)) {
        leader = (leader + 1) % WARP_SIZE;
    }
    return current_thread->lane == leader;
}

uint32_t warp_active_mask() {
    uint32_t mask = 0;
    for (const Thread *t : current_thread->warp->lanes) {
        mask |= t->state == State::Done ? 0 : 1u << t->lane;
    }
    return mask;
}

/* ---- named barriers -------------------------------------------------------------------------------------- */

void check_named(Block &block, NamedBarrier &bar) {
    const uint32_t expected = bar.expected ? bar.expected : block.live;
    if (bar.arrived == 0 || bar.arrived < expected) {
        return;
    }
    bar.completed = bar.gathered.take();
    bar.gathered.clear();
    bar.arrived = bar.expected = 0;
    bar.phase++;
    wake_all(bar.waiters);
}

/* PTX ISA, "bar, barrier": `threads` a multiple of the warp size, the same in all arrivals of a phase. */
void block_barrier(uint32_t id, uint32_t threads, bool wait) {
    EMU_SITE();
    Thread &t = *current_thread;
    const char *name = threads == 0 ? "__syncthreads" : wait ? "bar.sync" : "bar.arrive";
    if (id >= 16 || threads % WARP_SIZE != 0) {
        fail("%s %u, %u: barriers are 0 to 15, thread counts multiples of 32", name, id, threads);
    }
    meet(name, warp_active_mask()); /* .aligned */
    NamedBarrier &bar = t.block->named[id];
    if (bar.arrived > 0 && bar.expected != threads) {
        fail("%s %u: counts %u threads, but an earlier arrival of this phase counted %u", name, id, threads,
             bar.expected);
    }
    bar.expected = threads;
    bar.arrived++;
    bar.gathered.add(t.past, {t.self, t.clock});
    t.clock++;
    const uint64_t phase = bar.phase;
    check_named(*t.block, bar);
    if (!wait) {
        return;
    }
    while (bar.phase == phase) {
        bar.waiters.push_back(&t);
        block_thread(name, id, phase);
    }
    if (bar.phase > phase + 1) {
        fail("%s %u: a second phase completed before this thread saw the first", name, id);
    }
    learn(&t, bar.completed);
}

/* ---- cluster barrier ------------------------------------------------------------------------------------- */

void check_cluster_barrier() {
    ClusterBarrier &bar = cluster->barrier;
    if (bar.arrived == 0 || bar.arrived < cluster->live) {
        return;
    }
    bar.completed = bar.gathered.take();
    bar.arrived = 0;
    bar.phase++;
    wake_all(bar.waiters);
}

/* PTX ISA, "barrier.cluster": every non-exited thread of the cluster arrives once and waits once a phase. */
void cluster_barrier_arrive(bool release) {
    EMU_SITE();
    Thread &t = *current_thread;
    ClusterBarrier &bar = cluster->barrier;
    meet("barrier.cluster.arrive", warp_active_mask()); /* .aligned */
    if (t.cluster_arrived) {
        fail("barrier.cluster.arrive twice without a wait");
    }
    t.cluster_arrived = true;
    t.cluster_phase = bar.phase;
    bar.arrived++;
    if (release) {
        bar.gathered.add(t.past, {t.self, t.clock});
        t.clock++;
    } else if (!t.init_fences.empty()) { /* PTX ISA, "fence.mbarrier_init": made for a relaxed arrival behind it */
        bar.gathered.add({t.self, t.init_fences.back()});
        bar.gathered.add({t.self + PUBLISHED, t.init_fences.back()});
    }
    check_cluster_barrier();
}

void cluster_barrier_wait() {
    EMU_SITE();
    Thread &t = *current_thread;
    ClusterBarrier &bar = cluster->barrier;
    meet("barrier.cluster.wait", warp_active_mask()); /* .aligned */
    if (!t.cluster_arrived) {
        fail("barrier.cluster.wait without an arrive");
    }
    while (bar.phase == t.cluster_phase) {
        bar.waiters.push_back(&t);
        block_thread("barrier.cluster.wait", 0, t.cluster_phase);
    }
    t.cluster_arrived = false;
    learn(&t, bar.completed);
}

/* ---- registers ------------------------------------------------------------------------------------------- */

/* PTX ISA, "setmaxnreg": .inc waits until the block's pool holds enough; all warps of a warpgroup execute it. */
void set_max_registers(uint32_t count, bool up) {
    EMU_SITE();
    Thread &t = *current_thread;
    const char *name = up ? "setmaxnreg.inc" : "setmaxnreg.dec";
    if (count < 24 || count > 256 || count % 8 != 0) {
        fail("%s: the count must be a multiple of 8 from 24 to 256, got %u", name, count);
    }
    if (launch->kernel->max_threads == 0) {
        fail("%s: has no effect in a kernel without __launch_bounds__", name);
    }
    meet(name, 0xFFFFFFFFu);
    Warp &warp = *t.warp;
    Block &block = *t.block;
    if (t.lane == 0) {
        if (up ? count < warp.registers : count > warp.registers) {
            fail("%s: the warp holds %u registers a thread, asked for %u", name, warp.registers, count);
        }
        if (up) {
            while (block.free_registers < (count - warp.registers) * WARP_SIZE) {
                block.register_waiters.push_back(&t);
                block_thread(name);
            }
            block.free_registers -= (count - warp.registers) * WARP_SIZE;
        } else {
            block.free_registers += (warp.registers - count) * WARP_SIZE;
            wake_all(block.register_waiters);
        }
        warp.registers = count;
    }
    meet(name, 0xFFFFFFFFu);
}

} // namespace emu
