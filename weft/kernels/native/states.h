// States as they are stored: floats, bfloat16, or integers with a scale for some lines of a column
// (`weft/kernels/states.py` defines them). Sums and new states are computed of floats.
#pragma once

#include "closing.h"

namespace weft {

constexpr long FLOATS = 0, BRAINS = 1, CODES = 2;
// Lines of a column that share a scale, the largest code, and the least scale whose inverse is used.
constexpr long SCALED = 32;
constexpr float LARGEST = 127.0f, LEAST_SCALE = 0x1p-100f;
// Columns that are widened at a time, so that they stay in a core's own cache.
constexpr long WIDENED = 64;

// Columns of a matrix in a slot; lines, of scales too, lie `stride` apart.
struct State {
    char* numbers;
    Brain* scales;
    long stride, kind;

    const float* floats(long line, long column) const {
        return reinterpret_cast<const float*>(numbers) + line * stride + column;
    }
    Brain* brains(long line, long column) const {
        return reinterpret_cast<Brain*>(numbers) + line * stride + column;
    }
    int8_t* codes(long line, long column) const {
        return reinterpret_cast<int8_t*>(numbers) + line * stride + column;
    }
    // The same state from a line on that begins a scale.
    State from(long line) const {
        long size = kind == FLOATS ? 4 : kind == BRAINS ? 2 : 1;
        return {numbers + line * stride * size, scales ? scales + line / SCALED * stride : nullptr, stride, kind};
    }
};

// All states of a layer, each of matrices.
struct States {
    char* numbers;
    Brain* scales;
    int64_t stride, scales_stride, kind;

    State at(long slot, long matrix, long lines, long width, long column) const {
        long place = slot * stride + matrix * lines * width + column;
        long scale = slot * scales_stride + matrix * ((lines + SCALED - 1) / SCALED) * width + column;
        long size = kind == FLOATS ? 4 : kind == BRAINS ? 2 : 1;
        return {numbers + place * size, scales ? scales + scale : nullptr, width, kind};
    }
};

inline Vector load_codes(const int8_t* from, long count) {
    using Bytes = int8_t __attribute__((vector_size(LANES)));
    Bytes bytes = {};
    std::memcpy(&bytes, from, std::min(count, LANES));
    return __builtin_convertvector(__builtin_convertvector(bytes, Integers), Vector);
}

// Some columns as floats, in lines that lie `stride` apart.
inline void widen(const State& state, long lines, long column, long columns, float* to, long stride) {
    for (long line = 0; line < lines; line++)
        for (long c = 0; c < columns; c += LANES) {
            long count = columns - c, at = column + c;
            Vector value = state.kind == BRAINS
                               ? load(state.brains(line, at), count)
                               : load_codes(state.codes(line, at), count) *
                                     load(state.scales + line / SCALED * state.stride + at, count);
            store(to + line * stride + c, value, count);
        }
}

// As `add_rows`, of the lines of a state.
template <int SUMS>
inline void add_lines(float* const (&sums)[SUMS], const float* const (&weights)[SUMS], const State& state, long lines,
                      long columns) {
    if (state.kind == FLOATS)
        return add_rows<SUMS>(sums, weights, state.floats(0, 0), state.stride, lines, columns);
    alignas(64) float wide[MOST_SIZE * WIDENED];
    for (long column = 0; column < columns; column += WIDENED) {
        long count = std::min(WIDENED, columns - column);
        widen(state, lines, column, count, wide, WIDENED);
        float* some[SUMS];
        for (int s = 0; s < SUMS; s++) some[s] = sums[s] + column;
        add_rows<SUMS>(some, weights, wide, WIDENED, lines, count);
    }
}

// The codes of up to SCALED lines, from `line` on, of up to LANES columns, and their scales.
inline void encode(const float* from, long stride, const State& to, long line, long lines, long column, long count) {
    float values[SCALED][LANES], inverse[LANES];
    // Of what is no number the bits are the largest.
    uint32_t largest[LANES] = {};
    for (long i = 0; i < lines; i++) {
        store(values[i], load(from + i * stride, count));
        for (long lane = 0; lane < LANES; lane++) {
            uint32_t bits;
            std::memcpy(&bits, &values[i][lane], 4);
            largest[lane] = std::max(largest[lane], bits & 0x7fffffff);
        }
    }
    for (long lane = 0; lane < LANES; lane++) {
        float most;
        std::memcpy(&most, &largest[lane], 4);
        Brain scale;
        write(&scale, most / LARGEST);
        float used = read(&scale);
        inverse[lane] = used >= LEAST_SCALE && used < INFINITY ? 1.0f / used : 0.0f;
        if (lane < count) to.scales[line / SCALED * to.stride + column + lane] = scale;
    }
    for (long i = 0; i < lines; i++)
        for (long lane = 0; lane < std::min(count, LANES); lane++) {
            float code = std::rint(values[i][lane] * inverse[lane]);
            *to.codes(line + i, column + lane) = code == code ? int8_t(code) : int8_t(0);
        }
}

// Store columns of a state; `from` lies in lines of as many.
inline void narrow(const float* from, const State& to, long lines, long columns) {
    for (long line = 0; line < lines; line += SCALED)
        for (long c = 0; c < columns; c += LANES) {
            long count = columns - c, some = std::min(SCALED, lines - line);
            const float* here = from + line * columns + c;
            if (to.kind == CODES)
                encode(here, columns, to, line, some, c, count);
            else
                for (long i = 0; i < some; i++) store(to.brains(line + i, c), load(here + i * columns, count), count);
        }
}

// What `close_cell` adds to a state.
struct Cell {
    OpenCell keys, values;
    const float* new_key;
    long tokens;
};

// Write the state after a cell's last token; `before` is null in a sequence's first cell.
template <class Decay>
inline void close_state(const State* before, const State& behind, long lines, long columns, const Cell& cell,
                        const Decay& decay) {
    if (behind.kind == FLOATS) {
        float* to = reinterpret_cast<float*>(behind.numbers);
        return close_cell({before ? before->floats(0, 0) : nullptr, to, behind.stride, lines, columns, cell.keys,
                           cell.values, cell.new_key, cell.tokens},
                          decay);
    }
    alignas(64) float wide[SCALED * MOST_SIZE];
    for (long line = 0; line < lines; line += SCALED) {
        long some = std::min(SCALED, lines - line);
        if (before) widen(before->from(line), some, 0, columns, wide, columns);
        close_cell({before ? wide : nullptr, wide, columns, some, columns, cell.keys.from(line), cell.values,
                    cell.new_key + line, cell.tokens},
                   decay.from(line));
        narrow(wide, behind.from(line), some, columns);
    }
}

}  // namespace weft
