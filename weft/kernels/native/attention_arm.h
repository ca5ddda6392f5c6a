// The inner loops of attention on ARM, with all sums in registers.
#pragma once

#include "four_arm.h"

namespace weft {

// Products of QUERIES with one key; each query has room for LANES tokens.
template <class Value, long QUERIES>
inline void multiply_key(const Value* key, const float* queries, long padded, long size, Partial* products) {
    Four sums[QUERIES] = {};
    for (long i = 0; i < size; i += LANES) {
        Four values = load_four(key + i, size - i);
#pragma GCC unroll 8
        for (long query = 0; query < QUERIES; query++) {
            Four wanted = load_four(queries + query * padded + i);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++)
                sums[query].part[j] = vfmaq_f32(sums[query].part[j], wanted.part[j], values.part[j]);
        }
    }
#pragma GCC unroll 8
    for (long query = 0; query < QUERIES; query++) products[query * LANES] = add_up(sums[query]);
}

// Adds one vector of the values of `count` tokens, of which `rest` are used, times the weights of QUERIES to the mix.
// `next`: values that are read after these; may be null.
template <class Value, long QUERIES, long CHUNK>
inline void mix_values(const Value* values, long stride, long count, const Value* next, long rest,
                       const float (*weights)[CHUNK], const float* shrinking, float* mixed, long line) {
    Four sums[QUERIES];
#pragma GCC unroll 8
    for (long query = 0; query < QUERIES; query++) {
        sums[query] = load_four(mixed + query * line);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) sums[query].part[j] = vmulq_n_f32(sums[query].part[j], shrinking[query]);
    }
    for (long token = 0; token < count; token++, values += stride) {
        if (next) __builtin_prefetch(next + token * stride);
        Four value = load_four(values, rest);
#pragma GCC unroll 8
        for (long query = 0; query < QUERIES; query++)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++)
                sums[query].part[j] = vfmaq_n_f32(sums[query].part[j], value.part[j], weights[query][token]);
    }
#pragma GCC unroll 8
    for (long query = 0; query < QUERIES; query++) store_four(mixed + query * line, sums[query]);
}

}  // namespace weft
