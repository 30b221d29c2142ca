/*
 * mbarrier.cpp - PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier".
 *
 * A barrier counts arrivals and bytes ("tx-count") of a phase. The phase completes when no arrival and no byte is
 * missing; then the next one begins with the full count. What the manual leaves undefined is an error here: arriving
 * more often than the phase expects, using a barrier that was not initialised, or whose initialisation the user cannot
 * know of, and byte counts beyond 2^20 - 1.
 */
#include "runtime.h"

namespace emu {

namespace {

constexpr int64_t MAX_TX = (1 << 20) - 1; /* "Size and alignment of mbarrier object": range of the tx-count */
constexpr uint32_t MAX_COUNT = (1 << 20) - 1;

/* Phase completion: "Phase Completion of the mbarrier object". */
void check_phase(Mbarrier &bar) {
    if (bar.pending != 0 || bar.tx != 0) {
        return;
    }
    bar.gathered.add({bar.copies, (Clock)bar.phase + 1});
    bar.completed = bar.gathered.take();
    bar.phase++;
    bar.pending = bar.expected;
    wake_all(bar.waiters);
}

void change_tx(const SharedRef &ref, Mbarrier &bar, int64_t bytes, const char *what) {
    bar.tx += bytes;
    if (bar.tx > MAX_TX || bar.tx < -MAX_TX) {
        fail("%s: the byte count of the mbarrier at %s leaves its range: %lld", what,
             describe(*ref.block, ref.offset).c_str(), (long long)bar.tx);
    }
}

} // namespace

Mbarrier &mbarrier_at(const SharedRef &ref, const char *what) {
    Mbarrier *bar = ref.block->barriers[ref.offset / 8].get();
    if (!bar || !bar->live) {
        fail("%s: there is no initialised mbarrier at %s", what, describe(*ref.block, ref.offset).c_str());
    }
    return *bar;
}

/* The user must know of the initialisation; other blocks and asynchronous work also of a fence after it. */
void mbarrier_known(const Mbarrier &bar, const SharedRef &ref, const View &view, bool needs_fence, const char *what) {
    if (!view.knows(bar.init)) {
        fail("%s: nothing orders the initialisation of the mbarrier at %s before this use", what,
             describe(*ref.block, ref.offset).c_str());
    }
    if (needs_fence) {
        const Thread &owner = *cluster->agents[bar.init.agent].thread;
        for (const auto *fences : {&owner.init_fences, &owner.proxy_fences}) {
            for (Clock f : *fences) {
                if (f >= bar.init.clock && view.knows({bar.init.agent, f})) {
                    return;
                }
            }
        }
        fail("%s: the mbarrier at %s was initialised without fence.mbarrier_init", what,
             describe(*ref.block, ref.offset).c_str());
    }
}

void mbarrier_complete_tx(const SharedRef &ref, uint32_t bytes, uint64_t phase, const char *what) {
    Mbarrier &bar = mbarrier_at(ref, what);
    if (bar.phase != phase) {
        fail("%s: its bytes arrive in phase %llu of the mbarrier at %s, but it was issued in phase %llu: the phase "
             "completed without them",
             what, (unsigned long long)bar.phase, describe(*ref.block, ref.offset).c_str(),
             (unsigned long long)phase);
    }
    change_tx(ref, bar, -(int64_t)bytes, what);
    check_phase(bar);
}

void mbarrier_arrive_for(const SharedRef &ref, uint32_t count, const Past &past, Epoch self, bool publish,
                         const char *what) {
    Mbarrier &bar = mbarrier_at(ref, what);
    if (count == 0 || count > bar.pending) {
        fail("%s: %u arrivals at the mbarrier at %s, whose phase %llu still expects %u", what, count,
             describe(*ref.block, ref.offset).c_str(), (unsigned long long)bar.phase, bar.pending);
    }
    bar.gathered.add(past, self, publish);
    bar.pending -= count;
    check_phase(bar);
}

void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    EMU_SITE();
    Thread &t = *current_thread;
    const SharedRef ref = shared_ref(barrier, 8, 8, false, "mbarrier.init");
    auto &slot = ref.block->barriers[ref.offset / 8];
    if (slot && slot->live) {
        fail("mbarrier.init: there is already an mbarrier at %s", describe(*ref.block, ref.offset).c_str());
    }
    if (arrivals == 0 || arrivals > MAX_COUNT) {
        fail("mbarrier.init: the count must be 1 to 2^20 - 1, got %u", arrivals);
    }
    note_write(*ref.block, ref.offset, 8, t.view(), {t.self, t.clock}, false, "mbarrier.init");
    const AgentId copies =
        slot ? slot->copies : new_agent("copies that report to the mbarrier at " + describe(*ref.block, ref.offset));
    slot = std::make_unique<Mbarrier>();
    slot->live = true;
    slot->expected = slot->pending = arrivals;
    slot->init = {t.self, t.clock};
    slot->copies = copies;
    counters["mbarrier.init"]++;
}

void mbarrier_invalidate(uint32_t barrier) {
    EMU_SITE();
    Thread &t = *current_thread;
    const SharedRef ref = shared_ref(barrier, 8, 8, false, "mbarrier.inval");
    Mbarrier &bar = mbarrier_at(ref, "mbarrier.inval");
    mbarrier_known(bar, ref, t.view(), false, "mbarrier.inval");
    if (!bar.waiters.empty() || bar.tx != 0) {
        fail("mbarrier.inval: the mbarrier at %s is in use", describe(*ref.block, ref.offset).c_str());
    }
    bar.live = false;
}

void mbarrier_fence_init() {
    EMU_SITE();
    current_thread->init_fences.push_back(current_thread->clock);
    current_thread->clock++;
}

void mbarrier_arrive(uint32_t barrier, uint32_t count, bool may_be_remote, Scope scope) {
    EMU_SITE();
    Thread &t = *current_thread;
    const SharedRef ref = shared_ref(barrier, 8, 8, may_be_remote, "mbarrier.arrive");
    mbarrier_known(mbarrier_at(ref, "mbarrier.arrive"), ref, t.view(), ref.block != t.block, "mbarrier.arrive");
    const bool publish = scope == Scope::Cluster || ref.block == t.block;
    const Clock now = t.clock++;
    mbarrier_arrive_for(ref, count, publish ? t.past : visible_to(t.past, *ref.block), {t.self, now}, publish,
                        "mbarrier.arrive");
}

void mbarrier_expect(uint32_t barrier, uint32_t bytes) {
    EMU_SITE();
    Thread &t = *current_thread;
    const SharedRef ref = shared_ref(barrier, 8, 8, true, "mbarrier.expect_tx");
    Mbarrier &bar = mbarrier_at(ref, "mbarrier.expect_tx");
    mbarrier_known(bar, ref, t.view(), ref.block != t.block, "mbarrier.expect_tx");
    change_tx(ref, bar, bytes, "mbarrier.expect_tx");
}

/* True once the phase of that parity has completed: the phase before the current one. It waits here, where the hardware
 * returns false after a while. */
bool mbarrier_try_wait(uint32_t barrier, uint32_t parity, Scope scope) {
    EMU_SITE();
    Thread &t = *current_thread;
    const SharedRef ref = shared_ref(barrier, 8, 8, false, "mbarrier.try_wait");
    Mbarrier &bar = mbarrier_at(ref, "mbarrier.try_wait");
    mbarrier_known(bar, ref, t.view(), false, "mbarrier.try_wait");
    if (parity > 1) {
        fail("mbarrier.try_wait.parity: the parity must be 0 or 1, got %u", parity);
    }
    const uint64_t wanted = bar.phase;
    if ((wanted & 1) == parity) {
        while (bar.phase == wanted) {
            bar.waiters.push_back(&t);
            block_thread("mbarrier.try_wait", barrier, wanted);
        }
        if (bar.phase > wanted + 1) {
            fail("mbarrier.try_wait: the mbarrier at %s ran ahead: phase %llu completed before this thread saw the "
                 "end of "
                 "phase %llu",
                 describe(*ref.block, ref.offset).c_str(), (unsigned long long)bar.phase - 1,
                 (unsigned long long)wanted);
        }
    }
    if (bar.completed) {
        learn(&t, scope == Scope::Cluster ? bar.completed : visible_to(bar.completed, *t.block));
    }
    return true;
}

} // namespace emu
