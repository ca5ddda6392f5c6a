// Matmul tiles: a few rows of inputs with a panel of weights.
//
// A panel holds PANEL outputs, input by input, so that one vector instruction multiplies an input with several outputs.
// In 16 bits a word holds two of them: the low half output j, the high half output j + HALF. Widening to float32 is then
// one instruction per vector and needs no shuffle.
//
// A sum adds its products one by one, in the order of the inputs, whatever the number of rows and the instruction set's
// vector length: a row has the same bits in every batch.
#pragma once

#include <algorithm>
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "vector.h"

namespace weft {

constexpr long PANEL = 32, HALF = PANEL / 2;

// WIDTH: floats of one register. MOST_ROWS: rows of a tile, as many as the sums of TILE outputs fit into registers.
// IN_PLACE: up to this number of rows the sums of a whole panel do, and weights are widened in registers.
#if defined(__AVX512F__)
constexpr int WIDTH = 16, MOST_ROWS = 12, IN_PLACE = 12, TILE = PANEL;
#elif defined(__AVX__)
constexpr int WIDTH = 8, MOST_ROWS = 6, IN_PLACE = 3, TILE = HALF;
#else
constexpr int WIDTH = 4, MOST_ROWS = 6, IN_PLACE = 3, TILE = HALF;
#endif
// Up to this number of rows inputs are read where they lie; more are packed.
constexpr int UNPACKED = 3;

// Inputs of a block: its weights, widened, stay in the first-level cache.
constexpr long INPUTS = 256;
// Whether all tiles of a panel do, beside the inputs of a block of rows, which are then read once for all tiles. ARM's
// larger cores have 64 kB of this cache, others often 32.
#if defined(__aarch64__)
constexpr bool BLOCK_BY_BLOCK = true;
constexpr int PAIRS_IN_PLACE = MOST_ROWS;
#else
constexpr bool BLOCK_BY_BLOCK = false;
constexpr int PAIRS_IN_PLACE = IN_PLACE;
#endif

// Weights to ask the memory for while others are multiplied, with the cache lines that an input has. Processors fetch
// ahead by themselves what is read line by line, but not the other half of a panel.
struct Later {
    const char* weights = nullptr;
    int lines = 0;
};
constexpr long LINE = 64, AHEAD = 8;

using Lane = float __attribute__((vector_size(WIDTH * 4)));
using Words = uint32_t __attribute__((vector_size(WIDTH * 4)));

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
                total[row][j] = begin ? Lane{} : load_lane(sums + row * PANEL + j * WIDTH);
    }

    void store(float* sums) const {
        for (int row = 0; row < ROWS; row++)
            for (int j = 0; j < VECTORS; j++) store_lane(sums + row * PANEL + j * WIDTH, total[row][j]);
    }
};

// Inputs of one tile, by input and row.
template <int ROWS>
struct PackedInputs {
    const float* x;  // [inputs, ROWS]
    float at(long input, int row) const { return x[input * ROWS + row]; }
};

struct UnpackedInputs {
    const float* x;  // [rows, stride]
    long stride;
    float at(long input, int row) const { return x[row * stride + input]; }
};

// Weights lie as [count, HALF] pairs.
template <int ROWS, class Inputs>
void add_pairs(Inputs x, const Pair* weights, long count, float* sums, bool begin) {
    constexpr int EACH = HALF / WIDTH;
    Sums<ROWS, 2 * EACH> found(sums, begin);
    for (long i = 0; i < count; i++, weights += HALF)
#pragma GCC unroll 8
        for (int j = 0; j < EACH; j++) {
            Lane low, high;
            load_pairs(weights + j * WIDTH, low, high);
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; row++) {
                found.total[row][j] += low * x.at(i, row);
                found.total[row][EACH + j] += high * x.at(i, row);
            }
        }
    found.store(sums);
}

// Weights lie as [count, stride] floats, of which OUTPUTS are used.
template <int ROWS, int OUTPUTS, class Inputs>
void add_floats(Inputs x, const float* weights, long stride, long count, float* sums, bool begin) {
    constexpr int EACH = OUTPUTS / WIDTH;
    Sums<ROWS, EACH> found(sums, begin);
    for (long i = 0; i < count; i++, weights += stride) {
        Lane factor[EACH];
#pragma GCC unroll 8
        for (int j = 0; j < EACH; j++) factor[j] = load_lane(weights + j * WIDTH);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
            for (int j = 0; j < EACH; j++) found.total[row][j] += factor[j] * x.at(i, row);
    }
    found.store(sums);
}

#if defined(__aarch64__)
// Four rows or more: inputs are loaded as vectors, and an instruction multiplies one lane of them. Compilers broadcast
// each input from memory instead, with the units that multiply.
template <int LANE>
inline void add_row(float32x4_t* total, const float32x4_t* factor, float32x4_t x) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) total[j] = vfmaq_laneq_f32(total[j], factor[j], x, LANE);
}

// Four weights of a tile: floats, or one half of as many pairs.
template <bool HIGH>
inline float32x4_t load_four(const float* from) {
    return vld1q_f32(from);
}

template <bool HIGH>
inline float32x4_t load_four(const Pair* from) {
    uint32x4_t both = vld1q_u32(&from->bits);
    return vreinterpretq_f32_u32(HIGH ? vandq_u32(both, vdupq_n_u32(0xffff0000u)) : vshlq_n_u32(both, 16));
}

template <int ROWS, bool HIGH, class Weight>
void add_lanes(const float* x, const Weight* weights, long stride, long count, float* sums, bool begin, Later later) {
    static_assert(TILE == 16 && ROWS >= 4 && ROWS <= 6);
    float32x4_t total[ROWS][4];
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) total[row][j] = begin ? vdupq_n_f32(0) : vld1q_f32(sums + row * PANEL + 4 * j);
    for (long i = 0; i < count; i++, weights += stride, x += ROWS) {
        float32x4_t factor[4] = {load_four<HIGH>(weights), load_four<HIGH>(weights + 4), load_four<HIGH>(weights + 8),
                                 load_four<HIGH>(weights + 12)};
        for (int line = 0; line < later.lines; line++) __builtin_prefetch(later.weights + line * LINE);
        later.weights += later.lines * LINE;
        float32x4_t four = vld1q_f32(x);
        add_row<0>(total[0], factor, four);
        add_row<1>(total[1], factor, four);
        add_row<2>(total[2], factor, four);
        add_row<3>(total[3], factor, four);
        if constexpr (ROWS == 5) add_row<0>(total[4], factor, vcombine_f32(vld1_dup_f32(x + 4), vdup_n_f32(0)));
        if constexpr (ROWS == 6) {
            float32x4_t two = vcombine_f32(vld1_f32(x + 4), vdup_n_f32(0));
            add_row<0>(total[4], factor, two);
            add_row<1>(total[5], factor, two);
        }
    }
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) vst1q_f32(sums + row * PANEL + 4 * j, total[row][j]);
}
#endif

// Calls body.template run<rows>().
template <int ROWS = MOST_ROWS, class Body>
inline void with_rows(long rows, const Body& body) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return with_rows<ROWS - 1>(rows, body);
    body.template run<ROWS>();
}

struct AddPairs {
    const float* x;
    long stride;
    const Pair* weights;
    long count;
    float* sums;
    bool begin;
    template <int ROWS>
    void run() const {
        if constexpr (ROWS <= UNPACKED)
            if (stride) return add_pairs<ROWS>(UnpackedInputs{x, stride}, weights, count, sums, begin);
#if defined(__aarch64__)
        if constexpr (ROWS > UNPACKED) {
            add_lanes<ROWS, false>(x, weights, HALF, count, sums, begin, {});
            return add_lanes<ROWS, true>(x, weights, HALF, count, sums + HALF, begin, {});
        }
#endif
        if constexpr (ROWS <= IN_PLACE) add_pairs<ROWS>(PackedInputs<ROWS>{x}, weights, count, sums, begin);
    }
};

template <int OUTPUTS>
struct AddFloats {
    const float* x;
    long stride;
    const float* weights;
    long apart, count;
    float* sums;
    bool begin;
    Later later;
    template <int ROWS>
    void run() const {
        if constexpr (ROWS <= UNPACKED)
            if (stride) return add_floats<ROWS, OUTPUTS>(UnpackedInputs{x, stride}, weights, apart, count, sums, begin);
#if defined(__aarch64__)
        if constexpr (OUTPUTS == TILE && ROWS > UNPACKED)
            return add_lanes<ROWS, false>(x, weights, apart, count, sums, begin, later);
#endif
        if constexpr (OUTPUTS == TILE || ROWS <= IN_PLACE)
            add_floats<ROWS, OUTPUTS>(PackedInputs<ROWS>{x}, weights, apart, count, sums, begin);
    }
};

// Rows of inputs as tiles read them: in blocks of up to MOST_ROWS rows, of about the same number.
struct Rows {
    const float* values;
    long rows, inputs;
    long stride;  // of rows; 0: blocks are packed, each as [inputs, rows]

    static bool are_packed(long rows) { return rows > UNPACKED; }
    long blocks() const { return (rows + MOST_ROWS - 1) / MOST_ROWS; }
    long first(long block) const { return block * rows / blocks(); }
    const float* at(long block, long input) const {
        if (stride) return values + input;
        long here = first(block);
        return values + here * inputs + input * (first(block + 1) - here);
    }
};

template <class Value>
struct PackBlock {
    const Value* x;
    long stride, inputs;
    float* to;
    template <int ROWS>
    void run() const {
        for (long i = 0; i < inputs; i++)
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; row++) to[i * ROWS + row] = read(x + row * stride + i);
    }
};

template <class Value>
void pack_block(const Value* x, long stride, const Rows& rows, long block, float* to) {
    long here = rows.first(block);
    with_rows(rows.first(block + 1) - here,
              PackBlock<Value>{x + here * stride, stride, rows.inputs, to + here * rows.inputs});
}

// Products of blocks of rows with a panel of bfloat16 weights; sums are [rows, PANEL].
inline void multiply(const Rows& x, long from, long to, const Pair* panel, float* sums) {
    alignas(64) float wide[INPUTS * PANEL];
    long row = x.first(from);
    bool in_place = to - from == 1 && x.first(to) - row <= PAIRS_IN_PLACE;
    for (long i = 0; i < x.inputs; i += INPUTS) {
        long count = std::min(INPUTS, x.inputs - i);
        const Pair* weights = panel + i * HALF;
        if (in_place) {
            with_rows(x.first(to) - row, AddPairs{x.at(from, i), x.stride, weights, count, sums, i == 0});
            continue;
        }
        // Tiles of TILE outputs, each [count, TILE].
        for (long k = 0; k < count; k++)
            for (int j = 0; j < HALF; j += WIDTH) {
                Lane low, high;
                load_pairs(weights + k * HALF + j, low, high);
                store_lane(wide + k * TILE + j, low);
                store_lane(wide + (TILE == PANEL ? k * TILE + HALF : (INPUTS + k) * TILE) + j, high);
            }
        constexpr long TILES = PANEL / TILE;
        for (long piece = 0; piece < TILES * (to - from); piece++) {
            long tile = BLOCK_BY_BLOCK ? piece % TILES : piece / (to - from);
            long block = from + (BLOCK_BY_BLOCK ? piece / TILES : piece % (to - from)), first = x.first(block);
            float* here = sums + (first - row) * PANEL + tile * TILE;
            with_rows(x.first(block + 1) - first, AddFloats<TILE>{x.at(block, i), x.stride, wide + tile * INPUTS * TILE,
                                                                  TILE, count, here, i == 0, {}});
        }
    }
}

// The same with float32 weights, [inputs, PANEL].
inline void multiply(const Rows& x, long from, long to, const float* panel, float* sums) {
    long row = x.first(from);
    bool whole = to - from == 1 && x.first(to) - row <= IN_PLACE;
    for (long i = 0; i < x.inputs; i += INPUTS) {
        long count = std::min(INPUTS, x.inputs - i);
        const float* weights = panel + i * PANEL;
        if (whole) {
            with_rows(x.first(to) - row,
                      AddFloats<PANEL>{x.at(from, i), x.stride, weights, PANEL, count, sums, i == 0, {}});
            continue;
        }
        for (long tile = 0; tile < PANEL / TILE; tile++)
            for (long block = from; block < to; block++) {
                long first = x.first(block);
                float* here = sums + (first - row) * PANEL + tile * TILE;
                Later next;
                if (tile == 0 && block == from) next = {(const char*)(weights + AHEAD * PANEL), 2};
                with_rows(x.first(block + 1) - first, AddFloats<TILE>{x.at(block, i), x.stride, weights + tile * TILE,
                                                                      PANEL, count, here, i == 0, next});
            }
    }
}

}  // namespace weft
