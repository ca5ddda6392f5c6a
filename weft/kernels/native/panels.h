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
#include <type_traits>
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "rows.h"

namespace weft {

// Bytes of a cache line, and inputs by which weights are asked for ahead, in the first-level cache and in the second.
constexpr long LINE = 64, AHEAD = 8, FAR_AHEAD = 32;

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

// Weights lie as [count, HALF] pairs.
template <int ROWS, class Inputs>
void add_pairs(Inputs x, const Pair* weights, long count, float* sums, bool begin) {
    constexpr int EACH = HALF / REGISTER;
    Sums<ROWS, 2 * EACH> found(sums, begin);
    for (long i = 0; i < count; i++, weights += HALF)
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
    found.store(sums);
}

// Weights lie as [count, stride] floats, of which OUTPUTS are used.
template <int ROWS, int OUTPUTS, class Inputs>
void add_floats(Inputs x, const float* weights, long stride, long count, float* sums, bool begin) {
    constexpr int EACH = OUTPUTS / REGISTER;
    Sums<ROWS, EACH> found(sums, begin);
    for (long i = 0; i < count; i++, weights += stride) {
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

#if defined(__aarch64__)
// Inputs are loaded as vectors, and an instruction multiplies one lane of them. Compilers broadcast each input from
// memory instead, with the units that multiply.
//
// Weights are widened by the integer units and read back DELAY inputs later, because the vector units multiply all the
// time. To widen a vector there costs a Neoverse-N1 two multiplications: a result after two cycles is written together
// with that of a multiplication, which takes four.
constexpr long DELAY = 4;
// If no other rows will use them, there are only two places for them: with constant addresses, the loop has fewer
// instructions, of which a Neoverse-N1 begins four a cycle.
constexpr int PLACES = 2;
constexpr long SHORT_TURN = 64;  // inputs

// Widens one half of two adjacent pairs. As assembly: compilers would make vectors of it.
template <bool HIGH>
inline uint64_t widened(uint64_t pairs) {
    constexpr uint64_t halves = 0xffff0000ffff0000;
    uint64_t wide;
    if constexpr (HIGH)
        asm("and %0, %1, %2" : "=r"(wide) : "r"(halves), "r"(pairs));
    else
        asm("and %0, %1, %2, lsl 16" : "=r"(wide) : "r"(halves), "r"(pairs));
    return wide;
}

// Widens the weights of one input, to PANEL floats: the lower half of the outputs, the upper or both.
template <bool LOW, bool HIGH>
inline __attribute__((always_inline)) void widen(const Pair* from, float* to) {
#pragma GCC unroll 4
    for (int j = 0; j < HALF; j += 4) {
        uint64_t pairs[2];
        std::memcpy(pairs, from + j, sizeof(pairs));
        uint64_t low[2] = {widened<false>(pairs[0]), widened<false>(pairs[1])};
        uint64_t high[2] = {widened<true>(pairs[0]), widened<true>(pairs[1])};
        if (LOW) std::memcpy(to + j, low, sizeof(low));
        if (HIGH) std::memcpy(to + HALF + j, high, sizeof(high));
    }
}

// Asks for weights that the lower half, or both, will be the first to read.
template <bool LOW, bool HIGH>
inline void ask_ahead(const Pair* from) {
    if (LOW) __builtin_prefetch(from + AHEAD * HALF);
    if (LOW && !HIGH) __builtin_prefetch(from + FAR_AHEAD * HALF, 0, 2);
}

// Widens the weights of one input after the other, to [count, PANEL].
template <bool LOW, bool HIGH>
struct Widening {
    const Pair* from;
    float* to;

    void advance() {
        ask_ahead<LOW, HIGH>(from);
        widen<LOW, HIGH>(from, to);
        from += HALF;
        to += PANEL;
    }
};

// Up to four inputs of a column. `inside`: another column follows, of which one may be read.
template <int ROWS>
inline float32x4_t load_column(const float* x, bool inside) {
    if constexpr (ROWS == 2) return vcombine_f32(vld1_f32(x), vdup_n_f32(0));
    if (ROWS == 3 && !inside) return vcombine_f32(vld1_f32(x), vld1_dup_f32(x + 2));
    return vld1q_f32(x);
}

template <int LANE>
inline void add_row(float32x4_t* total, const float32x4_t* factor, float32x4_t x) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) total[j] = vfmaq_laneq_f32(total[j], factor[j], x, LANE);
}

// Sums of two rows or more.
template <int ROWS, int OUTPUTS>
struct LaneSums {
    static_assert(OUTPUTS % 16 == 0 && ROWS >= 2 && ROWS <= 6 && ROWS * OUTPUTS <= 96);
    static constexpr int EACH = OUTPUTS / 4;
    float32x4_t total[ROWS][EACH];

    inline __attribute__((always_inline)) LaneSums(const float* sums, bool begin) {
#pragma GCC unroll 32
        for (int k = 0; k < ROWS * EACH; k++)
            total[k / EACH][k % EACH] = begin ? vdupq_n_f32(0) : vld1q_f32(sums + k / EACH * PANEL + 4 * (k % EACH));
    }

    // Adds the products of one input.
    template <bool INSIDE>
    inline __attribute__((always_inline)) void add(const float* x, const float* weights) {
        float32x4_t first = load_column<ROWS>(x, INSIDE), second = first;
        if constexpr (ROWS == 5) second = vcombine_f32(vld1_dup_f32(x + 4), vdup_n_f32(0));
        if constexpr (ROWS == 6) second = vcombine_f32(vld1_f32(x + 4), vdup_n_f32(0));
#pragma GCC unroll 2
        for (int j = 0; j < EACH; j += 4) {
            const float* from = weights + 4 * j;
            float32x4_t factor[4] = {vld1q_f32(from), vld1q_f32(from + 4), vld1q_f32(from + 8), vld1q_f32(from + 12)};
            add_row<0>(total[0] + j, factor, first);
            add_row<1>(total[1] + j, factor, first);
            if constexpr (ROWS > 2) add_row<2>(total[2] + j, factor, first);
            if constexpr (ROWS > 3) add_row<3>(total[3] + j, factor, first);
            if constexpr (ROWS > 4) add_row<0>(total[4] + j, factor, second);
            if constexpr (ROWS > 5) add_row<1>(total[5] + j, factor, second);
        }
    }

    inline __attribute__((always_inline)) void store(float* sums) const {
#pragma GCC unroll 32
        for (int k = 0; k < ROWS * EACH; k++)
            vst1q_f32(sums + k / EACH * PANEL + 4 * (k % EACH), total[k / EACH][k % EACH]);
    }
};

// Multiplies while other weights get ready. Inlined, it would run out of registers.
template <int ROWS, int OUTPUTS, bool INSIDE, class Others>
__attribute__((noinline)) void add_lanes(const float* x, const float* weights, long stride, long count, float* sums,
                                         bool begin, Others others) {
    LaneSums<ROWS, OUTPUTS> found(sums, begin);
    for (long i = 0; i < count; i++, weights += stride, x += ROWS) {
        others.advance();
        found.template add<INSIDE>(x, weights);
    }
    found.store(sums);
}

// Multiplies with some outputs of pairs, for which there are no other rows.
template <int ROWS, int OUTPUTS, bool LOW, bool HIGH>
__attribute__((noinline)) void add_passing(const float* x, const Pair* weights, long count, float* sums, bool begin) {
    alignas(64) float wide[PLACES * PANEL];
    const float* from = LOW ? wide : wide + HALF;
    sums += LOW ? 0 : HALF;
    LaneSums<ROWS, OUTPUTS> found(sums, begin);
    for (long i = 0; i < std::min<long>(PLACES, count); i++) widen<LOW, HIGH>(weights + i * HALF, wide + i * PANEL);
    long i = 0;
    for (; i + 2 * PLACES <= count; i += PLACES, weights += PLACES * HALF, x += PLACES * ROWS)
#pragma GCC unroll 4
        for (int place = 0; place < PLACES; place++) {
            ask_ahead<LOW, HIGH>(weights + place * HALF);
            found.template add<true>(x + place * ROWS, from + place * PANEL);
            widen<LOW, HIGH>(weights + (PLACES + place) * HALF, wide + place * PANEL);
        }
    for (long place = 0; i < count; i++, place = (place + 1) % PLACES, weights += HALF, x += ROWS) {
        found.template add<false>(x, from + place * PANEL);
        if (i + PLACES < count) widen<LOW, HIGH>(weights + PLACES * HALF, wide + place * PANEL);
    }
    found.store(sums);
}

// Multiplies with some outputs of pairs, whose weights stay in `wide`.
template <int ROWS, int OUTPUTS, bool LOW, bool HIGH>
void add_widening(const float* x, const Pair* weights, long count, float* sums, bool begin, float* wide) {
    long ahead = std::min(DELAY, count), most = count - ahead;
    Widening<LOW, HIGH> widening{weights, wide};
    for (long i = 0; i < ahead; i++) widening.advance();
    if (!LOW) sums += HALF, wide += HALF;
    add_lanes<ROWS, OUTPUTS, true>(x, wide, PANEL, most, sums, begin, widening);
    add_lanes<ROWS, OUTPUTS, false>(x + most * ROWS, wide + most * PANEL, PANEL, ahead, sums, begin && most == 0,
                                    Nothing{});
}
#endif

struct AddPairs {
    const float* x;
    long stride;
    const Pair* weights;
    long count;
    float* sums;
    bool begin;
    float* wide;  // ARM leaves widened weights here if they are `kept` for other rows
    bool kept;
    template <int ROWS>
    void run() const {
#if defined(__aarch64__)
        if constexpr (ROWS > 3) {
            if (!kept) {
                add_passing<ROWS, HALF, true, false>(x, weights, count, sums, begin);
                return add_passing<ROWS, HALF, false, true>(x, weights, count, sums, begin);
            }
            add_widening<ROWS, HALF, true, false>(x, weights, count, sums, begin, wide);
            return add_widening<ROWS, HALF, false, true>(x, weights, count, sums, begin, wide);
        }
        if constexpr (ROWS == 2 || ROWS == 3)
            return add_widening<ROWS, PANEL, true, true>(x, weights, count, sums, begin, wide);
#endif
        if constexpr (ROWS <= UNPACKED)
            if (stride) return add_pairs<ROWS>(UnpackedInputs{x, stride}, weights, count, sums, begin);
        if constexpr (ROWS <= IN_PLACE) add_pairs<ROWS>(PackedInputs<ROWS>{x}, weights, count, sums, begin);
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
            return add_lanes<ROWS, TILE, false>(x, weights, apart, count, sums, begin, others);
#endif
        if constexpr (OUTPUTS == TILE || ROWS <= IN_PLACE)
            add_floats<ROWS, OUTPUTS>(PackedInputs<ROWS>{x}, weights, apart, count, sums, begin);
    }
};

#if defined(__aarch64__)
// Products of blocks of rows with `count` inputs of a panel of bfloat16 weights; sums are [rows, PANEL].
inline void multiply_inputs(const Rows& x, long from, long to, const Pair* weights, long i, long count, float* sums) {
    alignas(64) float wide[INPUTS * PANEL];
    constexpr long TILES = PANEL / TILE;
    long row = x.first(from), next = from + 1;
    with_rows(x.first(next) - row, AddPairs{x.at(from, i), x.stride, weights, count, sums, i == 0, wide, to > next});
    for (long piece = 0; piece < TILES * (to - next); piece++) {
        // Beside the inputs of a block of rows, all tiles of a panel stay in the first-level cache of ARM's larger
        // cores, which have 64 kB of it.
        long tile = piece % TILES, block = next + piece / TILES, first = x.first(block);
        float* here = sums + (first - row) * PANEL + tile * TILE;
        with_rows(x.first(block + 1) - first,
                  AddFloats<TILE>{x.at(block, i), x.stride, wide + tile * TILE, PANEL, count, here, i == 0, {}});
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
        return with_rows(rows, AddPairs{x.at(from, i), x.stride, weights, count, sums, i == 0, nullptr, false});
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
    // Float32 weights of one block of rows: short turns of both tiles, because only the first waits for memory.
    bool short_turns = std::is_same_v<Weights, float> && to - from == 1 && !few;
    long step = short_turns ? SHORT_TURN : INPUTS;
#else
    long step = few ? x.inputs : INPUTS;
#endif
    for (long i = 0; i < x.inputs; i += step)
        multiply_inputs(x, from, to, panel + i * EACH_INPUT, i, std::min(step, x.inputs - i), sums);
}

}  // namespace weft
