// Attention of rows of one token each: from the QKV projection to the mix of values.
//
// One team of threads makes three passes. First, heads are normed and rotated, and new keys and values go to their
// pages. Then every task takes one key head, a stretch of positions and a block of rows, cell by cell, so that a page
// shared by rows is in the cache for the second of them. Finally the stretches of every row are merged. Stretches lie
// at fixed positions, so a row's sums do not depend on the threads or on what else is in the step.

#pragma once

#include <algorithm>
#include <type_traits>

#include "attention_cell.h"
#include "attention_heads.h"
#include "pool.h"

namespace weft {
namespace {

// Owned by the caller, for all layers of a step that read the same pages; attention.py has the same fields.
struct Step {
    const int32_t *start, *write_page, *first_position, *bounds, *pages;
    float* scratch;
    long rows, heads, kv_heads, head_dim, cell;
    long window;  // 0: none
    long first_stretch, stretches;
    long stretch_cells;
    long blocks;  // of rows
    long threads;
};

// attention.py packs the same fields. Kinds: 0 float, 1 bfloat16; of codes, 0 e4m3, 1 integers. The projection holds
// heads of queries, keys, values and, if `gated`, of gates. Null: no norm, no rotation (`half` is 0 then), no sinks, no
// codes. A softcap of 0 is none.
struct Layer {
    const Step* step;
    const void *projected, *weight, *cosine, *sine;
    void *keys, *values;
    uint8_t *key_exponents, *value_exponents;
    const void* sinks;
    void* out;
    int64_t projected_row, half, page_stride, exponent_page_stride, out_row, gated, kind, weight_kind, code_kind;
    float eps;
    Scoring scoring;
};

// Tokens [low, high) of a page; none of them if both are 0.
struct Span {
    long page, low, high;
    bool operator==(const Span& other) const { return page == other.page && low == other.low && high == other.high; }
};

// `Number`: of pages; that of the model, or a code.
template <class Value, class Weight, class Number>
struct Attention {
    const Step& step;
    const Layer& layer;
    long padded = (step.head_dim + LANES - 1) / LANES * LANES;
    long group = step.heads / step.kv_heads;
    long token_stride = step.kv_heads * step.head_dim;

    const Value* projected(long row, long head) const {
        return static_cast<const Value*>(layer.projected) + row * layer.projected_row + head * step.head_dim;
    }

    // The heads of all rows that share a key head lie side by side, so that rows that also share a page are one run.
    long place(long row, long head) const { return (head / group * step.rows + row) * group + head % group; }

    Heads<Number> keys(long page, long token, long head) const {
        return heads(layer.keys, layer.key_exponents, page, token, head);
    }

    Heads<Number> values(long page, long token, long head) const {
        return heads(layer.values, layer.value_exponents, page, token, head);
    }

    Heads<Number> heads(void* all, uint8_t* exponents, long page, long token, long head) const {
        Number* numbers = static_cast<Number*>(all) + page * layer.page_stride + token * token_stride;
        numbers += head * step.head_dim;
        if constexpr (!ARE_CODES<Number>) return {numbers, nullptr};
        return {numbers, exponents + page * layer.exponent_page_stride + token * step.kv_heads + head};
    }

    float* queries(long row, long head) const { return step.scratch + place(row, head) * padded; }

    Seen seen(long stretch, long row, long head) const {
        long count = step.rows * step.heads;
        return {step.scratch + count * padded + (stretch * count + place(row, head)) * (padded + 2 * LANES), padded};
    }

    void prepare(long row) const {
        Angles angles;
        long size = step.head_dim, angle = row * 2 * layer.half;
        read_angles(static_cast<const Value*>(layer.cosine) + angle, static_cast<const Value*>(layer.sine) + angle,
                    layer.half, angles);
        long page = step.write_page[row], token = step.start[row] % step.cell;
        for (long head = 0; head < step.heads + step.kv_heads; head++) {
            Line line, turned;
            auto weight = static_cast<const Weight*>(layer.weight);
            read_head(projected(row, head), weight ? weight + head * size : nullptr, layer.eps, size, line);
            turn<Value>(line, angles, size, turned);
            if (head < step.heads)
                for (long i = 0; i < size; i += LANES) store(queries(row, head) + i, load(turned + i, size - i));
            else
                write(turned, keys(page, token, head - step.heads));
        }
        for (long head = 0; head < step.kv_heads; head++) {
            Line line;
            auto value = projected(row, step.heads + step.kv_heads + head);
            for (long i = 0; i < step.head_dim; i += LANES) store(line + i, load(value + i, step.head_dim - i));
            write(line, values(page, token, head));
        }
    }

    void write(const float* line, Heads<Number> to) const {
        if constexpr (ARE_CODES<Number>) {
            *to.exponents = encode(line, step.head_dim, to.numbers);
        } else {
            for (long i = 0; i < step.head_dim; i += LANES) store(to.numbers + i, load(line + i), step.head_dim - i);
        }
    }

    // Stretches that a row sees part of; the others have no sums.
    long first_stretch(long row) const {
        long low = step.window ? std::max(0L, step.start[row] - step.window + 1) : 0;
        return low / step.cell / step.stretch_cells - step.first_stretch;
    }

    long end_stretch(long row) const {
        return step.start[row] / step.cell / step.stretch_cells - step.first_stretch + 1;
    }

    void attend_task(long task) const {
        long head = task % step.kv_heads, stretch = task / step.kv_heads % step.stretches;
        long block = task / step.kv_heads / step.stretches;
        long first_row = block * step.rows / step.blocks, end_row = (block + 1) * step.rows / step.blocks;
        for (long row = first_row; row < end_row; row++)
            if (stretch >= first_stretch(row) && stretch < end_stretch(row))
                for (long query = 0; query < group; query++) forget(seen(stretch, row, head * group + query));
        long first_cell = (step.first_stretch + stretch) * step.stretch_cells;
        for (long cell = first_cell; cell < first_cell + step.stretch_cells; cell++)
            for (long row = first_row; row < end_row;) {
                Span span = span_of(row, cell);
                long end = row + 1;
                while (end < end_row && span_of(end, cell) == span) end++;
                Span next = end < end_row ? span_of(end, cell) : span_of(first_row, cell + 1);
                attend_span(span, next, row, end - row, head, stretch);
                row = end;
            }
    }

    // What a row sees of a cell.
    Span span_of(long row, long cell) const {
        long position = step.start[row], first = cell * step.cell;
        long low = step.window ? std::max(first, position - step.window + 1) : first;
        long high = std::min(first + step.cell, position + 1);
        if (low >= high) return {0, 0, 0};
        return {step.pages[step.bounds[row] + cell - step.first_position[row] / step.cell], low - first, high - first};
    }

    // Some rows that see the same tokens; meanwhile prefetch the next ones.
    void attend_span(Span span, Span next, long row, long rows, long head, long stretch) const {
        for (long low = span.low; low < span.high; low += CHUNK) {
            Tokens<Number> tokens{keys(span.page, low, head), values(span.page, low, head), token_stride,
                                  step.kv_heads, step.head_dim, std::min(CHUNK, span.high - low), {}, {}};
            if (low == span.low && next.high) {
                tokens.next_keys = keys(next.page, next.low, head);
                tokens.next_values = values(next.page, next.low, head);
            }
            attend(tokens, rows * group, queries(row, head * group), layer.scoring, seen(stretch, row, head * group));
        }
    }

    void finish(long row) const {
        for (long head = 0; head < step.heads; head++) {
            Seen all_seen = seen(first_stretch(row), row, head);
            for (long stretch = first_stretch(row) + 1; stretch < end_stretch(row); stretch++)
                merge(seen(stretch, row, head), all_seen);
            float total = sum(load(all_seen.totals()));
            if (layer.sinks) total += std::exp(read(static_cast<const Value*>(layer.sinks) + head) - *all_seen.top());
            write_head(row, head, all_seen, total);
        }
    }

    void merge(Seen other, Seen into) const {
        float mine = *into.top(), theirs = *other.top(), top = mine > theirs ? mine : theirs;
        float keep = std::exp(mine - top), add = std::exp(theirs - top);
        for (long i = 0; i < padded + LANES; i += LANES)
            store(into.mixed + i, load(into.mixed + i) * keep + load(other.mixed + i) * add);
        *into.top() = top;
    }

    void write_head(long row, long head, Seen seen, float total) const {
        long size = step.head_dim;
        Value* to = static_cast<Value*>(layer.out) + row * layer.out_row + head * size;
        const Value* gate = projected(row, step.heads + 2 * step.kv_heads + head);
        for (long i = 0; i < size; i += LANES) {
            Vector value = load(seen.mixed + i) / total;
            if (layer.gated)
                value = rounded<Value>(value) * rounded<Value>(sigmoid(load(gate + i, size - i)));
            store(to + i, value, size - i);
        }
    }

    void run() const {
        long tasks = step.blocks * step.stretches * step.kv_heads;
        share(step.rows, step.threads, [&](long row) { prepare(row); });
        share(tasks, step.threads, [&](long task) { attend_task(task); });
        share(step.rows, step.threads, [&](long row) { finish(row); });
    }
};

// `Code`: of pages; void: they have the model's own type.
template <class Code>
void attend_layer(const Layer& layer) {
    constexpr bool own = std::is_void_v<Code>;
    if (layer.kind == 0)
        Attention<float, float, std::conditional_t<own, float, Code>>{*layer.step, layer}.run();
    else if (layer.weight_kind == 0)
        Attention<Brain, float, std::conditional_t<own, Brain, Code>>{*layer.step, layer}.run();
    else
        Attention<Brain, Brain, std::conditional_t<own, Brain, Code>>{*layer.step, layer}.run();
}

}  // namespace
}  // namespace weft
