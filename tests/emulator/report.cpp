/* report.cpp - see report.h. */
#include "report.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "runtime.h"

namespace emu {

namespace {

std::string failure;

std::string format_text(const char *format, va_list args) {
    char text[2048];
    vsnprintf(text, sizeof text, format, args);
    return text;
}

std::string base_name(const std::string &path) {
    const size_t slash = path.rfind('/');
    return slash == std::string::npos ? path : path.substr(slash + 1);
}

std::string describe_thread(const Thread &t) {
    char text[256];
    snprintf(text, sizeof text, "block (%u, %u, %u), thread %u (warp %u, lane %u)", t.block->index.x,
             t.block->index.y, t.block->index.z, t.number, t.number / WARP_SIZE, t.lane);
    return text;
}

/* "mbarrier shared+0x30400 (phase 2: 1 of 8 arrivals and 0 bytes missing)" */
std::string describe_wait(const Thread &t) {
    char text[256];
    const Waiting &w = t.waiting;
    std::string out = w.what;
    if (strstr(w.what, "mbarrier")) {
        Block &b = *cluster->blocks[w.address >> RANK_SHIFT];
        const uint32_t offset = (w.address & OFFSET_MASK) - WINDOW_START;
        const Mbarrier *bar = b.barriers[offset / 8].get();
        snprintf(text, sizeof text,
                 " on shared+0x%X, for phase %llu; it is in phase %llu with %u of %u arrivals and %lld "
                 "bytes missing",
                 offset, (unsigned long long)w.phase, (unsigned long long)(bar ? bar->phase : 0),
                 bar ? bar->pending : 0, bar ? bar->expected : 0, (long long)(bar ? bar->tx : 0));
        out += text;
    } else if (strstr(w.what, "bar.") == w.what || strstr(w.what, "__syncthreads")) {
        const NamedBarrier &bar = t.block->named[w.address];
        snprintf(text, sizeof text, " %u: %u of %u threads have come", w.address, bar.arrived,
                 bar.expected ? bar.expected : t.block->live);
        out += text;
    } else if (strstr(w.what, "barrier.cluster")) {
        snprintf(text, sizeof text, ": %u of %u threads have come", cluster->barrier.arrived, cluster->live);
        out += text;
    }
    for (const auto &m : t.warp->meetings) {
        if (m->what == w.what && (m->arrived >> t.lane & 1)) {
            snprintf(text, sizeof text, ": lanes 0x%08X have not come", m->mask & ~m->arrived);
            out += text;
        }
    }
    return out;
}

/* One line per group of lanes of a warp that wait alike. */
std::string dump() {
    std::string out;
    int lines = 0;
    if (!cluster) {
        return out;
    }
    for (auto &block : cluster->blocks) {
        for (const Warp &warp : block->warps) {
            std::string previous;
            uint32_t lanes = 0;
            auto flush = [&]() {
                char text[96];
                if (!lanes || ++lines > 64) {
                    return;
                }
                snprintf(text, sizeof text, "\n  block %u warp %2u lanes 0x%08X: ", block->number, warp.number,
                         lanes);
                out += text + previous;
            };
            for (const Thread *t : warp.lanes) {
                std::string state = "has exited";
                if (t->state == State::Ready) {
                    state = "can run";
                } else if (t->state == State::Blocked) {
                    state = describe_wait(*t) + "\n      at " + source_of(t->site);
                }
                if (state != previous) {
                    flush();
                    lanes = 0;
                    previous = state;
                }
                lanes |= 1u << t->lane;
            }
            flush();
        }
    }
    for (size_t i = 0; i < cluster->async.size() && i < 8; i++) {
        out += "\n  not carried out yet: " + cluster->async[i].what;
    }
    return out;
}

[[noreturn]] void fail_with(const Thread *thread, const std::string &message) {
    if (failure.empty()) {
        failure = launch ? std::string(launch->kernel->name) + ": " : "";
        if (thread) {
            failure += describe_thread(*thread) + ": ";
        }
        failure += message;
        if (thread && thread->site) {
            failure += "\n    at " + source_of(thread->site);
        }
        failure += dump();
    }
    if (current_thread) {
        abandon_thread();
    }
    throw Failure();
}

} // namespace

bool failure_pending() { return !failure.empty(); }

std::string take_failure() {
    std::string text;
    text.swap(failure);
    return text;
}

void fail(const char *format, ...) {
    va_list args;
    va_start(args, format);
    const std::string text = format_text(format, args);
    va_end(args);
    fail_with(current_thread, text);
}

void fail_at(const Thread *thread, const char *format, ...) {
    va_list args;
    va_start(args, format);
    const std::string text = format_text(format, args);
    va_end(args);
    fail_with(thread, text);
}

std::string source_of(const void *site) {
    static std::map<const void *, std::string> known;
    auto found = known.find(site);
    if (found != known.end()) {
        return found->second;
    }
    Dl_info info;
    std::string out = "an unknown place";
    if (site && dladdr(site, &info) && info.dli_fname) {
        char command[1024], line[1024];
        snprintf(command, sizeof command, "addr2line -Cfi -e '%s' 0x%zx 2>/dev/null", info.dli_fname,
                 (size_t)((const char *)site - 1 - (const char *)info.dli_fbase));
        FILE *pipe = popen(command, "r");
        std::string function, places;
        int shown = 0;
        for (int i = 0; pipe && fgets(line, sizeof line, pipe); i++) {
            std::string text(line, strcspn(line, "\n"));
            if (i % 2 == 0) {
                function = text.substr(0, text.find_first_of("<("));
                continue;
            }
            const std::string place = base_name(text.substr(0, text.find(" (discriminator")));
            if (place.find("on_host.h") == std::string::npos && place.find("??") == std::string::npos &&
                function.find("emu_") == std::string::npos && shown < 4) {
                places += (shown++ ? " < " : "") + place + " " + function.substr(function.rfind(' ') + 1);
            }
        }
        if (pipe) {
            pclose(pipe);
        }
        if (!places.empty()) {
            out = places;
        }
    }
    known[site] = out;
    return out;
}

} // namespace emu
