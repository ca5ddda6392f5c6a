// Choice of each row's experts, and their weights.

#include <algorithm>
#include <numeric>
#include <vector>

#include "pool.h"
#include "vector.h"

namespace weft {
namespace {

// moe.py packs the same fields. Kinds: 0 float, 1 bfloat16.
struct Choice {
    const void* logits;
    const float* bias;  // may be null; affects the choice, not the weights
    float* weights;     // [rows, k]
    int64_t* chosen;    // [rows, k], best first
    int64_t rows, stride, experts, k, groups, kept_groups;
    int64_t sigmoid;  // scores are sigmoids; otherwise a softmax
    int64_t renormalise, kind, threads;
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

void choose_best(const float* values, long count, long k, int64_t* chosen) {
    std::vector<int64_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + k, order.end(), Better{values});
    std::copy_n(order.begin(), k, chosen);
}

// Only groups whose two best experts score highest stay.
void drop_groups(float* ranking, long experts, long groups, long kept) {
    long size = experts / groups;
    std::vector<float> strengths(groups);
    std::vector<int64_t> order(std::max(groups, 2L));
    for (long group = 0; group < groups; group++) {
        const float* values = ranking + group * size;
        choose_best(values, size, std::min(2L, size), order.data());
        strengths[group] = values[order[0]] + (size > 1 ? values[order[1]] : 0.0f);
    }
    choose_best(strengths.data(), groups, groups, order.data());
    for (long i = kept; i < groups; i++) std::fill_n(ranking + order[i] * size, size, -INFINITY);
}

void choose_by_sigmoid(const Choice& call, std::vector<float>& scores, float* weights, int64_t* chosen) {
    for (size_t i = 0; i < scores.size(); i += LANES) store(&scores[i], sigmoid(load(&scores[i])));
    std::vector<float> ranking(scores);
    if (call.bias)
        for (long i = 0; i < call.experts; i++) ranking[i] += call.bias[i];
    if (call.groups > call.kept_groups) drop_groups(ranking.data(), call.experts, call.groups, call.kept_groups);
    choose_best(ranking.data(), call.experts, call.k, chosen);
    float total = 0;
    for (long i = 0; i < call.k; i++) total += weights[i] = scores[chosen[i]];
    for (long i = 0; i < call.k; i++)
        weights[i] = (call.renormalise ? weights[i] / (total + call.eps) : weights[i]) * call.scaling;
}

// Renormalised weights are a softmax of the chosen logits alone.
void choose_by_softmax(const Choice& call, std::vector<float>& scores, float* weights, int64_t* chosen) {
    choose_best(scores.data(), call.experts, call.k, chosen);
    float most = scores[chosen[0]], total = 0;
    for (size_t i = 0; i < scores.size(); i += LANES) store(&scores[i], exponential(load(&scores[i]) - most));
    if (call.renormalise)
        for (long i = 0; i < call.k; i++) total += scores[chosen[i]];
    else
        for (long i = 0; i < call.experts; i++) total += scores[i];
    for (long i = 0; i < call.k; i++) weights[i] = scores[chosen[i]] / total;
}

template <class Value>
void choose_row(const Choice& call, long row) {
    auto logits = static_cast<const Value*>(call.logits) + row * call.stride;
    std::vector<float> scores((call.experts + LANES - 1) / LANES * LANES);
    for (long i = 0; i < call.experts; i++) scores[i] = read(logits + i);
    auto choose = call.sigmoid ? choose_by_sigmoid : choose_by_softmax;
    choose(call, scores, call.weights + row * call.k, call.chosen + row * call.k);
}

}  // namespace
}  // namespace weft

extern "C" void weft_route(const weft::Choice* call) {
    using namespace weft;
    share(call->rows, call->threads, [&](long row) {
        call->kind == 0 ? choose_row<float>(*call, row) : choose_row<Brain>(*call, row);
    });
}
