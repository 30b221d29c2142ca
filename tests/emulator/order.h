/*
 * order.h - who knows of whose memory accesses: the happens-before order of one cluster, as vector clocks.
 *
 * Everything that touches memory is an agent: each thread, and each stream of asynchronous work (the copies that
 * report to one barrier, the matrix products of one warp, ...). An access is an epoch: (agent, that agent's clock). What
 * an agent knows is its past: for every agent the newest clock whose accesses happened before now. An access A happened
 * before what agent B does next exactly if B's past holds A's epoch. Barriers hand pasts on: arriving adds one's past
 * to the barrier, waiting takes over what the barrier gathered.
 *
 * Pasts are shared and immutable; threads of a warp mostly have the same one, so joins are few and cached.
 */
#ifndef EMULATOR_ORDER_H
#define EMULATOR_ORDER_H

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace emu {

using AgentId = uint32_t; /* 0: nobody, the writer of memory that was never written */
using Clock = uint32_t;

struct Epoch {
    AgentId agent = 0;
    Clock clock = 0;
};

using Clocks = std::vector<Clock>; /* by agent; shorter means zero */
using Past = std::shared_ptr<const Clocks>;

inline Clock clock_of(const Clocks &clocks, AgentId agent) { return agent < clocks.size() ? clocks[agent] : 0; }

inline void merge(Clocks &into, const Clocks &from) {
    if (into.size() < from.size()) {
        into.resize(from.size());
    }
    const size_t n = from.size();
    Clock *a = into.data();
    const Clock *b = from.data();
    for (size_t i = 0; i < n; i++) {
        a[i] = a[i] < b[i] ? b[i] : a[i];
    }
}

inline void raise(Clocks &clocks, Epoch e) {
    if (clocks.size() <= e.agent) {
        clocks.resize(e.agent + 1);
    }
    clocks[e.agent] = clocks[e.agent] < e.clock ? e.clock : clocks[e.agent];
}

/* Joins two pasts; the same pair comes back from a small cache, because all threads that wait on a barrier ask for it. */
class Joiner {
  public:
    Past join(const Past &a, const Past &b) {
        if (a == b || b->empty()) {
            return a;
        }
        for (const Entry &e : cache) {
            if (e.a == a && e.b == b) {
                return e.result;
            }
        }
        auto merged = std::make_shared<Clocks>(*a);
        merge(*merged, *b);
        Entry &slot = cache[next++ % CACHE];
        slot = {a, b, merged};
        return merged;
    }
    void clear() {
        for (Entry &e : cache) {
            e = Entry();
        }
    }

  private:
    struct Entry {
        Past a, b, result;
    };
    static constexpr unsigned CACHE = 16;
    Entry cache[CACHE];
    unsigned next = 0;
};

/* Each thread is two agents: `id` for everything it did, `id` + 1 for what other blocks may rely on. The second is passed
 * on inside a block by everything, between blocks only by instructions of cluster scope. */
constexpr AgentId PUBLISHED = 1;

/* What the arrivals at a barrier have brought along so far. */
class Gathered {
  public:
    void add(const Past &past, Epoch self, bool publish = true) {
        if (past != last) {
            merge(clocks, *past);
            last = past;
        }
        raise(clocks, self);
        if (publish) {
            raise(clocks, {self.agent + PUBLISHED, self.clock});
        }
        taken.reset();
    }
    void add(Epoch e) {
        raise(clocks, e);
        taken.reset();
    }
    /* The gathered past, shared by all who take it until something is added. */
    const Past &take() {
        if (!taken) {
            taken = std::make_shared<Clocks>(clocks);
        }
        return taken;
    }
    void clear() { *this = Gathered(); }

  private:
    Clocks clocks;
    Past last, taken;
};

} // namespace emu

#endif
