// Checks products in C++ without Python, so that they can be compiled for another processor and run in an emulator.
// Prints the number of products compared; exits with 1 at the first wrong one.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

// As in linear.cpp.
struct Product {
    const void *x, *panels, *bias;
    void *y, *room;
    int64_t rows, stride, inputs, outputs, activation, parts, kind, weight_kind, result_kind, threads;
};

// As in widening.cpp.
struct PanelsToWiden {
    const void* panels;
    float* to;
    void* parallel;
    int64_t count, inputs, stride, threads;
};

struct Finish {
    float* sums;
    const void* bias;
    void *y, *parallel;
    int64_t rows, count, sums_row, y_row, apart, bias_apart, activation, kind, threads;
};

extern "C" void weft_linear(const Product*);
extern "C" void weft_widen(const PanelsToWiden*);
extern "C" void weft_finish(const Finish*);

static uint32_t seed = 1;

static float drawn() {
    seed = seed * 1664525u + 1013904223u;
    return float(int32_t(seed)) / 2147483648.0f;
}

static uint16_t shortened(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static float widened(uint16_t value) {
    uint32_t bits = uint32_t(value) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

// Float inputs with bfloat16 or float weights; every row also alone, which must give the same bits.
static bool check(long rows, long inputs, long outputs, bool is_short) {
    long panels = (outputs + 31) / 32;
    std::vector<float> x(rows * inputs), weight(outputs * inputs), floats(panels * inputs * 32);
    std::vector<uint16_t> halves(panels * inputs * 32);
    for (float& value : x) value = drawn();
    for (float& value : weight) value = is_short ? widened(shortened(drawn())) : drawn();
    for (long o = 0; o < outputs; o++)
        for (long i = 0; i < inputs; i++) {
            long at = (o / 32 * inputs + i) * 32, place = o % 32;
            floats[at + place] = weight[o * inputs + i];
            halves[at + place % 16 * 2 + place / 16] = shortened(weight[o * inputs + i]);
        }
    const void* packed = is_short ? (const void*)halves.data() : (const void*)floats.data();
    std::vector<float> y(rows * outputs), alone(outputs), room(rows * inputs);
    Product all{x.data(), packed, nullptr, y.data(), room.data(), rows, inputs, inputs, outputs, 0, 1, 0, is_short, 0, 2};
    weft_linear(&all);
    for (long row = 0; row < rows; row++) {
        Product one = all;
        one.x = x.data() + row * inputs;
        one.y = alone.data();
        one.rows = one.threads = 1;
        weft_linear(&one);
        if (std::memcmp(alone.data(), y.data() + row * outputs, outputs * 4)) return false;
        for (long o = 0; o < outputs; o++) {
            double exact = 0;
            for (long i = 0; i < inputs; i++) exact += double(x[row * inputs + i]) * weight[o * inputs + i];
            if (std::fabs(exact - y[row * outputs + o]) > 1e-4) return false;
        }
    }
    return true;
}

// Panels become a matrix, the gap between its rows stays as it was.
static bool check_widening(long inputs, long panels) {
    long stride = panels * 32 + 5;
    std::vector<uint16_t> packed(panels * inputs * 32);
    std::vector<float> wide(inputs * stride, -2);
    for (uint16_t& value : packed) value = shortened(drawn());
    PanelsToWiden call{packed.data(), wide.data(), nullptr, panels, inputs, stride, 2};
    weft_widen(&call);
    for (long i = 0; i < inputs; i++)
        for (long o = 0; o < stride; o++) {
            uint16_t weight = o < panels * 32 ? packed[(o / 32 * inputs + i) * 32 + o % 16 * 2 + o % 32 / 16] : shortened(-2);
            if (wide[i * stride + o] != widened(weight)) return false;
        }
    return true;
}

// max(0, gate + bias) * (gated + bias), rounded once; what lies beside the results stays as it was.
static bool check_finish(long rows, long count) {
    long apart = count + 3, width = count + 7;
    std::vector<float> sums(rows * 2 * apart);
    std::vector<uint16_t> bias(2 * count), y(rows * width, 7);
    for (float& value : sums) value = drawn();
    std::vector<float> given = sums;
    for (uint16_t& value : bias) value = shortened(drawn());
    Finish call{sums.data(), bias.data(), y.data(), nullptr, rows, count, 2 * apart, width, apart, count, 4, 1, 2};
    weft_finish(&call);
    for (long row = 0; row < rows; row++)
        for (long o = 0; o < width; o++) {
            const float* here = given.data() + row * 2 * apart + o;
            uint16_t expected = 7;
            if (o < count) {
                float gate = here[0] + widened(bias[o]), gated = here[apart] + widened(bias[count + o]);
                expected = shortened(gate < 0 ? 0 : gate * gated);
            }
            if (widened(y[row * width + o]) != widened(expected)) return false;
        }
    return true;
}

int main() {
    int compared = 0;
    for (long size : {1, 5, 37, 600}) {
        if (!check_widening(size, size % 4 + 1) || !check_finish(size % 40, size)) {
            std::printf("wrong: widening or finish of %ld\n", size);
            return 1;
        }
        compared += 2;
    }
    for (long rows : {1, 2, 3, 4, 6, 7, 13, 200})
        for (long inputs : {1, 37, 300})
            for (long outputs : {1, 31, 64, 70})
                for (bool is_short : {false, true}) {
                    if (!check(rows, inputs, outputs, is_short)) {
                        std::printf("wrong: %ld rows, %ld inputs, %ld outputs, short %d\n", rows, inputs, outputs, is_short);
                        return 1;
                    }
                    compared++;
                }
    std::printf("%d\n", compared);
}
