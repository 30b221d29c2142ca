/* memory.h - the caller's side of global memory: which buffers a kernel may touch. */
#ifndef EMULATOR_MEMORY_H
#define EMULATOR_MEMORY_H

#include <cstddef>

namespace emu {

/* Device memory is host memory here: kernels may touch these bytes and no others. `name` appears in messages. */
void register_buffer(void *p, size_t bytes, const char *name);
void forget_buffers();

} // namespace emu

#endif
