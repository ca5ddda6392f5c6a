// Experts of a step: the weighted sum of each row's experts, plus the shared expert's output.
//
// Pairs of a row and one of its experts are sorted by expert, in every call: a replayed step chooses others. Threads
// then take pieces in turn, each an expert and one panel of its outputs, so a panel is read once for all of its rows.
// Sums stay in float32 until the end. The order of additions does not depend on other rows: a row has the same bits in
// every batch.

#include "activation.h"
#include "panels.h"
#include "pool.h"
#include "stored.h"
#include "work.h"

namespace weft {
namespace {

// gpt-oss's activation, numbered after those of activation.h.
constexpr long CLAMPED = SIGMOID + 1;
// Blocks of rows that are multiplied with a panel at a time.
constexpr long MOST_BLOCKS = 16;

// A matrix of a stored format; zeros for others. `are_rounded`: its inputs are rounded to integers.
struct Stored {
    int64_t panel_bytes, columns, are_rounded;
};

// moe.py packs the same fields. Kinds: 0 float, 1 bfloat16, of matrices also those of stored.h. Inputs, biases, the shared expert and outputs have one kind.
struct Mixture {
    const void* x;
    const float* weights;   // [rows, k]
    const int64_t* chosen;  // [rows, k]; experts of other ranks have numbers outside [0, experts)
    const void *first, *first_bias, *second, *second_bias;  // biases may be null
    const void* shared;   // [rows, hidden]; may be null
    const void* opening;  // logits of the shared expert's weight, which is 1 if this is null
    void* y;
    void* work;  // as large as `work_of_experts` in moe.py says
    int64_t rows, stride, k, experts, hidden, inner;
    int64_t parts;  // 2: the first matmul's output holds gates and gated values, side by side
    int64_t activation, opening_stride, kind, first_kind, second_kind, threads;
    Stored first_stored, second_stored;
    float alpha, limit;
};

// Places [first, first + rows) hold the pairs of one expert.
struct Group {
    long expert, first, rows;
};

struct Block {
    long group, number;
};

struct Grouping {
    long group_count = 0, block_count = 0;
    Group* groups;  // of the chosen experts
    Block* blocks;
    long* pairs;   // row * k + choice, by place
    long* places;  // by row * k + choice; -1: of another rank

    Grouping(const Mixture& call, Work& work) {
        long count = call.rows * call.k, *next = work.take<long>(call.experts + 1);
        groups = work.take<Group>(count);
        blocks = work.take<Block>(count);
        pairs = work.take<long>(count);
        places = work.take<long>(count);
        std::fill_n(next, call.experts + 1, 0);
        for (long pair = 0; pair < count; pair++)
            if (is_here(call, pair)) next[call.chosen[pair] + 1]++;
        for (long expert = 0, first = 0; expert < call.experts; expert++) {
            long rows = next[expert + 1];
            if (rows) add({expert, first, rows});
            next[expert] = first;
            first += rows;
        }
        for (long pair = 0; pair < count; pair++) {
            places[pair] = is_here(call, pair) ? next[call.chosen[pair]]++ : -1;
            if (places[pair] >= 0) pairs[places[pair]] = pair;
        }
    }

    static bool is_here(const Mixture& call, long pair) {
        return call.chosen[pair] >= 0 && call.chosen[pair] < call.experts;
    }

    void add(Group group) {
        long count = Rows(nullptr, group.rows, 0, 0).blocks();
        for (long number = 0; number < count; number++) blocks[block_count++] = {group_count, number};
        groups[group_count++] = group;
    }
};

// Inputs of a matmul, by place. Groups of a few rows are read in place from `lines`, others from `packed`; all are read
// from `blocks` if they are rounded.
struct Inputs {
    float *lines, *packed;
    long size, stride;
    RowBlock* blocks;  // null unless rounded

    RowBlock* blocks_of(long place) const { return blocks + place * (size / BLOCK); }

    Rows of(const Group& group) const {
        if (blocks) return {nullptr, group.rows, size, 0};
        if (Rows::are_packed(group.rows)) return {packed + group.first * size, group.rows, size, 0};
        return {lines + group.first * stride, group.rows, size, stride};
    }
};

template <class Value>
void gather(const Mixture& call, const Grouping& grouping, const Inputs& to, Block block) {
    const Group& group = grouping.groups[block.group];
    Rows rows = to.of(group);
    long first = rows.first(block.number), count = rows.first(block.number + 1) - first;
    const Value* from[MOST_ROWS] = {};
    for (long i = 0; i < count; i++)
        from[i] = static_cast<const Value*>(call.x) + grouping.pairs[group.first + first + i] / call.k * call.stride;
    if (to.blocks) {
        for (long i = 0; i < count; i++) round_row(from[i], call.hidden, to.blocks_of(group.first + first + i));
        return;
    }
    if (Rows::are_packed(group.rows)) {
        with_rows(count, PackBlock<Value>{from, call.hidden, to.packed + (group.first + first) * call.hidden});
        return;
    }
    for (long row = 0; row < count; row++)
        for (long i = 0; i < call.hidden; i += LANES)
            store(to.lines + (group.first + row) * to.stride + i, load(from[row] + i, call.hidden - i),
                  call.hidden - i);
}

inline Vector clamped(Vector gate, Vector up, float alpha, float limit) {
    gate = if_less(all(limit), gate, all(limit), gate);
    up = if_less(all(limit), up, all(limit), up);
    up = if_less(up, all(-limit), all(-limit), up);
    return (up + 1.0f) * (gate * sigmoid(gate * alpha));
}

// Replaces the first matmul's output of a place by the second's input.
void activate(const Mixture& call, float* line) {
    for (long i = 0; i < call.inner; i += LANES) {
        long count = call.inner - i;
        Vector value = load(line + i, count), up = call.parts == 2 ? load(line + call.inner + i, count) : all(1.0f);
        value = call.activation == CLAMPED ? clamped(value, up, call.alpha, call.limit)
                                           : activated(value, call.activation) * up;
        store(line + i, value, count);
    }
}

void activate_block(const Mixture& call, const Grouping& grouping, const Inputs& inner, Block block) {
    const Group& group = grouping.groups[block.group];
    Rows rows = inner.of(group);
    float* lines = inner.lines + group.first * inner.stride;
    for (long row = rows.first(block.number); row < rows.first(block.number + 1); row++) {
        activate(call, lines + row * inner.stride);
        if (inner.blocks) round_row(lines + row * inner.stride, inner.size, inner.blocks_of(group.first + row));
    }
    if (!inner.blocks && Rows::are_packed(group.rows))
        pack_block(lines, inner.stride, rows, block.number, inner.packed + group.first * inner.size);
}

// The matrices of all experts, and their biases.
struct Matrices {
    const void *panels, *bias;
    long kind, outputs;
    Stored stored;

    long count() const { return (outputs + PANEL - 1) / PANEL; }

    // `blocks`: those of the group's first row, if rows are rounded.
    void multiply(const Rows& x, const RowBlock* blocks, long from, long to, long expert, long panel,
                  float* sums) const {
        long number = expert * count() + panel, before = number * x.inputs, each = x.inputs / BLOCK;
        StoredPanels own{static_cast<const char*>(panels), kind, stored.panel_bytes, stored.columns};
        if (blocks)
            multiply_integers(own, number, blocks + x.first(from) * each, x.first(to) - x.first(from), each, sums);
        else if (kind > BRAINS)
            multiply_widened(own, number, x, from, to, sums);
        else if (kind == BRAINS)
            weft::multiply(x, from, to, static_cast<const Pair*>(panels) + before * HALF, sums);
        else
            weft::multiply(x, from, to, static_cast<const float*>(panels) + before * PANEL, sums);
    }
};

template <class Value>
void multiply_group(const Matrices& matrices, const Inputs& x, const Group& group, long panel, float* y) {
    alignas(64) float sums[MOST_BLOCKS * MOST_ROWS * PANEL];
    Rows rows = x.of(group);
    const RowBlock* blocks = x.blocks ? x.blocks_of(group.first) : nullptr;
    long first = panel * PANEL, count = std::min(PANEL, matrices.outputs - first);
    auto bias = static_cast<const Value*>(matrices.bias);
    if (bias) bias += group.expert * matrices.outputs + first;
    for (long from = 0; from < rows.blocks(); from += MOST_BLOCKS) {
        long to = std::min(rows.blocks(), from + MOST_BLOCKS), row = rows.first(from);
        matrices.multiply(rows, blocks, from, to, group.expert, panel, sums);
        for (long i = 0; i < rows.first(to) - row; i++)
            for (long o = 0; o < count; o += LANES) {
                Vector value = load(sums + i * PANEL + o);
                if (bias) value += load(bias + o, count - o);
                store(y + (group.first + row + i) * matrices.outputs + first + o, value, count - o);
            }
    }
}

template <class Value>
void multiply_groups(const Mixture& call, const Grouping& grouping, const Matrices& matrices, const Inputs& x,
                     float* y) {
    long panels = matrices.count();
    share(grouping.group_count * panels, call.threads, [&](long piece) {
        multiply_group<Value>(matrices, x, grouping.groups[piece / panels], piece % panels, y);
    });
}

// Adds in the order of choice.
template <class Value>
void sum_row(const Mixture& call, const long* places, const float* outputs, long row) {
    const float* weights = call.weights + row * call.k;
    auto shared = static_cast<const Value*>(call.shared);
    auto opening = static_cast<const Value*>(call.opening);
    float open = opening ? sigmoid(read(opening + row * call.opening_stride)) : 1.0f;
    for (long i = 0; i < call.hidden; i += LANES) {
        long count = call.hidden - i;
        Vector total = {};
        for (long choice = 0; choice < call.k; choice++)
            if (places[choice] >= 0) total += weights[choice] * load(outputs + places[choice] * call.hidden + i, count);
        if (shared) total += open * load(shared + row * call.hidden + i, count);
        store(static_cast<Value*>(call.y) + row * call.hidden + i, total, count);
    }
}

template <class Value>
void compute(const Mixture& call) {
    Work work(call.work);
    Grouping grouping(call, work);
    long pairs = call.rows * call.k, outer = call.parts * call.inner, hidden = call.hidden;
    auto ends = work.take<float>(pairs * hidden), middle = work.take<float>(pairs * outer),
         packed = work.take<float>(pairs * call.inner);
    // Those of the inputs, then those between the matmuls.
    auto rounded = work.take<RowBlock>(pairs * std::max(hidden, call.inner) / BLOCK);
    Inputs x{ends, ends, hidden, hidden, call.first_stored.are_rounded ? rounded : nullptr};
    Inputs inner{middle, packed, call.inner, outer, call.second_stored.are_rounded ? rounded : nullptr};
    Matrices first{call.first, call.first_bias, call.first_kind, outer, call.first_stored};
    Matrices second{call.second, call.second_bias, call.second_kind, hidden, call.second_stored};
    auto blocks = grouping.blocks;
    share(grouping.block_count, call.threads, [&](long i) { gather<Value>(call, grouping, x, blocks[i]); });
    multiply_groups<Value>(call, grouping, first, x, middle);
    share(grouping.block_count, call.threads, [&](long i) { activate_block(call, grouping, inner, blocks[i]); });
    // The inputs are no longer needed.
    multiply_groups<Value>(call, grouping, second, inner, ends);
    share(call.rows, call.threads,
          [&](long row) { sum_row<Value>(call, &grouping.places[row * call.k], ends, row); });
}

}  // namespace
}  // namespace weft

extern "C" void weft_experts(const weft::Mixture* call) {
    call->kind == 0 ? weft::compute<float>(*call) : weft::compute<weft::Brain>(*call);
}
