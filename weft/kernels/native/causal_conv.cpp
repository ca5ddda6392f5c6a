// Causal depthwise convolution of rows of one token, with its bias and SiLU or between two gates.
#include "tails.h"

using namespace weft;

namespace {

constexpr long MOST_WIDTH = 8;
// Number of values below which threads cost more than they save.
constexpr long FEW = 16384;

struct Convolution {
    const Step* step;
    const void* x;
    const float *taps, *bias;  // [width, channels], [channels]
    void *y, *state, *tail;
    int64_t x_stride, state_stride, tail_stride, channels, width, ring, kind, activation, gated;
};

// A row's inputs before the new one, oldest first; null before position 0.
template <class T>
struct History {
    const T* inputs[MOST_WIDTH];
};

template <class T>
History<T> look_back(const Convolution& call, const Place& place) {
    History<T> history;
    long back = call.width - 1, opening = place.start - place.offset;
    const T* tail = static_cast<const T*>(call.tail) + place.tail * call.tail_stride;
    const T* window = static_cast<const T*>(call.state) + place.slot * call.state_stride;
    for (long i = 0; i < back; i++) {
        long position = place.start - back + i;
        if (position >= opening)
            history.inputs[i] = tail + position % call.ring * call.channels;
        else
            history.inputs[i] = position >= 0 ? window + (position - opening + back) * call.channels : nullptr;
    }
    return history;
}

// The new input of some channels; in a gated convolution, the product of the first and last part of the row.
template <class T>
Vector new_input(const Convolution& call, const T* x, long channel, long count) {
    if (!call.gated) return load(x + channel, count);
    return rounded<T>(load(x + channel, count) * load(x + 2 * call.channels + channel, count));
}

template <class T>
Vector finish(const Convolution& call, const T* x, Vector total, long channel, long count) {
    if (call.bias) total += load(call.bias + channel, count);
    if (call.activation) total *= sigmoid(total);
    return call.gated ? rounded<T>(total) * load(x + call.channels + channel, count) : total;
}

// The inputs before the next position, for the state there.
template <class T>
void capture(const Convolution& call, const Place& place, const History<T>& history, Vector input, long channel,
             long count) {
    T* window = static_cast<T*>(call.state) + place.closing * call.state_stride + channel;
    for (long i = 1; i < call.width - 1; i++, window += call.channels)
        store(window, history.inputs[i] ? load(history.inputs[i] + channel, count) : Vector{}, count);
    store(window, input, count);
}

template <class T>
void convolve(const Convolution& call, long row) {
    Place at = place(*call.step, row);
    History<T> history = look_back<T>(call, at);
    long back = call.width - 1;
    const T* x = static_cast<const T*>(call.x) + row * call.x_stride;
    T* y = static_cast<T*>(call.y) + row * call.channels;
    T* kept = static_cast<T*>(call.tail) + at.tail * call.tail_stride + at.start % call.ring * call.channels;
    for (long channel = 0; channel < call.channels; channel += LANES) {
        long count = std::min<long>(LANES, call.channels - channel);
        Vector input = new_input(call, x, channel, count), total = {};
        for (long i = 0; i < back; i++)
            if (history.inputs[i])
                total += load(history.inputs[i] + channel, count) *
                         load(call.taps + i * call.channels + channel, count);
        total += input * load(call.taps + back * call.channels + channel, count);
        store(y + channel, finish(call, x, total, channel, count), count);
        if (at.closing >= 0) capture(call, at, history, input, channel, count);
        // The ring may be no longer than what was just read: the new input replaces the oldest.
        store(kept + channel, input, count);
    }
}

}  // namespace

extern "C" void weft_causal_conv(const Convolution* call) {
    long rows = call->step->rows;
    share(rows, rows * call->channels > FEW ? call->step->threads : 1, [&](long row) {
        if (follows(*call->step, row)) return;
        do {
            if (call->kind)
                convolve<Brain>(*call, row);
            else
                convolve<float>(*call, row);
        } while (follows(*call->step, ++row));
    });
}
