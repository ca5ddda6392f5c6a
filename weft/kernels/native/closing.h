// The state after a cell's last token: the decayed state before the cell, plus each token's contribution.
#pragma once

#include "tails.h"

namespace weft {

// Lines of a state that are summed together, so that a value is loaded once for all of them.
constexpr long LINES = 8;

// state'[line][column] = through * state[line][column] + sum of since[token] * key[token][line] * value[token][column]
// where a `Decay` says what `through` and `since` are.
struct Closing {
    const float* before;  // null in a sequence's first cell
    float* behind;
    long stride, lines, columns;
    OpenCell keys, values;
    const float* new_key;  // of the last token: another thread may still be writing it to the tail
    long tokens;
};

// The same decay for all lines.
struct OneDecay {
    const float* since;
    float all_lines;

    float through(long) const { return all_lines; }
    OneDecay from(long) const { return *this; }

    template <int COUNT>
    void weigh(long token, long, const float* key, float* weights) const {
        for (int i = 0; i < COUNT; i++) weights[i] = since[token] * key[i];
    }
};

// A decay for each line: `total` and its exponential, and the decays up to each token.
struct LineDecays {
    const float *total, *exponentials;
    OpenCell decay;

    float through(long line) const { return exponentials[line]; }
    LineDecays from(long line) const { return {total + line, exponentials + line, decay.from(line)}; }

    template <int COUNT>
    void weigh(long token, long line, const float* key, float* weights) const {
        Vector since = exponential(load(total + line, COUNT) - load(decay.token(token) + line, COUNT));
        store(weights, since * load(key, COUNT), COUNT);
    }
};

#if !defined(__aarch64__)
template <int COUNT, int VECTORS>
inline void add_tile(float* behind, long stride, const float (*weights)[LINES], const float* values, long tokens,
                     long size, long count) {
    Vector totals[COUNT][VECTORS];
    for (int line = 0; line < COUNT; line++)
        for (int v = 0; v < VECTORS; v++) totals[line][v] = load(behind + line * stride + v * LANES, count);
    for (long token = 0; token < tokens; token++)
        for (int v = 0; v < VECTORS; v++) {
            Vector value = load(values + token * size + v * LANES, count);
            for (int line = 0; line < COUNT; line++) totals[line][v] += weights[token][line] * value;
        }
    for (int line = 0; line < COUNT; line++)
        for (int v = 0; v < VECTORS; v++) store(behind + line * stride + v * LANES, totals[line][v], count);
}
#endif

template <int COUNT, class Decay>
inline void close_lines(const Closing& work, const Decay& decay, long line) {
    float weights[MOST_TOKENS][LINES];
    for (long token = 0; token < work.tokens; token++) {
        const float* key = (token + 1 < work.tokens ? work.keys.token(token) : work.new_key) + line;
        decay.template weigh<COUNT>(token, line, key, weights[token]);
    }
    long columns = work.columns;
    for (long i = line; i < line + COUNT; i++)
        for (long c = 0; c < columns; c += LANES) {
            long place = i * work.stride + c, count = columns - c;
            Vector old = work.before ? load(work.before + place, count) * decay.through(i) : Vector{};
            store(work.behind + place, old, count);
        }
    float* behind = work.behind + line * work.stride;
    work.values.stretches(work.tokens, [&](long first, long count, const float* values) {
        long c = 0;
        for (; c + 2 * LANES <= columns; c += 2 * LANES)
            add_tile<COUNT, 2>(behind + c, work.stride, weights + first, values + c, count, columns, LANES);
        for (; c < columns; c += LANES)
            add_tile<COUNT, 1>(behind + c, work.stride, weights + first, values + c, count, columns, columns - c);
    });
}

template <class Decay>
inline void close_cell(const Closing& work, const Decay& decay) {
    long line = 0;
    for (; line + LINES <= work.lines; line += LINES) close_lines<LINES>(work, decay, line);
    for (; line < work.lines; line++) close_lines<1>(work, decay, line);
}

}  // namespace weft
