// Rows of inputs as matmul tiles read them, and the sizes of tiles.
#pragma once

#if defined(__SSE2__)
#include <emmintrin.h>
#include <xmmintrin.h>
#endif

#include "vector.h"

namespace weft {

constexpr long PANEL = 32, HALF = PANEL / 2;

// MOST_ROWS: rows of a tile, as many as the sums of TILE outputs fit into registers.
// IN_PLACE: up to this number of rows the sums of a whole panel do, and weights are widened in registers.
// INPUTS: of a block; its weights for a tile, widened, and two blocks of rows stay in a first-level cache of 32 kB.
#if defined(__AVX512F__)
constexpr int MOST_ROWS = 12, IN_PLACE = 12, TILE = PANEL;
constexpr long INPUTS = 128;
#else
constexpr int MOST_ROWS = 6, IN_PLACE = 3, TILE = HALF;
constexpr long INPUTS = 256;
#endif
// Up to this number of rows inputs are read where they lie; more are packed.
#if defined(__aarch64__)
constexpr int UNPACKED = 1;
#else
constexpr int UNPACKED = 3;
#endif

// Calls body.template run<rows>().
template <int ROWS = MOST_ROWS, class Body>
inline void with_rows(long rows, const Body& body) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return with_rows<ROWS - 1>(rows, body);
    body.template run<ROWS>();
}

// Rows of inputs in blocks of up to MOST_ROWS rows, of about the same number.
struct Rows {
    const float* values;
    long rows, inputs;
    long stride;  // of rows; 0: blocks are packed, each as [inputs, rows]

    Rows(const float* values, long rows, long inputs, long stride)
        : values(values), rows(rows), inputs(inputs), stride(stride) {
        each_ = rows ? rows / blocks() : 0;
        longer_ = rows - each_ * blocks();
    }

    static bool are_packed(long rows) { return rows > UNPACKED; }
    long blocks() const { return (rows + MOST_ROWS - 1) / MOST_ROWS; }
    // Without a division, because every tile asks for it.
    long first(long block) const { return block * each_ + (block < longer_ ? block : longer_); }
    const float* at(long block, long input) const {
        if (stride) return values + input;
        long here = first(block);
        return values + here * inputs + input * (first(block + 1) - here);
    }

   private:
    long each_, longer_;  // rows of a block, and how many blocks have one more
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

#if defined(__SSE2__)
// Four rows as columns of `to`, whose lines are `apart`; returns the number of inputs done. Element by element, packing
// would take a few percent of a matmul with as many outputs as inputs.
inline long pack_four(const float* const* from, long inputs, float* to, long apart) {
    long i = 0;
    for (; i + 4 <= inputs; i += 4, to += 4 * apart) {
        __m128 a = _mm_loadu_ps(from[0] + i), b = _mm_loadu_ps(from[1] + i);
        __m128 c = _mm_loadu_ps(from[2] + i), d = _mm_loadu_ps(from[3] + i);
        _MM_TRANSPOSE4_PS(a, b, c, d);
        _mm_storeu_ps(to, a);
        _mm_storeu_ps(to + apart, b);
        _mm_storeu_ps(to + 2 * apart, c);
        _mm_storeu_ps(to + 3 * apart, d);
    }
    return i;
}

// Writes the lower numbers of four pairs to one line, the upper ones to the next.
inline void store_pairs(__m128i pairs, float* to, long apart) {
    _mm_storeu_ps(to, _mm_castsi128_ps(_mm_slli_epi32(pairs, 16)));
    _mm_storeu_ps(to + apart, _mm_castsi128_ps(_mm_slli_epi32(_mm_srli_epi32(pairs, 16), 16)));
}

// Pairs of numbers are moved together and widened at the end.
inline long pack_four(const Brain* const* from, long inputs, float* to, long apart) {
    long i = 0;
    for (; i + 8 <= inputs; i += 8, to += 8 * apart) {
        __m128i row[4];
        for (int j = 0; j < 4; j++) row[j] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from[j] + i));
        __m128i low = _mm_unpacklo_epi32(row[0], row[1]), lower = _mm_unpacklo_epi32(row[2], row[3]);
        __m128i high = _mm_unpackhi_epi32(row[0], row[1]), higher = _mm_unpackhi_epi32(row[2], row[3]);
        store_pairs(_mm_unpacklo_epi64(low, lower), to, apart);
        store_pairs(_mm_unpackhi_epi64(low, lower), to + 2 * apart, apart);
        store_pairs(_mm_unpacklo_epi64(high, higher), to + 4 * apart, apart);
        store_pairs(_mm_unpackhi_epi64(high, higher), to + 6 * apart, apart);
    }
    return i;
}
#endif

// Packs one block of rows as [inputs, ROWS].
template <class Value>
struct PackBlock {
    const Value* const* from;
    long inputs;
    float* to;
    template <int ROWS>
    void run() const {
        long i = 0;
#if defined(__SSE2__)
        // The last four rows may overlap those before.
        if constexpr (ROWS >= 4)
            for (int row = 0; row < ROWS; row += 4) {
                int first = row + 4 <= ROWS ? row : ROWS - 4;
                i = pack_four(from + first, inputs, to + first, ROWS);
            }
#endif
        for (; i < inputs; i++)
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; row++) to[i * ROWS + row] = read(from[row] + i);
    }
};

template <class Value>
void pack_block(const Value* x, long stride, const Rows& rows, long block, float* to) {
    long here = rows.first(block), count = rows.first(block + 1) - here;
    const Value* from[MOST_ROWS] = {};
    for (long row = 0; row < count; row++) from[row] = x + (here + row) * stride;
    with_rows(count, PackBlock<Value>{from, rows.inputs, to + here * rows.inputs});
}

}  // namespace weft
