/*
 * runtime.h - the emulated machine: launches, clusters, blocks, warps and threads, and what their memory remembers.
 *
 * One launch runs at a time, one cluster of it at a time, one thread of that cluster at a time. Threads are coroutines
 * on stacks of their own that give way only where an instruction waits; so nothing here needs a lock, and a run is the
 * same every time for the same options. Asynchronous work (copies, tensor core products) is queued and carried out as
 * late as the program's own synchronisation allows, as early as possible, or at random, by `Options::delivery`.
 *
 * An error ends the launch: fail() records a message and the state of every waiting warp and abandons all threads.
 */
#ifndef EMULATOR_RUNTIME_H
#define EMULATOR_RUNTIME_H

#include <cstdarg>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "device_api.h"
#include "order.h"

namespace emu {

constexpr uint32_t WARP_SIZE = 32;
constexpr uint32_t WINDOW_START =
    1024; /* the system keeps the first KB of a block's shared memory on sm_90 and later */
constexpr uint32_t MAX_SHARED = 227 * 1024;
constexpr size_t SLOT_BYTES = 256 * 1024; /* address space kept for the shared memory of a block */
constexpr uint32_t RANK_SHIFT = 24;       /* where a shared address holds the block's rank in its cluster */
constexpr uint32_t OFFSET_MASK = (1u << RANK_SHIFT) - 1;

/* ---- options --------------------------------------------------------------------------------------------- */

enum class Delivery { Late = 0, Early = 1, Random = 2 };

struct Options {
    Delivery delivery = Delivery::Late;
    uint32_t seed = 0;       /* order of threads and copies where it is free; 0: first come, first served */
    uint32_t elect_lane = 0; /* the lane that elect.sync names, if its mask has it */
    uint64_t max_steps = 4000000000ull;
    bool check_races = true;
    /* Faults for tests: XORed into what a kernel hands over, by name of the operand ("wgmma.a", "tcgen05.idesc", ...). */
    std::map<std::string, uint64_t> flip;
};
extern Options options;

/* How often things happened in the last launch, by name; tests use it to see that a path was taken. */
extern std::map<std::string, uint64_t> counters;

/* `value` with the bits flipped that a test asked for. */
uint64_t flipped(const char *operand, uint64_t value);

/* ---- memory ---------------------------------------------------------------------------------------------- */

struct Reader {
    Epoch epoch;
    uint16_t mask; /* bytes of the granule */
};

/* 16 bytes of shared memory: who wrote each byte, who has read it since. */
struct Granule {
    Epoch writer[16];
    std::vector<Reader> readers;
};

/* From whose point of view an access is judged: what happened before it. */
struct Block;
struct View {
    const Past *past;
    Epoch self; /* the agent's own latest clock: it knows all of its own accesses */
    const Block *block;
    bool knows(Epoch e) const {
        return e.agent == 0 || (e.agent == self.agent && e.clock <= self.clock) ||
               clock_of(**past, e.agent) >= e.clock;
    }
};

/* ---- barriers -------------------------------------------------------------------------------------------- */

struct Thread;
struct Cluster;

/* PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier". */
struct Mbarrier {
    bool live = false;
    uint32_t expected = 0, pending = 0;
    int64_t tx = 0;
    uint64_t phase = 0;
    Epoch init;         /* by a thread */
    AgentId copies = 0; /* the agent of asynchronous work that reports here: its clock is phase + 1 */
    Gathered gathered;
    Past completed; /* what the latest completed phase handed on */
    std::vector<Thread *> waiters;
};

struct NamedBarrier {
    uint32_t arrived = 0, expected = 0;
    uint64_t phase = 0;
    Gathered gathered;
    Past completed;
    std::vector<Thread *> waiters;
};

struct ClusterBarrier {
    uint32_t arrived = 0;
    uint64_t phase = 0;
    Gathered gathered;
    Past completed;
    std::vector<Thread *> waiters;
};

/* ---- threads --------------------------------------------------------------------------------------------- */

enum class State { Ready, Blocked, Done };

/* What a thread waits for, for the scheduler's dump. */
struct Waiting {
    const char *what = "";
    uint32_t address = 0; /* mbarrier, or number of a named barrier */
    uint64_t phase = 0;
};

struct BulkGroup {
    uint32_t outstanding = 0;
    bool committed = false;
};

/* One warp-wide instruction in progress. */
struct Meeting {
    const char *what = nullptr;
    uint32_t mask = 0, arrived = 0, left = 0;
    uint32_t values[WARP_SIZE] = {}, operands[WARP_SIZE] = {};
    Gathered gathered; /* only instructions that order memory use it */
    Past completed;
    bool done = false;
};

struct Warp;
struct Stream; /* tcgen05.cpp */

struct Thread {
    void *stack_pointer = nullptr;
    State state = State::Ready;
    Block *block = nullptr;
    Warp *warp = nullptr;
    uint32_t lane = 0;
    uint32_t number = 0; /* in the block */
    Index3 index = {0, 0, 0};
    char *stack_low = nullptr, *stack_high = nullptr;
    const void *site = nullptr; /* return address of the latest instruction */
    Waiting waiting;

    /* order */
    AgentId self = 0;
    Clock clock = 1;
    Past past;
    std::vector<Clock> proxy_fences, init_fences; /* own clocks, ascending */
    uint64_t cluster_phase = 0;
    bool cluster_arrived = false;

    /* asynchronous copies to global memory that this thread has issued */
    AgentId bulk_agent = 0;
    std::vector<BulkGroup> bulk_groups;
    size_t bulk_waited = 0; /* groups known to be done */

    std::shared_ptr<Stream> tcgen05;

    View view() const { return {&past, {self, clock}, block}; }
};

struct WgmmaState; /* wgmma.cpp */

struct Warp {
    Block *block = nullptr;
    uint32_t number = 0;
    std::vector<Thread *> lanes;
    std::vector<std::shared_ptr<Meeting>> meetings;
    uint32_t registers = 0; /* per thread, as setmaxnreg counts */
    std::shared_ptr<WgmmaState> wgmma;
};

/* ---- blocks and clusters --------------------------------------------------------------------------------- */

struct TensorMemory; /* tcgen05.cpp */

struct Block {
    Cluster *cluster = nullptr;
    uint32_t rank = 0;
    uint32_t number = 0; /* in the grid */
    Index3 index = {0, 0, 0};
    uint8_t *memory = nullptr; /* shared memory */
    uint32_t shared_bytes = 0;
    std::vector<Granule> granules;
    std::vector<std::unique_ptr<Mbarrier>> barriers; /* by offset / 8 */
    NamedBarrier named[16];
    std::vector<Warp> warps;
    std::vector<Thread> threads;
    std::deque<Thread *> ready;
    uint32_t live = 0;
    uint32_t free_registers = 0;
    std::vector<Thread *> register_waiters;
    bool waited_for_grid = false;
    std::shared_ptr<TensorMemory> tensor_memory;
};

struct AsyncOp {
    std::string what;
    std::function<void()> run;
};

struct AgentInfo {
    std::string name;
    Thread *thread = nullptr; /* NULL: asynchronous work */
    bool published = false;   /* the second agent of its thread */
};

struct Cluster {
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<AgentInfo> agents;
    Joiner joiner;
    ClusterBarrier barrier;
    std::vector<AsyncOp> async;
    uint32_t live = 0;
};

constexpr AgentId GRID_AGENT = 1; /* its clock 1: everything that earlier kernels of the stream wrote */

struct Launch {
    const emu_kernel *kernel = nullptr;
    void **params = nullptr;
    Index3 grid = {1, 1, 1}, block = {1, 1, 1};
    uint32_t cluster = 1;
    uint32_t shared_bytes = 0;
    bool overlaps = false; /* programmatic dependent launch: may start before its predecessor ends */
    int capability = 90;
};

extern const Launch *launch;   /* the one that runs */
extern Cluster *cluster;       /* the one that runs */
extern Thread *current_thread; /* NULL while the scheduler itself runs */

/* Runs a launch to its end. Returns an empty string, or what went wrong. */
std::string run_launch(const Launch &what);

/* ---- for the parts of the emulator ----------------------------------------------------------------------- */

[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void fail_at(const Thread *thread, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Notes where the running thread is; every instruction calls it first (as a macro, to see its caller). */
#define EMU_SITE() (::emu::current_thread->site = __builtin_return_address(0))

void block_thread(const char *what, uint32_t address = 0, uint64_t phase = 0); /* returns when woken */
void wake(Thread *thread);
void wake_all(std::vector<Thread *> &threads);
AgentId new_agent(const std::string &name);
AgentId new_thread_agents(Thread *thread);
Past visible_to(const Past &past,
                const Block &block); /* without what other blocks did, as far as it is cluster scope's */
void learn(Thread *thread, const Past &past);
void learn(Thread *thread, Epoch e);
void queue_async(const std::string &what, std::function<void()> run);
uint32_t random_below(uint32_t n);

/* Meets the other lanes of `mask`; `order`: what they did before is known to all afterwards. The last lane to arrive
 * runs `complete` on behalf of all. */
std::shared_ptr<Meeting> meet(const char *what, uint32_t mask, uint32_t value = 0, uint32_t operand = 0,
                              bool order = false, const std::function<void(Meeting &)> &complete = nullptr);
Past joint_past(const Warp &warp);
void check_named(Block &block, NamedBarrier &bar); /* completes the phase if everybody has come */
void check_cluster_barrier();                      /* likewise */

/* ---- memory (memory.cpp) */

/* An address of shared memory, split and checked to lie inside the block's memory. */
struct SharedRef {
    Block *block;
    uint32_t offset;
    uint8_t *data() const { return block->memory + offset; }
};
SharedRef shared_ref(uint32_t address, uint32_t bytes, uint32_t align, bool may_be_remote, const char *what);
std::string describe(const Block &block, uint32_t offset);
void note_read(Block &block, uint32_t offset, uint32_t bytes, const View &view, Epoch as, bool async,
               const char *what);
void note_write(Block &block, uint32_t offset, uint32_t bytes, const View &view, Epoch as, bool async,
                const char *what);
void global_check(const void *p, size_t bytes, bool write, const View &view, const char *what);
void begin_block_memory(Block &block, uint32_t slot);
void map_window(const Block &block); /* makes the `extern __shared__` array that block's */
void begin_global_launch(bool overlaps);
void set_window(void *p, size_t bytes);
void add_image(const void *low, const void *high);  /* data of a kernel library, readable by kernels */
void set_parameters(const void *low, size_t bytes); /* the running launch's parameters, likewise */

/* Operand A of the tensor cores has 64 or 128 rows and may reach beyond what its copy brought: rows that nobody needs. They are told by
 * their writer, which is not that of the tile's first row. Such rows are not checked; what is computed from them is a
 * NaN that says where it came from, and using it is an error (use_value). */
bool foreign_row(const Block &block, const uint32_t (&offsets)[2], Epoch first);
Epoch writer_of(const Block &block, uint32_t offset);
uint32_t taint_of_row(const char *instruction, const Block &block, uint32_t row, uint32_t offset);
void forget_taints();                                          /* before each cluster */
constexpr uint32_t TAINT = 0x7FFB0000u, TAINT_OF_LOAD = TAINT; /* registers of a tcgen05.ld under way */
inline bool is_taint(uint32_t bits) { return (bits & 0x7FFF0000u) == TAINT; }

/* ---- mbarriers (mbarrier.cpp) */

Mbarrier &mbarrier_at(const SharedRef &ref, const char *what);
void mbarrier_known(const Mbarrier &bar, const SharedRef &ref, const View &view, bool needs_fence, const char *what);
void mbarrier_complete_tx(const SharedRef &ref, uint32_t bytes, uint64_t phase, const char *what);
void mbarrier_arrive_for(const SharedRef &ref, uint32_t count, const Past &past, Epoch self, bool publish,
                         const char *what);

/* ---- hooks of the parts */

void wgmma_end_of_thread(Thread &thread);
void wgmma_begin_block(Block &block);
void tcgen05_begin_block(Block &block);
void tcgen05_end_of_block(Block &block);

} // namespace emu

#endif
