// Sums of a few rows in registers, written so that compilers turn them into any CPU's vectors.
#pragma once

#include <algorithm>

#include "rows.h"

namespace weft {

// Bytes of a cache line, and inputs by which weights are asked for ahead, in the first-level cache and in the second.
constexpr long LINE = 64, AHEAD = 8, FAR_AHEAD = 32;
// Inputs of a block that ARM multiplies in two passes.
constexpr long TWO_PASSES = 128;

// Float32 weights to ask the memory for while others are multiplied. Processors fetch ahead by themselves what is read
// line by line, but not the other half of a panel.
struct Later {
    const char* weights;

    void advance() {
        __builtin_prefetch(weights);
        __builtin_prefetch(weights + LINE);
        weights += 2 * LINE;
    }
};

struct Nothing {
    void advance() {}
};

using Words = uint32_t __attribute__((vector_size(REGISTER * 4)));

// Two bfloat16 weights.
struct Pair {
    uint32_t bits;
};

inline Lane load_lane(const float* from) {
    Lane value;
    std::memcpy(&value, from, sizeof(value));
    return value;
}

inline void store_lane(float* to, Lane value) { std::memcpy(to, &value, sizeof(value)); }

inline void load_pairs(const Pair* from, Lane& low, Lane& high) {
    Words both;
    std::memcpy(&both, from, sizeof(both));
    low = (Lane)(both << 16);
    high = (Lane)(both & 0xffff0000u);
}

template <int ROWS, int VECTORS>
struct Sums {
    Lane total[ROWS][VECTORS];

    // `sums` has PANEL floats per row.
    Sums(const float* sums, bool begin) {
        for (int row = 0; row < ROWS; row++)
            for (int j = 0; j < VECTORS; j++)
                total[row][j] = begin ? Lane{} : load_lane(sums + row * PANEL + j * REGISTER);
    }

    void store(float* sums) const {
        for (int row = 0; row < ROWS; row++)
            for (int j = 0; j < VECTORS; j++) store_lane(sums + row * PANEL + j * REGISTER, total[row][j]);
    }
};

// Asks for weights of a later input. While the multiplications of several rows wait for one line of weights, an x86
// processor has no room to begin many others, so it would wait for the memory line by line.
inline void ask_far_ahead([[maybe_unused]] const Pair* weights) {
#if !defined(__aarch64__)
    __builtin_prefetch(weights + FAR_AHEAD * HALF);
#endif
}

inline void ask_far_ahead([[maybe_unused]] const float* weights) {
#if !defined(__aarch64__)
    __builtin_prefetch(weights + FAR_AHEAD * PANEL);
    __builtin_prefetch(weights + FAR_AHEAD * PANEL + LINE / 4);
#endif
}

// Weights lie as [count, HALF] pairs.
template <int ROWS, class Inputs>
void add_pairs(Inputs x, const Pair* weights, long count, float* sums, bool begin) {
    constexpr int EACH = HALF / REGISTER;
    Sums<ROWS, 2 * EACH> found(sums, begin);
    for (long i = 0; i < count; i++, weights += HALF) {
        ask_far_ahead(weights);
#pragma GCC unroll 8
        for (int j = 0; j < EACH; j++) {
            Lane low, high;
            load_pairs(weights + j * REGISTER, low, high);
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; row++) {
                found.total[row][j] += low * x.at(i, row);
                found.total[row][EACH + j] += high * x.at(i, row);
            }
        }
    }
    found.store(sums);
}

// Weights lie as [count, stride] floats, of which OUTPUTS are used.
template <int ROWS, int OUTPUTS, class Inputs>
void add_floats(Inputs x, const float* weights, long stride, long count, float* sums, bool begin) {
    constexpr int EACH = OUTPUTS / REGISTER;
    Sums<ROWS, EACH> found(sums, begin);
    for (long i = 0; i < count; i++, weights += stride) {
        if constexpr (OUTPUTS == PANEL) ask_far_ahead(weights);
        Lane factor[EACH];
#pragma GCC unroll 8
        for (int j = 0; j < EACH; j++) factor[j] = load_lane(weights + j * REGISTER);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
            for (int j = 0; j < EACH; j++) found.total[row][j] += factor[j] * x.at(i, row);
    }
    found.store(sums);
}

}  // namespace weft
