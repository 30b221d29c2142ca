/* tcgen05.h - what the stand-ins of tcgen05_sm100.cuh call (see device_api.h). `group`: .cta_group, 1 or 2. */
#ifndef EMULATOR_TCGEN05_H
#define EMULATOR_TCGEN05_H

#include <cstdint>

namespace emu {

void tcgen05_alloc(int group, uint32_t slot, uint32_t columns);
void tcgen05_dealloc(int group, uint32_t address, uint32_t columns);
void tcgen05_relinquish(int group);
void tcgen05_copy_32x128b_warpx4(int group, uint32_t address, uint64_t descriptor);
void tcgen05_mma_mxf8(int group, uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t sfa, uint32_t sfb,
                      bool accumulate);
void tcgen05_commit(int group, uint32_t barrier, uint32_t ranks);
void tcgen05_load_32x32b(uint32_t *registers, uint32_t count, uint32_t address);
void tcgen05_wait_load();
void tcgen05_fence_before();
void tcgen05_fence_after();

} // namespace emu

#endif
