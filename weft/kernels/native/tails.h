// Common parts of the recurrent kernels: the position of a row's new token, and weighted sums over its open cell.
#pragma once

#include <algorithm>

#include "pool.h"
#include "vector.h"
#if defined(__aarch64__)
#include "tails_arm.h"
#endif

namespace weft {

// Limits of the buffers on the stack.
constexpr long MOST_TOKENS = 256;  // of a cell
constexpr long MOST_SIZE = 512;    // of a key, or of a value of the delta rule
// Rows of a matrix that are read in turn, far apart: a core gets more bandwidth from several streams than from one.
constexpr int TOGETHER = 8;

// The rows of a step, one new token each (`Batch` in interface.py describes the arrays).
struct Step {
    const int32_t *start, *slot, *tail, *closing;
    int64_t rows, cell, threads;
};

// Whether a row is the next token of the same sequence as the row before. Such rows are computed in order.
inline bool follows(const Step& step, long row) {
    return row > 0 && row < step.rows && step.tail[row] == step.tail[row - 1];
}

struct Place {
    long start;    // position of the new token
    long offset;   // of that token within its cell
    long slot;     // the checkpoint before the cell; negative in a sequence's first cell, which has none
    long tail;
    long closing;  // slot for the state after the new token; negative if none is wanted
};

inline Place place(const Step& step, long row) {
    long start = step.start[row];
    long slot = start >= step.cell ? step.slot[row] : -1;
    return {start, start % step.cell, slot, step.tail[row], step.closing[row]};
}

// One head's part of a tail: `ring` tokens of `size` floats side by side; the open cell starts at index `low`.
struct OpenCell {
    float* head;
    long low, ring, size;

    float* token(long index) const {
        long at = low + index;
        return head + (at < ring ? at : at - ring) * size;
    }

    // The same tokens, each from a number on.
    OpenCell from(long number) const { return {head + number, low, ring, size}; }

    // Call `work(first, count, values)` for the one or two stretches of memory that hold the cell's first tokens.
    template <class Work>
    void stretches(long tokens, Work work) const {
        long straight = std::min(tokens, ring - low);
        if (straight > 0) work(0L, straight, static_cast<const float*>(head + low * size));
        if (tokens > straight) work(straight, tokens - straight, static_cast<const float*>(head));
    }
};

// Small values may be of either kind.
inline float read_kind(const void* from, long index, long kind) {
    return kind ? read(static_cast<const Brain*>(from) + index) : read(static_cast<const float*>(from) + index);
}

// As floats, padded with zeros to whole vectors.
template <class T>
inline void widen(const T* from, long size, float* to) {
    for (long i = 0; i < size; i += LANES) store(to + i, load(from + i, size - i));
}

inline void clear(float* values, long size) {
    for (long i = 0; i < size; i += LANES) store(values + i, Vector{});
}

inline void scale(float* values, long size, float factor) {
    for (long i = 0; i < size; i += LANES) store(values + i, load(values + i) * factor);
}

#if !defined(__aarch64__)
// A weight as what lines are multiplied with.
using Factor = Vector;

inline Factor factor(float weight) { return all(weight); }

template <int SUMS, int ROWS>
inline void add_lanes(float* const (&sums)[SUMS], const Factor (&factors)[SUMS][ROWS], const float* matrix, long stride,
                      long column, long count) {
    Vector totals[SUMS];
    for (int s = 0; s < SUMS; s++) totals[s] = load(sums[s] + column);
    for (int row = 0; row < ROWS; row++) {
        Vector value = load(matrix + row * stride + column, count);
        for (int s = 0; s < SUMS; s++) totals[s] += factors[s][row] * value;
    }
    for (int s = 0; s < SUMS; s++) store(sums[s] + column, totals[s]);
}

// The products of queries with a row, before the sum over lanes.
template <int QUERIES>
inline void multiply_row(Vector (&totals)[QUERIES], const float* const (&queries)[QUERIES], const float* row,
                         long size) {
    for (int q = 0; q < QUERIES; q++) totals[q] = Vector{};
    for (long i = 0; i < size; i += LANES) {
        Vector value = load(row + i, size - i);
        for (int q = 0; q < QUERIES; q++) totals[q] += value * load(queries[q] + i);
    }
}

// products[q][row] = queries[q] . matrix[row] for all `rows`. The queries are padded with zeros to whole vectors.
template <int QUERIES>
inline void multiply_rows(float* const (&products)[QUERIES], const float* const (&queries)[QUERIES],
                          const float* matrix, long rows, long size) {
    Vector totals[QUERIES];
    long first = 0;
    // From half of them on, sixteen sums at once take less time.
    for (; rows - first >= LANES / 2; first += LANES) {
        long count = std::min(LANES, rows - first);
        // Entries beyond the last row stay undefined: each ends in its own lane, which is not stored.
        Vector found[QUERIES][LANES];
        for (long row = 0; row < count; row++) {
            multiply_row(totals, queries, matrix + (first + row) * size, size);
            for (int q = 0; q < QUERIES; q++) found[q][row] = totals[q];
        }
        for (int q = 0; q < QUERIES; q++) store(products[q] + first, sums(found[q]), count);
    }
    for (; first < rows; first++) {
        multiply_row(totals, queries, matrix + first * size, size);
        for (int q = 0; q < QUERIES; q++) products[q][first] = sum(totals[q]);
    }
}
#endif

// Row `first` and those `apart` from it.
template <int SUMS, int ROWS>
inline void add_some(float* const (&sums)[SUMS], const float* const (&weights)[SUMS], const float* matrix, long stride,
                     long first, long apart, long columns) {
    Factor factors[SUMS][ROWS];
    for (int s = 0; s < SUMS; s++)
        for (int row = 0; row < ROWS; row++) factors[s][row] = factor(weights[s][first + row * apart]);
    matrix += first * stride;
    stride *= apart;
    long column = 0;
    for (; column + LANES <= columns; column += LANES)
        add_lanes<SUMS, ROWS>(sums, factors, matrix, stride, column, LANES);
    if (column < columns) add_lanes<SUMS, ROWS>(sums, factors, matrix, stride, column, columns - column);
}

// sums[s][c] += weights[s][row] * matrix[row][c] for all `rows`. The sums have room for whole vectors.
template <int SUMS>
inline void add_rows(float* const (&sums)[SUMS], const float* const (&weights)[SUMS], const float* matrix, long stride,
                     long rows, long columns) {
    long apart = rows / TOGETHER;
    for (long row = 0; row < apart; row++)
        add_some<SUMS, TOGETHER>(sums, weights, matrix, stride, row, apart, columns);
    // The others in order. Four at once have the same sums as one by one.
    long row = apart * TOGETHER;
    for (; row + 4 <= rows; row += 4) add_some<SUMS, 4>(sums, weights, matrix, stride, row, 1, columns);
    for (; row < rows; row++) add_some<SUMS, 1>(sums, weights, matrix, stride, row, 1, columns);
}

// since[i] = e^(total - decay of token i): what remains of the contribution of each of a cell's first tokens.
inline void decays_since(const OpenCell& decay, long tokens, float total, float* since) {
    decay.stretches(tokens, [&](long first, long count, const float* values) {
        for (long i = 0; i < count; i += LANES)
            store(since + first + i, exponential(total - load(values + i, count - i)));
    });
}

}  // namespace weft
