/* tma.h - the emulator's own encoding of a tensor map, written by cuTensorMapEncodeTiled, read by the copies. */
#ifndef EMULATOR_TMA_H
#define EMULATOR_TMA_H

#include <cstdint>

namespace emu {

constexpr uint64_t TENSOR_MAP_MAGIC = 0x70616D726F736E65ull;

struct TensorMap {
    uint64_t magic;
    char *address;
    uint64_t size[5];   /* elements */
    uint64_t stride[4]; /* bytes */
    uint16_t box[5];
    uint8_t element_bytes, rank, swizzle_bytes, nan_fill;
};
static_assert(sizeof(TensorMap) <= 128, "must fit into a CUtensorMap");

} // namespace emu

#endif
