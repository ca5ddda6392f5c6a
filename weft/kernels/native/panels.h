// Matmul tiles: a few rows of inputs with a panel of weights.
//
// A panel holds PANEL outputs, input by input, so that one vector instruction multiplies an input with several outputs.
// In 16 bits a word holds two of them: the low half output j, the high half output j + HALF. Widening to float32 is then
// one instruction per vector and needs no shuffle.
//
// A sum adds its products one by one, in the order of the inputs, whatever the number of rows and the instruction set's
// vector length: a row has the same bits in every batch.
#pragma once

#include <type_traits>

#include "tiles.h"
#if defined(__aarch64__)
#include "pairs_arm.h"
#endif

namespace weft {

#if defined(__aarch64__)
constexpr long SHORT_TURN = 64;  // inputs

// Up to four inputs of a column.
template <int ROWS>
inline float32x4_t load_column(const float* x) {
    if constexpr (ROWS == 3) return vcombine_f32(vld1_f32(x), vld1_dup_f32(x + 2));
    return vld1q_f32(x);
}

template <int LANE>
inline void add_row(float32x4_t* total, const float32x4_t* factor, float32x4_t x) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) total[j] = vfmaq_laneq_f32(total[j], factor[j], x, LANE);
}

// Sums of three rows or more with a tile. Inputs are loaded as vectors, and an instruction multiplies one lane of them.
// Compilers broadcast each input from memory instead, with the units that multiply.
template <int ROWS>
struct LaneSums {
    static_assert(TILE == 16 && ROWS >= 3 && ROWS <= 6);
    float32x4_t total[ROWS][4];

    inline __attribute__((always_inline)) LaneSums(const float* sums, bool begin) {
#pragma GCC unroll 32
        for (int k = 0; k < ROWS * 4; k++)
            total[k / 4][k % 4] = begin ? vdupq_n_f32(0) : vld1q_f32(sums + k / 4 * PANEL + 4 * (k % 4));
    }

    // Adds the products of one input.
    inline __attribute__((always_inline)) void add(const float* x, const float* from) {
        float32x4_t first = load_column<ROWS>(x), second = first;
        if constexpr (ROWS == 5) second = vcombine_f32(vld1_dup_f32(x + 4), vdup_n_f32(0));
        if constexpr (ROWS == 6) second = vcombine_f32(vld1_f32(x + 4), vdup_n_f32(0));
        float32x4_t factor[4] = {vld1q_f32(from), vld1q_f32(from + 4), vld1q_f32(from + 8), vld1q_f32(from + 12)};
        add_row<0>(total[0], factor, first);
        add_row<1>(total[1], factor, first);
        add_row<2>(total[2], factor, first);
        if constexpr (ROWS > 3) add_row<3>(total[3], factor, first);
        if constexpr (ROWS > 4) add_row<0>(total[4], factor, second);
        if constexpr (ROWS > 5) add_row<1>(total[5], factor, second);
    }

    inline __attribute__((always_inline)) void store(float* sums) const {
#pragma GCC unroll 32
        for (int k = 0; k < ROWS * 4; k++) vst1q_f32(sums + k / 4 * PANEL + 4 * (k % 4), total[k / 4][k % 4]);
    }
};

// Multiplies while other weights get ready. Inlined, it would run out of registers.
template <int ROWS, class Others>
__attribute__((noinline)) void add_lanes(const float* x, const float* weights, long count, float* sums, bool begin,
                                         Others others) {
    LaneSums<ROWS> found(sums, begin);
    for (long i = 0; i < count; i++, weights += PANEL, x += ROWS) {
        others.advance();
        found.add(x, weights);
    }
    found.store(sums);
}
#endif

struct AddPairs {
    const float* x;
    long stride;
    const Pair* weights;
    long count;
    float* sums;
    bool begin;
    template <int ROWS>
    void run() const {
#if defined(__aarch64__)
        add_few<ROWS>(x, weights, count, sums, begin);
#else
        if constexpr (ROWS <= UNPACKED)
            if (stride) return add_pairs<ROWS>(UnpackedInputs{x, stride}, weights, count, sums, begin);
        if constexpr (ROWS <= IN_PLACE) add_pairs<ROWS>(PackedInputs<ROWS>{x}, weights, count, sums, begin);
#endif
    }
};

template <int OUTPUTS, class Others = Nothing>
struct AddFloats {
    const float* x;
    long stride;
    const float* weights;
    long apart, count;
    float* sums;
    bool begin;
    Others others;
    template <int ROWS>
    void run() const {
        if constexpr (ROWS <= UNPACKED)
            if (stride) return add_floats<ROWS, OUTPUTS>(UnpackedInputs{x, stride}, weights, apart, count, sums, begin);
#if defined(__aarch64__)
        if constexpr (OUTPUTS == TILE && ROWS > 2)
            return add_lanes<ROWS>(x, weights, count, sums, begin, others);
#endif
        if constexpr (OUTPUTS == TILE || ROWS <= IN_PLACE)
            add_floats<ROWS, OUTPUTS>(PackedInputs<ROWS>{x}, weights, apart, count, sums, begin);
    }
};

#if defined(__aarch64__)
// Products of blocks of rows with `count` inputs of a panel of bfloat16 weights; sums are [rows, PANEL].
inline void multiply_inputs(const Rows& x, long from, long to, const Pair* weights, long i, long count, float* sums) {
    long row = x.first(from);
    for (long block = from; block < to; block++) {
        long first = x.first(block);
        float* here = sums + (first - row) * PANEL;
        with_rows(x.first(block + 1) - first, AddPairs{x.at(block, i), x.stride, weights, count, here, i == 0});
    }
}
#else
// Registers of a tile's weights for one input. Widened, the halves of a panel lie apart, each as [INPUTS, HALF].
constexpr int EACH = TILE / REGISTER;
constexpr long widened_place(int j) { return j * REGISTER / HALF * INPUTS * HALF + j * REGISTER % HALF; }

struct Widened {
    const float* wide;
    Lane at(long input, int j) const { return load_lane(wide + input * HALF + widened_place(j)); }
};

// The first rows to be multiplied widen the weights of a tile, for all others.
template <int NUMBER>
struct Widening {
    const Pair* weights;
    float* wide;
    Lane at(long input, int j) const {
        const Pair* from = weights + input * HALF + j * REGISTER % HALF;
        if (j == 0) __builtin_prefetch(from + FAR_AHEAD * HALF);
        Lane low, high;
        load_pairs(from, low, high);
        Lane value = NUMBER * TILE + j * REGISTER < HALF ? low : high;
        store_lane(wide + input * HALF + widened_place(j), value);
        return value;
    }
};

// Inputs between two requests for the next rows.
constexpr int STEPS = 4;

// Adds the products of one input; `total` stays in registers.
template <int ROWS, class Weights>
inline __attribute__((always_inline)) void add_input(Lane (&total)[ROWS][EACH], const float* x, Weights weights,
                                                     long input) {
    Lane factor[EACH];
#pragma GCC unroll 8
    for (int j = 0; j < EACH; j++) factor[j] = weights.at(input, j);
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
        for (int j = 0; j < EACH; j++) total[row][j] += factor[j] * x[row];
}

// A block of rows, packed.
struct TileRows {
    const float *x, *next;  // `next`: rows to be multiplied after these
    long count;
    float* sums;
    bool begin;
};

// Inlined, it would run out of registers.
template <int ROWS, class Weights>
__attribute__((noinline)) void add_tile(const TileRows& rows, Weights weights) {
    const float *x = rows.x, *next = rows.next;
    float* sums = rows.sums;
    Lane total[ROWS][EACH];
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
        for (int j = 0; j < EACH; j++)
            total[row][j] = rows.begin ? Lane{} : load_lane(sums + row * PANEL + j * REGISTER);
    long i = 0, count = rows.count;
    for (; i + STEPS <= count; i += STEPS, x += STEPS * ROWS, next += STEPS * ROWS) {
#pragma GCC unroll 4
        for (long at = 0; at < STEPS * ROWS; at += LINE / 4) __builtin_prefetch(next + at);
#pragma GCC unroll 4
        for (int step = 0; step < STEPS; step++) add_input(total, x + step * ROWS, weights, i + step);
    }
    for (; i < count; i++, x += ROWS) add_input(total, x, weights, i);
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
        for (int j = 0; j < EACH; j++) store_lane(sums + row * PANEL + j * REGISTER, total[row][j]);
}

template <class Weights>
struct AddTile {
    const TileRows& rows;
    Weights weights;
    template <int ROWS>
    void run() const {
        add_tile<ROWS>(rows, weights);
    }
};

// Products of blocks of rows with `count` inputs of a panel of bfloat16 weights, from the tile NUMBER on; sums are
// [rows, PANEL].
template <int NUMBER>
void multiply_tiles(const Rows& x, long from, long to, const Pair* weights, long i, long count, float* sums,
                    float* wide) {
    for (long block = from; block < to; block++) {
        long first = x.first(block), size = x.first(block + 1) - first;
        float* here = sums + (first - x.first(from)) * PANEL + NUMBER * TILE;
        TileRows rows{x.at(block, i), x.at(block + 1 < to ? block + 1 : from, i), count, here, i == 0};
        if (block == from)
            with_rows(size, AddTile<Widening<NUMBER>>{rows, {weights, wide}});
        else
            with_rows(size, AddTile<Widened>{rows, {wide}});
    }
    if constexpr ((NUMBER + 1) * TILE < PANEL) multiply_tiles<NUMBER + 1>(x, from, to, weights, i, count, sums, wide);
}

inline void multiply_inputs(const Rows& x, long from, long to, const Pair* weights, long i, long count, float* sums) {
    long rows = x.first(to) - x.first(from);
    if (to - from == 1 && rows <= IN_PLACE)
        return with_rows(rows, AddPairs{x.at(from, i), x.stride, weights, count, sums, i == 0});
    // Widened weights have the same place in a page as the weights. Otherwise processors take a load of weights for one
    // of what has just been stored, of which they compare the place in a page only, and wait.
    constexpr long PAGE = 4096;
    alignas(64) float room[INPUTS * TILE + PAGE / 4];
    long ahead = (reinterpret_cast<uintptr_t>(weights) - reinterpret_cast<uintptr_t>(room)) % PAGE / 4;
    multiply_tiles<0>(x, from, to, weights, i, count, sums, room + ahead);
}
#endif

// The same with float32 weights, [inputs, PANEL].
inline void multiply_inputs(const Rows& x, long from, long to, const float* weights, long i, long count, float* sums) {
    long row = x.first(from);
    if (to - from == 1 && x.first(to) - row <= IN_PLACE)
        return with_rows(x.first(to) - row,
                         AddFloats<PANEL>{x.at(from, i), x.stride, weights, PANEL, count, sums, i == 0, {}});
    for (long tile = 0; tile < PANEL / TILE; tile++)
        for (long block = from; block < to; block++) {
            long first = x.first(block), rows = x.first(block + 1) - first;
            float* here = sums + (first - row) * PANEL + tile * TILE;
            AddFloats<TILE> add{x.at(block, i), x.stride, weights + tile * TILE, PANEL, count, here, i == 0, {}};
            if (tile > 0 || block > from) {
                with_rows(rows, add);
                continue;
            }
            Later later{(const char*)(weights + AHEAD * PANEL)};
            with_rows(rows, AddFloats<TILE, Later>{add.x, x.stride, weights, PANEL, count, here, i == 0, later});
        }
}

// Products of blocks of rows with a panel.
template <class Weights>
void multiply(const Rows& x, long from, long to, const Weights* panel, float* sums) {
    constexpr long EACH_INPUT = std::is_same_v<Weights, Pair> ? HALF : PANEL;
    bool few = to - from == 1 && x.first(to) - x.first(from) <= IN_PLACE;
#if defined(__aarch64__)
    // One block of rows: short turns of both tiles, because only the first waits for memory.
    long step = few ? x.inputs : to - from > 1 ? INPUTS : std::is_same_v<Weights, float> ? SHORT_TURN : TWO_PASSES;
#else
    long step = few ? x.inputs : INPUTS;
#endif
    for (long i = 0; i < x.inputs; i += step)
        multiply_inputs(x, from, to, panel + i * EACH_INPUT, i, std::min(step, x.inputs - i), sums);
}

}  // namespace weft
