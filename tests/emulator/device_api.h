/*
 * device_api.h - what the kernels' side of the emulator (cuda_on_host.h and the stand-ins of the PTX wrapper headers)
 * calls. Nothing here is specific to a kernel; every function acts for the emulated thread that calls it and may switch
 * to another one before it returns.
 *
 * Addresses of shared memory are the 32-bit ones of the instructions: 24 bits of offset in the block's window, the
 * block's rank in its cluster above them.
 */
#ifndef EMULATOR_DEVICE_API_H
#define EMULATOR_DEVICE_API_H

#include <cstddef>
#include <cstdint>

/* A kernel as its compiled source registers it (host_build.py writes the table). */
struct emu_kernel {
    const char *name;
    void (*call)(void **params); /* with copies of the parameters */
    uint32_t num_params;
    const uint32_t *param_bytes;
    uint32_t max_threads; /* of __launch_bounds__, 0 if none */
    const char
        *maps;    /* one letter a parameter: 'g' a tensor map as __grid_constant__, 'm' one that is not, '.' else */
    void *window; /* the array that `extern __shared__` names */
};

namespace emu {

struct Index3 {
    unsigned x, y, z;
};

/* Constant for the thread that asks, hence the attribute: a thread is never moved to another stack. */
Index3 thread_index() __attribute__((const));
Index3 block_index() __attribute__((const));
Index3 block_size() __attribute__((const));
Index3 grid_size() __attribute__((const));
uint32_t cluster_rank() __attribute__((const));

/* Warp-wide: every lane of the mask must come. */
enum class Shuffle { Index, Up, Down, Xor };
enum class Vote { Ballot, Any, All };
enum class Reduce { Add, Min, Max, And, Or, Xor, MinSigned, MaxSigned };
void warp_sync(uint32_t mask);
uint32_t warp_shuffle(Shuffle kind, uint32_t mask, uint32_t value, uint32_t operand, uint32_t width);
uint32_t warp_vote(Vote kind, uint32_t mask, bool predicate);
uint32_t warp_reduce(Reduce kind, uint32_t mask, uint32_t value);
bool warp_elect(uint32_t mask);
uint32_t warp_active_mask();

/* Block- and cluster-wide. `threads` 0: all that have not exited. */
void block_barrier(uint32_t id, uint32_t threads, bool wait);
void cluster_barrier_arrive(bool release);
void cluster_barrier_wait();
void set_max_registers(uint32_t count, bool up);

/* Shared memory by address. */
uint32_t shared_address(const void *p);
uint32_t map_address(uint32_t address, uint32_t rank);
void shared_load(uint32_t address, void *out, uint32_t bytes);
void shared_store(uint32_t address, const void *value, uint32_t bytes, bool may_be_remote);
void shared_store_async(uint32_t address, const void *value, uint32_t bytes, uint32_t barrier);
void matrix_load(uint32_t address, uint32_t *d, uint32_t count, bool transposed);
void matrix_store(uint32_t address, const uint32_t *d, uint32_t count, bool transposed);

/* Global memory, checked like an ordinary access. */
void global_load(const void *p, void *out, uint32_t bytes);
void global_store(void *p, const void *value, uint32_t bytes);

/* mbarrier */
void mbarrier_init(uint32_t barrier, uint32_t arrivals);
void mbarrier_invalidate(uint32_t barrier);
enum class Scope { Cta, Cluster }; /* of the release or acquire that the instruction has */
void mbarrier_arrive(uint32_t barrier, uint32_t count, bool may_be_remote, Scope scope);
void mbarrier_expect(uint32_t barrier, uint32_t bytes);
bool mbarrier_try_wait(uint32_t barrier, uint32_t parity, Scope scope);
void mbarrier_fence_init();

/* The copy engine. `ranks` 0: this block only. Coordinates in elements, `count` of them. */
void tma_check_map(const void *map);
void tma_load(uint32_t dst, const void *map, const int *coordinates, int count, uint32_t barrier, uint32_t ranks);
/* .cta_group::2: into the own block, reporting to a barrier of either block of the pair. */
void tma_load_pair(uint32_t dst, const void *map, const int *coordinates, int count, uint32_t barrier);
void tma_store(const void *map, uint32_t src, const int *coordinates, int count);
void bulk_load(uint32_t dst, const void *src, uint32_t bytes, uint32_t barrier, uint32_t ranks);
void bulk_copy_shared(uint32_t dst, uint32_t src, uint32_t bytes, uint32_t barrier);
void bulk_store(void *dst, uint32_t src, uint32_t bytes);
void bulk_commit();
void bulk_wait(uint32_t groups, bool read_only);

/* Order */
void proxy_fence_async();
void grid_wait();
void grid_launch_dependents();
void yield_thread(); /* for loops that poll memory */

/* wgmma on e4m3: d[64][n] of the warpgroup, `count` = n / 2 registers a lane. `a` is NULL when A lies in shared memory. */
void wgmma_fence();
void wgmma_multiply(float *d, uint32_t count, const uint32_t *a, uint64_t a_descriptor, uint64_t b_descriptor,
                    bool accumulate);
void wgmma_commit();
void wgmma_wait(uint32_t groups);

/* Every value that leaves the registers passes here: it must not come from rows that nobody wrote (runtime.h, taint). */
void use_value(float value);

/* A message that ends the launch, naming the calling thread and source line. */
[[noreturn]] void kernel_error(const char *format, ...) __attribute__((format(printf, 1, 2)));

} // namespace emu

#endif
