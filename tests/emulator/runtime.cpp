/* runtime.cpp - coroutines, the scheduler, launches. */
#include "runtime.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "report.h"

namespace emu {

Options options;
std::map<std::string, uint64_t> counters;
const Launch *launch;
Cluster *cluster;
Thread *current_thread;

namespace {

/* ---- coroutines ------------------------------------------------------------------------------------------ */

constexpr size_t STACK_BYTES = 128 * 1024, GUARD_BYTES = 4096;

void *scheduler_stack_pointer;
std::vector<char *> stacks; /* kept for the life of the process */
std::mt19937 random_source;
uint64_t steps;

#if defined(__x86_64__)
/* Saves the callee-saved registers and the stack pointer, continues on another stack. */
extern "C" void emu_switch(void **save, void *load);
__asm__(".text\n.globl emu_switch\n.hidden emu_switch\n.type emu_switch,@function\nemu_switch:\n"
        "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
        "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
        "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"
        ".size emu_switch,.-emu_switch\n");
constexpr int SAVED_WORDS = 6;
#elif defined(__aarch64__)
extern "C" void emu_switch(void **save, void *load);
__asm__(".text\n.globl emu_switch\n.hidden emu_switch\n.type emu_switch,%function\nemu_switch:\n"
        "sub sp, sp, #160\nstp x19, x20, [sp]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\n"
        "stp x25, x26, [sp, #48]\nstp x27, x28, [sp, #64]\nstp x29, x30, [sp, #80]\n"
        "stp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\nstp d12, d13, [sp, #128]\nstp d14, d15, [sp, #144]\n"
        "mov x2, sp\nstr x2, [x0]\nmov sp, x1\n"
        "ldp x19, x20, [sp]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\n"
        "ldp x25, x26, [sp, #48]\nldp x27, x28, [sp, #64]\nldp x29, x30, [sp, #80]\n"
        "ldp d8, d9, [sp, #96]\nldp d10, d11, [sp, #112]\nldp d12, d13, [sp, #128]\nldp d14, d15, [sp, #144]\n"
        "add sp, sp, #160\nret\n.size emu_switch,.-emu_switch\n");
constexpr int SAVED_WORDS = 20;
#else
#error "the emulator's coroutine switch is written for x86-64 and AArch64"
#endif

void end_thread(Thread &t);

/* First frame of every coroutine. */
[[noreturn]] void thread_main() {
    launch->kernel->call(launch->params);
    Thread &t = *current_thread;
    end_thread(t);
    void *unused;
    emu_switch(&unused, scheduler_stack_pointer);
    abort(); /* a thread that has ended is never continued */
}

char *stack_for(size_t number) {
    while (stacks.size() <= number) {
        void *p =
            mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) {
            fail("out of memory for the stacks of %zu threads", number + 1);
        }
        mprotect(p, GUARD_BYTES, PROT_NONE);
        stacks.push_back((char *)p);
    }
    return stacks[number];
}

void prepare_thread(Thread &t, size_t stack_number) {
    char *low = stack_for(stack_number);
    t.stack_low = low;
    t.stack_high = low + STACK_BYTES;
    void **top = (void **)(t.stack_high - 64);
#if defined(__x86_64__)
    /* emu_switch pops the registers, then `ret`; at a function's entry the stack pointer is 8 below a multiple of 16 */
    top -= 1;
    *top-- = nullptr;
    *top = (void *)thread_main;
    top -= SAVED_WORDS;
    memset((void *)top, 0, SAVED_WORDS * sizeof *top);
#else
    top -= SAVED_WORDS;
    memset((void *)top, 0, SAVED_WORDS * sizeof *top);
    top[11] = (void *)thread_main; /* x30 */
#endif
    t.stack_pointer = (void *)top;
}

/* ---- scheduler ------------------------------------------------------------------------------------------- */

void run_async(size_t which) {
    AsyncOp op = std::move(cluster->async[which]);
    cluster->async.erase(cluster->async.begin() + (ptrdiff_t)which);
    Thread *caller = current_thread;
    current_thread = nullptr;
    op.run();
    current_thread = caller;
}

void run_async_one() { run_async(options.seed ? random_below((uint32_t)cluster->async.size()) : 0); }

/* The next thread to run, of `home` if possible: changing the block costs a remapping of its shared memory. */
Thread *next_thread(Block *&home) {
    const size_t n = cluster->blocks.size();
    bool change = options.seed && random_below(64) == 0;
    for (size_t i = 0; i <= n; i++) {
        if (home == nullptr || home->ready.empty() || change) {
            home = cluster->blocks[(home ? home->rank + 1 : 0) % n].get();
            change = false;
        }
        if (!home->ready.empty()) {
            break;
        }
    }
    if (home->ready.empty()) {
        return nullptr;
    }
    if (options.seed) {
        std::swap(home->ready.front(), home->ready[random_below((uint32_t)home->ready.size())]);
    }
    Thread *t = home->ready.front();
    home->ready.pop_front();
    return t;
}

void run_cluster() {
    Block *home = nullptr, *mapped = nullptr;
    while (cluster->live > 0 || !cluster->async.empty()) {
        if (options.delivery == Delivery::Random && !cluster->async.empty() && random_below(16) == 0) {
            run_async_one();
        }
        Thread *t = next_thread(home);
        if (t == nullptr) {
            if (cluster->async.empty()) {
                fail("deadlock: no thread can continue");
            }
            run_async_one();
            continue;
        }
        if (mapped != home) {
            map_window(*home);
            mapped = home;
        }
        if (++steps > options.max_steps) {
            fail_at(t, "no end in sight after %llu steps", (unsigned long long)options.max_steps);
        }
        current_thread = t;
        emu_switch(&scheduler_stack_pointer, t->stack_pointer);
        current_thread = nullptr;
        if (failure_pending()) {
            throw Failure();
        }
    }
}

/* ---- building a cluster ---------------------------------------------------------------------------------- */

void begin_cluster(Cluster &c, uint32_t first_block) {
    const uint32_t num_threads = launch->block.x * launch->block.y * launch->block.z;
    const uint32_t num_warps = (num_threads + WARP_SIZE - 1) / WARP_SIZE;
    /* Registers are handed out by warp, in units of 8 a thread (CUDA C++ Programming Guide, "Compute Capabilities"). */
    const uint32_t registers = std::min(255u, 65536 / (num_warps * WARP_SIZE)) / 8 * 8;
    cluster = &c;
    c.agents.resize(2); /* nobody, and the grid's predecessors */
    c.agents[GRID_AGENT].name = "earlier kernels";
    auto start = std::make_shared<Clocks>(2);
    (*start)[GRID_AGENT] = launch->overlaps ? 0 : 1;
    for (uint32_t rank = 0; rank < launch->cluster; rank++) {
        c.blocks.push_back(std::make_unique<Block>());
        Block &b = *c.blocks.back();
        const uint32_t number = first_block + rank;
        b.cluster = &c;
        b.rank = rank;
        b.number = number;
        b.index = {number % launch->grid.x, number / launch->grid.x % launch->grid.y,
                   number / launch->grid.x / launch->grid.y};
        b.shared_bytes = launch->shared_bytes;
        b.live = num_threads;
        b.waited_for_grid = !launch->overlaps;
        b.free_registers = 65536 - registers * num_warps * WARP_SIZE;
        begin_block_memory(b, rank);
        b.warps.resize(num_warps);
        b.threads = std::vector<Thread>(num_threads);
        for (uint32_t i = 0; i < num_warps; i++) {
            b.warps[i].block = &b;
            b.warps[i].number = i;
            b.warps[i].registers = registers;
        }
        for (uint32_t i = 0; i < num_threads; i++) {
            Thread &t = b.threads[i];
            t.block = &b;
            t.number = i;
            t.lane = i % WARP_SIZE;
            t.warp = &b.warps[i / WARP_SIZE];
            t.warp->lanes.push_back(&t);
            t.index = {i % launch->block.x, i / launch->block.x % launch->block.y,
                       i / launch->block.x / launch->block.y};
            t.past = start;
            t.self = new_thread_agents(&t);
            prepare_thread(t, rank * num_threads + i);
            b.ready.push_back(&t);
        }
        c.live += num_threads;
        wgmma_begin_block(b);
        tcgen05_begin_block(b);
    }
}

void end_cluster(Cluster &c) {
    for (auto &b : c.blocks) {
        tcgen05_end_of_block(*b);
        if (!b->waited_for_grid) {
            fail("block %u ended without griddepcontrol.wait: the next kernel's wait would not cover the kernels "
                 "before "
                 "this one",
                 b->number);
        }
    }
}

std::string check_launch(const Launch &l) {
    char text[256];
    const uint64_t threads = (uint64_t)l.block.x * l.block.y * l.block.z;
    if (threads == 0 || threads > 1024 || (l.kernel->max_threads && threads > l.kernel->max_threads)) {
        snprintf(text, sizeof text, "%s: %llu threads a block, allowed are 1 to %u", l.kernel->name,
                 (unsigned long long)threads, l.kernel->max_threads ? l.kernel->max_threads : 1024);
        return text;
    }
    if (l.grid.x == 0 || l.grid.y == 0 || l.grid.z == 0 || l.grid.y > 65535 || l.grid.z > 65535) {
        snprintf(text, sizeof text, "%s: grid of %u x %u x %u blocks", l.kernel->name, l.grid.x, l.grid.y, l.grid.z);
        return text;
    }
    if (l.cluster == 0 || l.grid.x % l.cluster != 0 || l.cluster > 16) {
        snprintf(text, sizeof text, "%s: grid of %u blocks along x does not consist of clusters of %u",
                 l.kernel->name, l.grid.x, l.cluster);
        return text;
    }
    for (uint32_t i = 0; i < l.kernel->num_params; i++) {
        if (l.kernel->maps[i] == 'm') {
            snprintf(text, sizeof text, "%s: parameter %u is a tensor map but not __grid_constant__", l.kernel->name,
                     i);
            return text;
        }
    }
    return "";
}

} // namespace

std::string run_launch(const Launch &what) {
    std::string error = check_launch(what);
    if (!error.empty()) {
        return error;
    }
    const uint64_t num_blocks = (uint64_t)what.grid.x * what.grid.y * what.grid.z;
    launch = &what;
    counters.clear();
    random_source.seed(options.seed);
    steps = 0;
    begin_global_launch(what.overlaps);
    set_window(what.kernel->window, SLOT_BYTES);
    try {
        for (uint64_t first = 0; first < num_blocks; first += what.cluster) {
            Cluster c;
            forget_taints();
            begin_cluster(c, (uint32_t)first);
            run_cluster();
            end_cluster(c);
            cluster = nullptr;
        }
        counters["launches"]++;
    } catch (const Failure &) {
        error = take_failure();
    }
    cluster = nullptr;
    current_thread = nullptr;
    launch = nullptr;
    return error;
}

/* ---- services -------------------------------------------------------------------------------------------- */

uint32_t random_below(uint32_t n) { return n ? random_source() % n : 0; }

uint64_t flipped(const char *operand, uint64_t value) {
    if (options.flip.empty()) {
        return value;
    }
    auto it = options.flip.find(operand);
    return it == options.flip.end() ? value : value ^ it->second;
}

AgentId new_agent(const std::string &name) {
    cluster->agents.push_back({name, nullptr, false});
    return (AgentId)cluster->agents.size() - 1;
}

AgentId new_thread_agents(Thread *thread) {
    cluster->agents.push_back({"", thread, false});
    cluster->agents.push_back({"", thread, true});
    return (AgentId)cluster->agents.size() - 2;
}

Past visible_to(const Past &past, const Block &block) {
    static Past latest, result;
    static const Block *latest_block;
    if (cluster->blocks.size() == 1) {
        return past;
    }
    if (latest != past || latest_block != &block) {
        auto filtered = std::make_shared<Clocks>(*past);
        for (size_t i = 0; i < filtered->size(); i++) {
            const AgentInfo &info = cluster->agents[i];
            if (info.published && info.thread->block != &block) {
                (*filtered)[i] = 0;
            }
        }
        latest = past;
        latest_block = &block;
        result = filtered;
    }
    return result;
}

void block_thread(const char *what, uint32_t address, uint64_t phase) {
    Thread &t = *current_thread;
    t.state = State::Blocked;
    t.waiting.what = what;
    t.waiting.address = address;
    t.waiting.phase = phase;
    emu_switch(&t.stack_pointer, scheduler_stack_pointer);
}

void yield_thread() {
    Thread &t = *current_thread;
    t.block->ready.push_back(&t);
    emu_switch(&t.stack_pointer, scheduler_stack_pointer);
}

void abandon_thread() {
    void *unused;
    emu_switch(&unused, scheduler_stack_pointer);
    abort();
}

void wake(Thread *thread) {
    if (thread->state == State::Blocked) {
        thread->state = State::Ready;
        thread->waiting = Waiting();
        thread->block->ready.push_back(thread);
    }
}

void wake_all(std::vector<Thread *> &threads) {
    std::vector<Thread *> woken;
    woken.swap(threads);
    for (Thread *t : woken) {
        wake(t);
    }
}

void learn(Thread *thread, const Past &past) { thread->past = cluster->joiner.join(thread->past, past); }

void learn(Thread *thread, Epoch e) {
    if (clock_of(*thread->past, e.agent) >= e.clock) {
        return;
    }
    auto one = std::make_shared<Clocks>();
    raise(*one, e);
    learn(thread, one);
}

void queue_async(const std::string &what, std::function<void()> run) {
    cluster->async.push_back({what, std::move(run)});
    if (options.delivery == Delivery::Early) {
        run_async(cluster->async.size() - 1);
    }
}

/* ---- identity -------------------------------------------------------------------------------------------- */

Index3 thread_index() { return current_thread->index; }
Index3 block_index() { return current_thread->block->index; }
Index3 block_size() { return launch->block; }
Index3 grid_size() { return launch->grid; }
uint32_t cluster_rank() { return current_thread->block->rank; }

/* ---- programmatic dependent launch ----------------------------------------------------------------------- */

void grid_wait() {
    EMU_SITE();
    current_thread->block->waited_for_grid = true;
    learn(current_thread, Epoch{GRID_AGENT, 1});
}

void grid_launch_dependents() { counters["launch_dependents"]++; }

void kernel_error(const char *format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fail("%s", text);
}

/* ---- the end of a thread --------------------------------------------------------------------------------- */

namespace {

void end_thread(Thread &t) {
    for (const auto &m : t.warp->meetings) {
        if (m->mask >> t.lane & 1) {
            fail("the thread exits while other lanes of its warp wait for it in %s", m->what);
        }
    }
    if (t.bulk_groups.size() > t.bulk_waited) {
        fail("the thread exits while its bulk stores may still read shared memory: cp.async.bulk.wait_group is "
             "missing");
    }
    if (t.cluster_arrived) {
        fail("the thread exits between barrier.cluster.arrive and its wait");
    }
    wgmma_end_of_thread(t);
    t.state = State::Done;
    t.block->live--;
    cluster->live--;
    for (NamedBarrier &bar : t.block->named) {
        if (bar.arrived > 0 && bar.expected == 0) {
            check_named(*t.block, bar);
        }
    }
    check_cluster_barrier();
}

} // namespace

} // namespace emu
