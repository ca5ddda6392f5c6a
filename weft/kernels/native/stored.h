// Weights in blocks of codes with scales, in panels of PANEL outputs, and rows of inputs in blocks of integers.
//
// `stored.py` makes the panels. A sum adds its blocks in the order of the inputs, whatever the number of rows: a row has
// the same bits in every batch.
#pragma once

#include "rows.h"

namespace weft {

// Inputs with one scale, of rows and of most formats; and of a run, the fewest with a scale of their own.
constexpr long BLOCK = 32, RUN = 16;

// A block of a row: `scale * codes` are its numbers.
struct RowBlock {
    int8_t codes[BLOCK];
    float scale;
    float weighted;      // scale times the sum of the codes
    int32_t sum, first;  // of all codes, and of the first run's
};

// Kinds of weights: plain ones, then formats in the order of `KINDS` in stored.py.
enum Kind : long {
    FLOATS,
    BRAINS,
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    FP8,
    INT4,
    INT4_ZEROS,
    INT8,
    INT8_ZEROS,
    NVFP4,
};

// Matrices in one format: that of all outputs, or of one expert after another.
struct StoredPanels {
    const char* bytes;
    int64_t kind, panel_bytes;
    // FP8: inputs with one scale. Groups: the same, 32 times a power of two.
    int64_t columns;

    const char* panel(long number) const { return bytes + number * panel_bytes; }
};

// Weak, because the kernels of models without stored formats are linked without stored.cpp, and call none of these.
#define WEFT_STORED __attribute__((weak))

// Rounds a row to blocks. Numbers that are not finite make its block's scale one that is not.
WEFT_STORED void round_row(const float* x, long inputs, RowBlock* to);
WEFT_STORED void round_row(const Brain* x, long inputs, RowBlock* to);

// Products of some rows with a panel; sums are [rows, PANEL].
WEFT_STORED void multiply_integers(const StoredPanels& weights, long panel, const RowBlock* x, long rows, long blocks,
                                   float* sums);

// The same with inputs in float32, in blocks of rows.
WEFT_STORED void multiply_widened(const StoredPanels& weights, long panel, const Rows& x, long from, long to,
                                  float* sums);

}  // namespace weft
