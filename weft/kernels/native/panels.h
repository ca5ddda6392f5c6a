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

#include "vector.h"

namespace weft {

constexpr long PANEL = 32, HALF = PANEL / 2;

// WIDTH: floats of one register. MOST_ROWS: rows of a tile, as many as the sums of a tile's outputs fit into registers.
// IN_PLACE: up to this number of rows the sums of a whole panel do, and weights are widened in registers.
#if defined(__AVX512F__)
constexpr int WIDTH = 16, MOST_ROWS = 12, IN_PLACE = 12, TILE = PANEL;
#elif defined(__AVX__)
constexpr int WIDTH = 8, MOST_ROWS = 6, IN_PLACE = 3, TILE = HALF;
#else
constexpr int WIDTH = 4, MOST_ROWS = 6, IN_PLACE = 3, TILE = HALF;
#endif

// Inputs of a block: its weights, widened, stay in the first-level cache.
constexpr long INPUTS = 256;

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

// Inputs lie as [count, ROWS], weights as [count, HALF] pairs.
template <int ROWS>
void add_pairs(const float* x, const Pair* weights, long count, float* sums, bool begin) {
    constexpr int EACH = HALF / WIDTH;
    Sums<ROWS, 2 * EACH> found(sums, begin);
    for (long i = 0; i < count; i++, x += ROWS, weights += HALF)
#pragma GCC unroll 8
        for (int j = 0; j < EACH; j++) {
            Lane low, high;
            load_pairs(weights + j * WIDTH, low, high);
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; row++) {
                found.total[row][j] += low * x[row];
                found.total[row][EACH + j] += high * x[row];
            }
        }
    found.store(sums);
}

// Weights lie as [count, stride] floats, of which OUTPUTS are used.
template <int ROWS, int OUTPUTS>
void add_floats(const float* x, const float* weights, long stride, long count, float* sums, bool begin) {
    constexpr int EACH = OUTPUTS / WIDTH;
    Sums<ROWS, EACH> found(sums, begin);
    for (long i = 0; i < count; i++, x += ROWS, weights += stride) {
        Lane factor[EACH];
#pragma GCC unroll 8
        for (int j = 0; j < EACH; j++) factor[j] = load_lane(weights + j * WIDTH);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
            for (int j = 0; j < EACH; j++) found.total[row][j] += factor[j] * x[row];
    }
    found.store(sums);
}

// Calls body.template run<rows>().
template <int ROWS = MOST_ROWS, class Body>
inline void with_rows(long rows, const Body& body) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return with_rows<ROWS - 1>(rows, body);
    body.template run<ROWS>();
}

struct AddPairs {
    const float* x;
    const Pair* weights;
    long count;
    float* sums;
    bool begin;
    template <int ROWS>
    void run() const {
        if constexpr (ROWS <= IN_PLACE) add_pairs<ROWS>(x, weights, count, sums, begin);
    }
};

// A whole panel of floats; `apart` is the distance between its tiles.
struct AddFloats {
    const float *x, *weights;
    long stride, apart, count;
    float* sums;
    bool begin;
    template <int ROWS>
    void run() const {
        if constexpr (ROWS <= IN_PLACE && TILE < PANEL)
            if (stride == PANEL) return add_floats<ROWS, PANEL>(x, weights, stride, count, sums, begin);
        for (long tile = 0; tile < PANEL / TILE; tile++)
            add_floats<ROWS, TILE>(x, weights + tile * apart, stride, count, sums + tile * TILE, begin);
    }
};

// Rows of inputs as tiles read them: in blocks of up to MOST_ROWS rows of about the same number, each [inputs, rows].
struct Rows {
    const float* packed;
    long rows, inputs;

    long blocks() const { return (rows + MOST_ROWS - 1) / MOST_ROWS; }
    long first(long block) const { return block * rows / blocks(); }
    const float* at(long block, long input) const {
        long here = first(block);
        return packed + here * inputs + input * (first(block + 1) - here);
    }
};

template <class Value>
void pack_block(const Value* x, long stride, const Rows& rows, long block) {
    long here = rows.first(block), count = rows.first(block + 1) - here;
    float* to = const_cast<float*>(rows.at(block, 0));
    for (long row = 0; row < count; row++) {
        const Value* from = x + (here + row) * stride;
        for (long i = 0; i < rows.inputs; i++) to[i * count + row] = read(from + i);
    }
}

// Products of blocks of rows with a panel of bfloat16 weights; sums are [rows, PANEL].
inline void multiply(const Rows& x, long from, long to, const Pair* panel, float* sums) {
    alignas(64) float wide[INPUTS * PANEL];
    long row = x.first(from);
    bool in_place = to - from == 1 && x.first(to) - row <= IN_PLACE;
    for (long i = 0; i < x.inputs; i += INPUTS) {
        long count = std::min(INPUTS, x.inputs - i);
        const Pair* weights = panel + i * HALF;
        if (in_place) {
            with_rows(x.first(to) - row, AddPairs{x.at(from, i), weights, count, sums, i == 0});
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
        for (long block = from; block < to; block++) {
            long first = x.first(block);
            with_rows(x.first(block + 1) - first, AddFloats{x.at(block, i), wide, TILE, INPUTS * TILE, count,
                                                            sums + (first - row) * PANEL, i == 0});
        }
    }
}

// The same with float32 weights, [inputs, PANEL].
inline void multiply(const Rows& x, long from, long to, const float* panel, float* sums) {
    long row = x.first(from);
    for (long i = 0; i < x.inputs; i += INPUTS) {
        long count = std::min(INPUTS, x.inputs - i);
        for (long block = from; block < to; block++) {
            long first = x.first(block);
            with_rows(x.first(block + 1) - first, AddFloats{x.at(block, i), panel + i * PANEL, PANEL, TILE, count,
                                                            sums + (first - row) * PANEL, i == 0});
        }
    }
}

}  // namespace weft
