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
    int64_t rows, stride, inputs, outputs, y_stride, activation, parts, kind, weight_kind, result_kind, threads;
    int64_t panel_bytes, columns, are_rounded;
};

extern "C" void weft_linear(const Product*);

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
    // Many threads get pieces of fewer rows.
    long threads = rows > 200 ? 6 : 2;
    Product all{x.data(), packed, nullptr, y.data(), room.data(), rows, inputs, inputs, outputs,
                outputs,  0,      1,       0,        is_short,    0,    threads, 0,     0,      0};
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

int main() {
    int compared = 0;
    for (long rows : {1, 2, 3, 4, 6, 7, 13, 200, 400})
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
