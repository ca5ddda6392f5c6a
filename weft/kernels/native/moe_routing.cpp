// Choice of each row's experts, and their weights.

#include <algorithm>
#include <numeric>

#include "pool.h"
#include "vector.h"
#include "work.h"

namespace weft {
namespace {

// moe.py packs the same fields. Kinds: 0 float, 1 bfloat16.
struct Choice {
    const void* logits;
    const float* bias;  // may be null; affects the choice, not the weights
    float* weights;     // [rows, k]
    int64_t* chosen;    // [rows, k], best first
    char* work;         // for each row, as large as `work_of_a_choice` in moe.py says
    int64_t rows, stride, experts, k, groups, kept_groups;
    int64_t sigmoid;  // scores are sigmoids; otherwise a softmax
    int64_t renormalise, kind, threads, row_work;
    float scaling, eps;
};

// A total order, so that equal numbers give the same choice on every machine: NaN is greatest, as in torch, and of equal
// numbers the first wins.
struct Better {
    const float* values;
    bool operator()(int64_t a, int64_t b) const {
        float x = values[a], y = values[b];
        if (x != y && !(std::isnan(x) && std::isnan(y))) return std::isnan(x) || x > y;
        return a < b;
    }
};

// `order` has room for `count` places.
void choose_best(const float* values, long count, long k, int64_t* order, int64_t* chosen) {
    std::iota(order, order + count, 0);
    std::partial_sort(order, order + k, order + count, Better{values});
    std::copy_n(order, k, chosen);
}

// What the choice of one row works with.
struct RowWork {
    float *scores, *ranking, *strengths;
    int64_t *order, *groups;

    RowWork(const Choice& call, long row) {
        Work work(call.work + row * call.row_work);
        scores = work.take<float>(padded(call));
        ranking = work.take<float>(padded(call));
        strengths = work.take<float>(call.groups);
        order = work.take<int64_t>(call.experts);
        groups = work.take<int64_t>(std::max<long>(call.groups, 2));
    }

    static long padded(const Choice& call) { return (call.experts + LANES - 1) / LANES * LANES; }
};

// Only groups whose two best experts score highest stay.
void drop_groups(const RowWork& row, long experts, long groups, long kept) {
    long size = experts / groups;
    for (long group = 0; group < groups; group++) {
        const float* values = row.ranking + group * size;
        choose_best(values, size, std::min(2L, size), row.order, row.groups);
        row.strengths[group] = values[row.groups[0]] + (size > 1 ? values[row.groups[1]] : 0.0f);
    }
    choose_best(row.strengths, groups, groups, row.order, row.groups);
    for (long i = kept; i < groups; i++) std::fill_n(row.ranking + row.groups[i] * size, size, -INFINITY);
}

void choose_by_sigmoid(const Choice& call, const RowWork& row, float* weights, int64_t* chosen) {
    float *scores = row.scores, *ranking = row.ranking, total = 0;
    for (long i = 0; i < call.experts; i += LANES) store(scores + i, sigmoid(load(scores + i)));
    for (long i = 0; i < call.experts; i++) ranking[i] = call.bias ? scores[i] + call.bias[i] : scores[i];
    if (call.groups > call.kept_groups) drop_groups(row, call.experts, call.groups, call.kept_groups);
    choose_best(ranking, call.experts, call.k, row.order, chosen);
    for (long i = 0; i < call.k; i++) total += weights[i] = scores[chosen[i]];
    for (long i = 0; i < call.k; i++)
        weights[i] = (call.renormalise ? weights[i] / (total + call.eps) : weights[i]) * call.scaling;
}

// Renormalised weights are a softmax of the chosen logits alone.
void choose_by_softmax(const Choice& call, const RowWork& row, float* weights, int64_t* chosen) {
    float* scores = row.scores;
    choose_best(scores, call.experts, call.k, row.order, chosen);
    float most = scores[chosen[0]], total = 0;
    for (long i = 0; i < call.experts; i += LANES) store(scores + i, exponential(load(scores + i) - most));
    if (call.renormalise)
        for (long i = 0; i < call.k; i++) total += scores[chosen[i]];
    else
        for (long i = 0; i < call.experts; i++) total += scores[i];
    for (long i = 0; i < call.k; i++) weights[i] = scores[chosen[i]] / total;
}

template <class Value>
void choose_row(const Choice& call, long row) {
    auto logits = static_cast<const Value*>(call.logits) + row * call.stride;
    RowWork work(call, row);
    for (long i = 0; i < RowWork::padded(call); i++) work.scores[i] = i < call.experts ? read(logits + i) : 0.0f;
    auto choose = call.sigmoid ? choose_by_sigmoid : choose_by_softmax;
    choose(call, work, call.weights + row * call.k, call.chosen + row * call.k);
}

}  // namespace
}  // namespace weft

extern "C" void weft_route(const weft::Choice* call) {
    using namespace weft;
    share(call->rows, call->threads, [&](long row) {
        call->kind == 0 ? choose_row<float>(*call, row) : choose_row<Brain>(*call, row);
    });
}
