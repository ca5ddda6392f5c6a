// The inner loops of recurrent kernels on ARM, with all sums in registers. The same sums in the same order as elsewhere.
#pragma once

#include "four_arm.h"

namespace weft {

using Factor = float;

inline Factor factor(float weight) { return weight; }

template <int SUMS, int ROWS>
inline void add_lanes(float* const (&sums)[SUMS], const Factor (&factors)[SUMS][ROWS], const float* matrix, long stride,
                      long column, long count) {
    Four totals[SUMS];
#pragma GCC unroll 2
    for (int s = 0; s < SUMS; s++) totals[s] = load_four(sums[s] + column);
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++) {
        Four value = load_four(matrix + row * stride + column, count);
#pragma GCC unroll 2
        for (int s = 0; s < SUMS; s++)
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
                totals[s].part[i] = vfmaq_n_f32(totals[s].part[i], value.part[i], factors[s][row]);
    }
#pragma GCC unroll 2
    for (int s = 0; s < SUMS; s++) store_four(sums[s] + column, totals[s]);
}

// The products of queries with ROWS rows from `first` on, before the sum over lanes is complete.
template <int QUERIES, int ROWS>
inline void multiply_some(Partial (&found)[QUERIES][LANES], const float* const (&queries)[QUERIES], const float* rows,
                          long first, long size) {
    Four totals[ROWS][QUERIES] = {};
    for (long i = 0; i < size; i += LANES) {
        Four wanted[QUERIES];
#pragma GCC unroll 2
        for (int q = 0; q < QUERIES; q++) wanted[q] = load_four(queries[q] + i);
#pragma GCC unroll 2
        for (int row = 0; row < ROWS; row++) {
            Four value = load_four(rows + (first + row) * size + i, size - i);
#pragma GCC unroll 2
            for (int q = 0; q < QUERIES; q++)
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++)
                    totals[row][q].part[j] = vfmaq_f32(totals[row][q].part[j], value.part[j], wanted[q].part[j]);
        }
    }
#pragma GCC unroll 2
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 2
        for (int q = 0; q < QUERIES; q++) found[q][first + row] = add_up(totals[row][q]);
}

// products[q][row] = queries[q] . matrix[row] for all `rows`. The queries are padded with zeros to whole vectors.
template <int QUERIES>
inline void multiply_rows(float* const (&products)[QUERIES], const float* const (&queries)[QUERIES],
                          const float* matrix, long rows, long size) {
    for (long first = 0; first < rows; first += LANES, matrix += LANES * size) {
        long count = rows - first < LANES ? rows - first : LANES, row = 0;
        // Entries beyond the last row stay undefined: each ends in its own lane, which is not stored.
        Partial found[QUERIES][LANES];
        for (; row + 2 <= count; row += 2) multiply_some<QUERIES, 2>(found, queries, matrix, row, size);
        if (row < count) multiply_some<QUERIES, 1>(found, queries, matrix, row, size);
        for (int q = 0; q < QUERIES; q++) store(products[q] + first, sums(found[q]), count);
    }
}

// behind[line] += weights[token][line] * values[token] for COUNT lines and all `tokens`: four lines of a vector at a
// time, as many as fit into registers.
template <int COUNT, int VECTORS, long LINES>
inline void add_tile(float* behind, long stride, const float (*weights)[LINES], const float* values, long tokens,
                     long size, long count) {
    constexpr int SOME = COUNT < 4 ? COUNT : 4;
    static_assert(COUNT % SOME == 0);
    for (int part = 0; part < VECTORS * (COUNT / SOME); part++) {
        int first = part / VECTORS * SOME;
        long column = part % VECTORS * LANES;
        Four totals[SOME];
#pragma GCC unroll 4
        for (int line = 0; line < SOME; line++)
            totals[line] = load_four(behind + (first + line) * stride + column, count);
        for (long token = 0; token < tokens; token++) {
            Four value = load_four(values + token * size + column, count);
#pragma GCC unroll 4
            for (int line = 0; line < SOME; line++)
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++)
                    totals[line].part[i] =
                        vfmaq_n_f32(totals[line].part[i], value.part[i], weights[token][first + line]);
        }
#pragma GCC unroll 4
        for (int line = 0; line < SOME; line++)
            store_four(behind + (first + line) * stride + column, totals[line], count);
    }
}

}  // namespace weft
