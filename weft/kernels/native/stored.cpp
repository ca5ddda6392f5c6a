// Products with weights in blocks of codes: integers where the inputs are rounded to them, else float32.

#include "stored.h"

#include "codes.h"
#include "panels.h"
#include "pool.h"

namespace weft {
namespace {

// Bytes by which weights are asked for ahead: processors do it by themselves only inside a page.
constexpr long DISTANCE = 3072;

// Asks for the block after the next ones.
template <class Format>
inline void ask_ahead(const Place& place) {
#pragma GCC unroll 32
    for (long at = 0; at < Format::BLOCK_BYTES; at += LINE) __builtin_prefetch(place.block + DISTANCE + at);
}

// Rows -----------------------------------------------------------------------------------------------------------------

// Below it the inverse of a scale is no float32.
constexpr float LEAST_ROUNDED = 0x1p-100f;

// The largest magnitude; of numbers that are not finite, one of those. Bits of magnitudes are in the order of numbers.
inline float largest(Vector first, Vector second) {
    int32_t bits[2 * LANES], most = 0;
    std::memcpy(bits, &first, sizeof(first));
    std::memcpy(bits + LANES, &second, sizeof(second));
    for (int32_t each : bits) most = std::max(most, each & 0x7fffffff);
    return load_as<float>(&most);
}

template <class Value>
void round_to_blocks(const Value* x, long inputs, RowBlock* to) {
    for (long i = 0; i < inputs; i += BLOCK, to++) {
        Vector half[2] = {load(x + i), load(x + i + LANES)};
        float most = largest(half[0], half[1]), inverse = most > LEAST_ROUNDED ? 127.0f / most : 0.0f;
        int32_t sum[2] = {};
        for (int j = 0; j < 2; j++) {
            Vector scaled = half[j] * inverse;
            // The product is rounded before the sum, on processors that could do both at once too.
            asm("" : "+m"(scaled));
            // Adding 1.5 * 2^23 leaves an integer in the lowest bits.
            Integers codes = (Integers)(scaled + 12582912.0f);
            codes = codes << 24 >> 24;
            using Sixteen = int8_t __attribute__((vector_size(LANES)));
            Sixteen bytes = __builtin_convertvector(codes, Sixteen);
            std::memcpy(to->codes + j * LANES, &bytes, sizeof(bytes));
            for (long lane = 0; lane < LANES; lane++) sum[j] += codes[lane];
        }
        to->scale = most * (1.0f / 127.0f);
        to->first = sum[0];
        to->sum = sum[0] + sum[1];
        to->weighted = to->scale * float(to->sum);
    }
}

// Integers -------------------------------------------------------------------------------------------------------------

inline Floats load_floats(const float* from) { return load_as<Floats>(from); }
inline void store_floats(float* to, Floats value) { std::memcpy(to, &value, sizeof(value)); }

// A run of a block: codes of `TOGETHER` outputs with ROWS rows.
template <int ROWS, class Format>
struct Run {
    static constexpr int RUNS = Format::Scales::RUNS, LENGTH = QUADS / RUNS, TURN = turn_of(Format::Code::TOP);
    // What is still to be taken off each code.
    static constexpr int ZERO = Format::Code::ZERO - (Format::Code::TOP > SIGNED_ABOVE ? 128 : 0);
    CodeSum<Format::Code::TOP> sum[ROWS][VECTORS];

    inline __attribute__((always_inline)) Run(const Format& format, const Place& place, int first, int run,
                                              const RowBlock* const* x) {
        if constexpr (HAS_ROW_PAIRS && ROWS % 2 == 0)
            add_pairs(format, place, first, run, x);
        else
            add_quads(format, place, first, run, x);
    }

   private:
    static Codes at(const Format& format, const Place& place, int first, int quad, int j) {
        int output = first + j * WIDTH;
        return format.code.at(Format::strip(place, output / STRIP), quad, output % STRIP / WIDTH);
    }

    // What a row's sums begin with.
    static int32_t start(const RowBlock& x, int run) {
        return -ZERO * (RUNS == 1 ? x.sum : run == 0 ? x.first : x.sum - x.first);
    }

    inline __attribute__((always_inline)) void add_quads(const Format& format, const Place& place, int first, int run,
                                                         const RowBlock* const* x) {
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) sum[row][j].begin(start(*x[row], run));
#pragma GCC unroll 8
        for (int quad = 0; quad < LENGTH; quad++) {
            int place_of_quad = run * LENGTH + quad;
            Codes codes[VECTORS];
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) codes[j] = at(format, place, first, place_of_quad, j);
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
                for (int j = 0; j < VECTORS; j++) {
                    sum[row][j].add(codes[j], four_of(x[row]->codes + 4 * place_of_quad));
                    if ((quad + 1) % TURN == 0 || quad + 1 == LENGTH) sum[row][j].turn();
                }
        }
    }

    inline __attribute__((always_inline)) void add_pairs(const Format& format, const Place& place, int first, int run,
                                                         const RowBlock* const* x) {
        RowPair<Format::Code::TOP> pairs[ROWS / 2][VECTORS];
        for (int row = 0; row < ROWS; row += 2)
            for (int j = 0; j < VECTORS; j++) pairs[row / 2][j].begin(start(*x[row], run), start(*x[row + 1], run));
#pragma GCC unroll 4
        for (int quad = run * LENGTH; quad < (run + 1) * LENGTH; quad += 2)
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) {
                Codes low = at(format, place, first, quad, j), high = at(format, place, first, quad + 1, j);
#pragma GCC unroll 4
                for (int row = 0; row < ROWS; row += 2)
                    pairs[row / 2][j].add(low, high, x[row]->codes + 4 * quad, x[row + 1]->codes + 4 * quad);
            }
        for (int row = 0; row < ROWS; row += 2)
            for (int j = 0; j < VECTORS; j++) {
                sum[row][j].total = pairs[row / 2][j].first();
                sum[row + 1][j].total = pairs[row / 2][j].second();
            }
    }
};

template <int ROWS, class Format>
__attribute__((noinline)) void add_blocks(const Format& format, const char* panel, const RowBlock* rows, long blocks,
                                          float* sums) {
    constexpr int TILES = PANEL / TOGETHER;
    Floats total[TILES][ROWS][VECTORS] = {};
    const RowBlock* x[ROWS];
    for (long block = 0; block < blocks; block++) {
        Place place = format.place(panel, block);
        ask_ahead<Format>(place);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++) x[row] = rows + row * blocks + block;
#pragma GCC unroll 2
        for (int tile = 0; tile < TILES; tile++) {
            int first = tile * TOGETHER;
#pragma GCC unroll 2
            for (int run = 0; run < Format::Scales::RUNS; run++) {
                Run<ROWS, Format> found(format, place, first, run, x);
#pragma GCC unroll 4
                for (int j = 0; j < VECTORS; j++) {
                    place.output = first + j * WIDTH;
                    Floats factor = format.scales.factor(place, run), least = format.scales.least(place);
#pragma GCC unroll 8
                    for (int row = 0; row < ROWS; row++) {
                        Floats& sum = total[tile][row][j];
                        sum = plus_product(sum, as_floats(found.sum[row][j].value()), factor * x[row]->scale);
                        if constexpr (Format::Scales::HAS_LEAST)
                            sum = plus_product(sum, least, Floats{} + x[row]->weighted);
                    }
                }
            }
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int output = 0; output < PANEL; output += WIDTH)
            store_floats(sums + row * PANEL + output, total[output / TOGETHER][row][output % TOGETHER / WIDTH]);
}

// Blocks of ROWS rows, then the others in smaller ones.
template <int ROWS, class Format>
void add_rows(const Format& format, const char* panel, const RowBlock* x, long rows, long blocks, float* sums) {
    for (; rows >= ROWS; rows -= ROWS, x += ROWS * blocks, sums += ROWS * PANEL)
        add_blocks<ROWS>(format, panel, x, blocks, sums);
    if constexpr (ROWS > 1) add_rows<ROWS / 2>(format, panel, x, rows, blocks, sums);
}

// Float32 --------------------------------------------------------------------------------------------------------------

// Inputs that are widened at a time; their weights stay in the first-level cache.
constexpr long WIDENED = 64;

// One block of a panel, input by input.
template <class Format>
void widen_block(const Format& format, const char* panel, long block, float* to) {
    Place place = format.place(panel, block);
    ask_ahead<Format>(place);
    for (int output = 0; output < PANEL; output += WIDTH) {
        place.output = output;
        Floats factor[2] = {format.scales.factor(place, 0)}, least = format.scales.least(place);
        if constexpr (Format::Scales::RUNS == 2) factor[1] = format.scales.factor(place, 1);
        const char* strip = Format::strip(place, output / STRIP);
#pragma GCC unroll 8
        for (int quad = 0; quad < QUADS; quad++) {
            Codes codes = format.code.at(strip, quad, output % STRIP / WIDTH);
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                Floats number = as_floats((Counts)(codes >> (8 * k) & 0xffu)) - float(Format::Code::ZERO);
                number *= factor[quad * Format::Scales::RUNS / QUADS];
                if constexpr (Format::Scales::HAS_LEAST) number += least;
                store_floats(to + (4 * quad + k) * PANEL + output, number);
            }
        }
    }
}

// Some inputs of a panel of FP8: for each run of `columns` inputs the scales of all outputs, then codes input by input.
void widen_eights(const char* panel, long columns, long first, long count, float* to) {
    const char* run = panel + first / columns * (columns + 4) * PANEL;
    for (long i = 0, inside = first % columns; i < count; inside = 0, run += (columns + 4) * PANEL) {
        long end = std::min(count, i + columns - inside);
        Floats scale[PANEL / WIDTH];
        for (int j = 0; j < PANEL / WIDTH; j++) scale[j] = load_as<Floats>(run + 4 * j * WIDTH);
        for (const char* codes = run + (4 + inside) * PANEL; i < end; i++, codes += PANEL) {
            __builtin_prefetch(codes + DISTANCE);
#pragma GCC unroll 8
            for (int j = 0; j < PANEL / WIDTH; j++)
                store_floats(to + i * PANEL + j * WIDTH, from_eights(codes + j * WIDTH) * scale[j]);
        }
    }
}

}  // namespace

void round_row(const float* x, long inputs, RowBlock* to) { round_to_blocks(x, inputs, to); }
void round_row(const Brain* x, long inputs, RowBlock* to) { round_to_blocks(x, inputs, to); }

void multiply_integers(const StoredPanels& weights, long panel, const RowBlock* x, long rows, long blocks, float* sums) {
    with_loader(weights, [&](const auto& format) {
        add_rows<MOST_TOGETHER>(format, weights.panel(panel), x, rows, blocks, sums);
    });
}

void widen(const StoredPanels& weights, long panel, long first, long count, float* to) {
    const char* bytes = weights.panel(panel);
    if (weights.kind == FP8) return widen_eights(bytes, weights.columns, first, count, to);
    with_loader(weights, [&](const auto& format) {
        for (long block = 0; block < count / BLOCK; block++)
            widen_block(format, bytes, first / BLOCK + block, to + block * BLOCK * PANEL);
    });
}

void multiply_widened(const StoredPanels& weights, long panel, const Rows& x, long from, long to, float* sums) {
    alignas(64) float wide[WIDENED * PANEL];
    for (long i = 0; i < x.inputs; i += WIDENED) {
        long count = std::min(WIDENED, x.inputs - i);
        widen(weights, panel, i, count, wide);
        multiply_inputs(x, from, to, wide, i, count, sums);
    }
}

namespace {

// stored.py packs the same fields, here and below. Kinds: 0 float, 1 bfloat16, of the table those of stored.h.
struct StoredLookup {
    const int32_t* tokens;
    const void* panels;
    void* y;
    int64_t rows, size, kind, table_kind, panel_bytes, columns, threads;
    float scale;
};

// Numbers are rounded before they are scaled, as those of a plain table are.
template <class Value>
void look_up_row(const StoredLookup& given, long row) {
    StoredPanels table{static_cast<const char*>(given.panels), given.table_kind, given.panel_bytes, given.columns};
    long panel = given.tokens[row] / PANEL, output = given.tokens[row] % PANEL;
    auto to = static_cast<Value*>(given.y) + row * given.size;
    alignas(64) float wide[WIDENED * PANEL];
    for (long i = 0; i < given.size; i += WIDENED) {
        long count = std::min(WIDENED, given.size - i);
        widen(table, panel, i, count, wide);
        for (long k = 0; k < count; k++) {
            write(to + i + k, wide[k * PANEL + output]);
            write(to + i + k, read(to + i + k) * given.scale);
        }
    }
}

struct Columns {
    const void* x;
    const int64_t* order;
    void* y;
    int64_t rows, stride, size, kind;
};

template <class Value>
void take_columns(const Columns& given) {
    for (long row = 0; row < given.rows; row++) {
        auto from = static_cast<const Value*>(given.x) + row * given.stride;
        auto to = static_cast<Value*>(given.y) + row * given.size;
        for (long i = 0; i < given.size; i++) to[i] = from[given.order[i]];
    }
}

}  // namespace
}  // namespace weft

extern "C" void weft_look_up_stored(const weft::StoredLookup* call) {
    using namespace weft;
    share(call->rows, call->threads, [&](long row) {
        call->kind == 0 ? look_up_row<float>(*call, row) : look_up_row<Brain>(*call, row);
    });
}

extern "C" void weft_take_columns(const weft::Columns* call) {
    using namespace weft;
    call->kind == 0 ? take_columns<float>(*call) : take_columns<Brain>(*call);
}
