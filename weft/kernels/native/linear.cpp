// Matmul of any number of rows with weights in panels, then bias and activation.
//
// Threads take pieces in turn: one panel of outputs (two for gated activations) and up to CHUNK rows.

#include <type_traits>

#include "activation.h"
#include "panels.h"
#include "pool.h"
#include "stored.h"

namespace weft {
namespace {

// Rows of a piece: each widening of its weights serves all of them, and their inputs stay in the second-level cache.
#if defined(__aarch64__)
constexpr long CHUNK = 192;
#else
constexpr long CHUNK = 384;
#endif
// There are fewer, but at least FEWEST, if threads would have less than SHARE pieces each.
constexpr long FEWEST = 96, SHARE = 8;

// linear.py packs the same fields. Kinds: 0 float, 1 bfloat16, of weights also those of stored.h. Bias and outputs have
// one kind.
struct Product {
    const void* x;
    const void* panels;
    const void* bias;  // may be null
    void* y;
    void* room;  // for the inputs in float32, or in blocks of integers
    int64_t rows, stride, inputs, outputs, y_stride, activation;
    int64_t parts;  // 2: the activation of the first half of the outputs times the second half
    int64_t kind, weight_kind, result_kind, threads;
    int64_t panel_bytes, columns, are_rounded;  // of stored formats; the last: whether inputs are rounded to integers
};

// Weights and the rows that they multiply.
template <class Weights>
struct PlainPanels {
    static constexpr long EACH = std::is_same_v<Weights, Pair> ? HALF : PANEL;
    Rows x;
    const Weights* panels;
    void multiply(long panel, long from, long to, float* sums) const {
        weft::multiply(x, from, to, panels + panel * x.inputs * EACH, sums);
    }
};

struct WidenedPanels {
    Rows x;
    StoredPanels panels;
    void multiply(long panel, long from, long to, float* sums) const {
        multiply_widened(panels, panel, x, from, to, sums);
    }
};

struct RoundedRows {
    Rows x;
    StoredPanels panels;
    const RowBlock* blocks;
    void multiply(long panel, long from, long to, float* sums) const {
        long each = x.inputs / BLOCK, first = x.first(from);
        multiply_integers(panels, panel, blocks + first * each, x.first(to) - first, each, sums);
    }
};

template <class Value>
void add_bias(const Value* bias, long count, long rows, float* sums) {
    for (long row = 0; row < rows; row++)
        for (long o = 0; o < count; o++) sums[row * PANEL + o] += read(bias + o);
}

void activate(long kind, long rows, float* sums, const float* others) {
    for (long o = 0; o < rows * PANEL; o += LANES) {
        Vector value = activated(load(sums + o), kind);
        store(sums + o, others ? value * load(others + o) : value);
    }
}

template <class Result, class Matrix>
void compute_piece(const Product& product, const Matrix& matrix, long panel, long from, long to) {
    alignas(64) float sums[2 * (CHUNK + MOST_ROWS) * PANEL];
    long width = product.outputs / product.parts, first = panel * PANEL, count = std::min(PANEL, width - first);
    long row = matrix.x.first(from), rows = matrix.x.first(to) - row;
    auto bias = static_cast<const Result*>(product.bias);
    float* others = product.parts == 2 ? sums + rows * PANEL : nullptr;
    matrix.multiply(panel, from, to, sums);
    if (bias) add_bias(bias + first, count, rows, sums);
    if (others) {
        matrix.multiply(panel + width / PANEL, from, to, others);
        if (bias) add_bias(bias + width + first, count, rows, others);
    }
    if (product.activation || others) activate(product.activation, rows, sums, others);
    Result* y = static_cast<Result*>(product.y) + row * product.y_stride + first;
    for (long r = 0; r < rows; r++)
        for (long o = 0; o < count; o += LANES)
            store(y + r * product.y_stride + o, load(sums + r * PANEL + o), std::min(LANES, count - o));
}

// The inputs as tiles read them: in place where that is possible, else in `room`.
template <class Value>
Rows arrange(const Product& product, float* room) {
    auto x = static_cast<const Value*>(product.x);
    Rows rows(room, product.rows, product.inputs, 0);
    if (Rows::are_packed(product.rows)) {
        share(rows.blocks(), product.threads, [&](long block) { pack_block(x, product.stride, rows, block, room); });
        return rows;
    }
    rows.stride = product.inputs;
    for (long row = 0; row < product.rows; row++)
        for (long i = 0; i < product.inputs; i++) room[row * product.inputs + i] = read(x + row * product.stride + i);
    return rows;
}

// The inputs in blocks of integers, in `room`.
template <class Value>
const RowBlock* round_rows(const Product& product) {
    auto x = static_cast<const Value*>(product.x);
    auto blocks = static_cast<RowBlock*>(product.room);
    long each = product.inputs / BLOCK;
    share(product.rows, product.threads,
          [&](long row) { round_row(x + row * product.stride, product.inputs, blocks + row * each); });
    return blocks;
}

template <class Result, class Matrix>
void compute(const Product& product, const Matrix& matrix) {
    long blocks = matrix.x.blocks();
    long panels = (product.outputs / product.parts + PANEL - 1) / PANEL;
    long least = (product.rows + CHUNK - 1) / CHUNK, most = std::max(least, product.rows / FEWEST);
    long chunks = std::clamp((SHARE * product.threads + panels - 1) / panels, least, most);
    // Pieces of the same rows follow each other: their inputs stay in the second-level cache.
    share(panels * chunks, product.threads, [&](long piece) {
        long chunk = piece / panels;
        compute_piece<Result>(product, matrix, piece % panels, chunk * blocks / chunks, (chunk + 1) * blocks / chunks);
    });
}

template <class Value, class Result>
void compute_kind(const Product& product) {
    float* room = static_cast<float*>(product.room);
    StoredPanels stored{static_cast<const char*>(product.panels), product.weight_kind, product.panel_bytes,
                        product.columns};
    if (product.are_rounded)
        return compute<Result>(product, RoundedRows{Rows(nullptr, product.rows, product.inputs, 0), stored,
                                                    round_rows<Value>(product)});
    Rows x = arrange<Value>(product, room);
    if (product.weight_kind == FLOATS)
        compute<Result>(product, PlainPanels<float>{x, static_cast<const float*>(product.panels)});
    else if (product.weight_kind == BRAINS)
        compute<Result>(product, PlainPanels<Pair>{x, static_cast<const Pair*>(product.panels)});
    else
        compute<Result>(product, WidenedPanels{x, stored});
}

}  // namespace
}  // namespace weft

extern "C" void weft_linear(const weft::Product* call) {
    using namespace weft;
    if (call->result_kind != 0)
        compute_kind<Brain, Brain>(*call);
    else if (call->kind != 0)
        compute_kind<Brain, float>(*call);
    else
        compute_kind<float, float>(*call);
}
