// Products of up to six rows with 16-bit weights on ARM. Each weight is widened when it is multiplied.
//
// One core of a Neoverse-N1 reads a line of a panel, the weights of one input, from memory in 8 cycles. Its two vector
// units begin 16 instructions in that time, and one row needs 8 multiplications and 8 widenings. They do not fit: a
// widening, whose result comes after two cycles, waits if it would end together with a multiplication, whose result
// comes after four. So integer units widen some vectors of a line and leave them in memory, to be loaded again. That
// takes more instructions, of which the processor begins four a cycle, so the share of either kind of units depends on
// the number of rows: the more multiplications, the fewer widenings by vector units.
//
// The order of instructions decides the speed, and compilers would change it: they load where a value is needed, and
// keep in registers what was to be left in memory. So each instruction is assembly, which they keep in order.
#pragma once

#include <arm_neon.h>

#include <utility>

#include "tiles.h"

namespace weft {

// Inputs of a turn. Addresses in it are constants.
constexpr int TURN = 4;

// Sums of ROWS rows. A line has four vectors of pairs; sums of all their outputs fit into registers for up to three
// rows, and sums of two vectors at a time, in two passes, for up to six.
template <int ROWS, int PASS>
class PairTile {
   public:
    static constexpr int VECTORS = ROWS > 3 ? 2 : 4;

    inline __attribute__((always_inline)) PairTile(const Pair* weights, float* places)
        : here_(weights), next_(weights), places_(places) {}

    inline __attribute__((always_inline)) void load(const float* sums, bool begin) {
#pragma GCC unroll 32
        for (int k = 0; k < SUMS; k++) total_[k] = begin ? vdupq_n_f32(0) : vld1q_f32(sums + place_of(k));
    }

    inline __attribute__((always_inline)) void store(float* sums) const {
#pragma GCC unroll 32
        for (int k = 0; k < SUMS; k++) vst1q_f32(sums + place_of(k), total_[k]);
    }

    inline __attribute__((always_inline)) void start() {
        start_vectors(std::make_integer_sequence<int, VECTORS>());
        start_steps(std::make_integer_sequence<int, EARLY>());
    }

    // Adds the products of TURN inputs, and gets weights of the inputs after them ready unless they are the last.
    inline __attribute__((always_inline)) void add(const float* x, bool last) {
        next_ = last ? here_ : here_ + TURN * HALF;
        float32x4_t inputs[ROWS];
        steps(x, inputs, std::make_integer_sequence<int, TURN * VECTORS>());
        here_ += TURN * HALF;
    }

   private:
    // Of a line, the first vectors are widened by vector units, the others by integer units.
    static constexpr int BY_VECTOR_UNITS = ROWS > 3 ? 0 : 4 - ROWS;
    // A step multiplies with one vector of pairs. Weights are in registers EARLY steps before, and in memory two inputs
    // before.
    static constexpr int EARLY = ROWS < 3 ? 3 : 1;
    static constexpr int DELAY = 2;
    // Lines by which weights are asked for ahead. With two passes each asks for every second line, far enough ahead to
    // serve both.
    static constexpr int PASSES = 4 / VECTORS, ASKED = PASSES == 1 ? 16 : TWO_PASSES;
    static constexpr int SUMS = ROWS * 2 * VECTORS;
    static constexpr uint64_t HALVES = 0xffff0000ffff0000;

    static constexpr bool by_vector_units(int vector) { return vector < BY_VECTOR_UNITS; }
    static constexpr int sum_of(int row, int half, int vector) { return (row * 2 + half) * VECTORS + vector; }
    static constexpr long place_of(int sum) {
        return sum / VECTORS / 2 * PANEL + sum / VECTORS % 2 * HALF + sum % VECTORS * 4;
    }
    // Bytes. Inputs are counted from the first of a turn.
    static constexpr int weights_at(int vector, int input) { return input % TURN * 4 * HALF + vector * 16; }
    static constexpr int widened_at(int vector, int input) { return (vector * TURN + input % TURN) * 32; }

    template <int INPUT>
    inline __attribute__((always_inline)) const Pair* turn_of() const {
        return INPUT < TURN ? here_ : next_;
    }

    template <int VECTOR, int INPUT>
    inline __attribute__((always_inline)) void load_pairs() {
        asm volatile("ldr %q0, [%1, %2]" : "=w"(pairs_[VECTOR]) : "r"(turn_of<INPUT>()), "i"(weights_at(VECTOR, INPUT)));
    }

    template <int VECTOR, int INPUT>
    inline __attribute__((always_inline)) void widen_by_integer_units() {
        uint64_t first, second, low, lower;
        asm volatile(
            "ldp %0, %1, [%4, %5]\n\t"
            "and %2, %8, %0, lsl 16\n\t"
            "and %3, %8, %1, lsl 16\n\t"
            "and %0, %8, %0\n\t"
            "and %1, %8, %1\n\t"
            "stp %2, %3, [%6, %7]\n\t"
            "stp %0, %1, [%6, %7 + 16]"
            : "=&r"(first), "=&r"(second), "=&r"(low), "=&r"(lower)
            : "r"(turn_of<INPUT>()), "i"(weights_at(VECTOR, INPUT)), "r"(places_), "i"(widened_at(VECTOR, INPUT)),
              "r"(HALVES)
            : "memory");
    }

    // Gets the lower outputs of a step's weights into registers, or both if they are in memory already.
    template <int STEP>
    inline __attribute__((always_inline)) void prepare_low() {
        constexpr int VECTOR = STEP % VECTORS, INPUT = STEP / VECTORS;
        auto& wide = wide_[STEP % (EARLY + 1)];
        if constexpr (by_vector_units(VECTOR))
            asm volatile("trn1 %0.8h, %1.8h, %2.8h" : "=w"(wide[0]) : "w"(zeros_), "w"(pairs_[VECTOR]));
        else
            asm volatile("ldp %q0, %q1, [%2, %3]"
                         : "=w"(wide[0]), "=w"(wide[1])
                         : "r"(places_), "i"(widened_at(VECTOR, INPUT))
                         : "memory");
    }

    template <int STEP>
    inline __attribute__((always_inline)) void prepare_high() {
        constexpr int VECTOR = STEP % VECTORS, INPUT = STEP / VECTORS;
        if constexpr (by_vector_units(VECTOR)) {
            auto& wide = wide_[STEP % (EARLY + 1)];
            asm volatile("trn2 %0.8h, %1.8h, %2.8h" : "=w"(wide[1]) : "w"(zeros_), "w"(pairs_[VECTOR]));
            load_pairs<VECTOR, INPUT + 1>();
        }
    }

    template <int STEP, int ROW>
    inline __attribute__((always_inline)) void add_row(const float* x, float32x4_t* inputs) {
        if constexpr (ROW < ROWS) {
            constexpr int VECTOR = STEP % VECTORS, NUMBER = STEP / VECTORS * ROWS + ROW;
            auto& wide = wide_[STEP % (EARLY + 1)];
            float32x4_t& four = inputs[NUMBER / 4];
            if constexpr (VECTOR == 0 && NUMBER % 4 == 0)
                asm volatile("ldr %q0, [%1, %2]" : "=w"(four) : "r"(x), "i"(NUMBER * 4) : "memory");
            asm volatile("fmla %0.4s, %1.4s, %2.s[%3]"
                         : "+w"(total_[sum_of(ROW, 0, VECTOR)])
                         : "w"(wide[0]), "w"(four), "i"(NUMBER % 4));
            asm volatile("fmla %0.4s, %1.4s, %2.s[%3]"
                         : "+w"(total_[sum_of(ROW, 1, VECTOR)])
                         : "w"(wide[1]), "w"(four), "i"(NUMBER % 4));
        }
    }

    template <int STEP>
    inline __attribute__((always_inline)) void step(const float* x, float32x4_t* inputs) {
        constexpr int VECTOR = STEP % VECTORS, INPUT = STEP / VECTORS;
        if constexpr (VECTOR == 0 && INPUT % PASSES == PASS)
            asm volatile("prfm pldl1keep, [%0, %1]" ::"r"(here_), "i"((ASKED + INPUT) * LINE));
        prepare_low<STEP + EARLY>();
        if constexpr (!by_vector_units(VECTOR)) widen_by_integer_units<VECTOR, INPUT + DELAY>();
        add_row<STEP, 0>(x, inputs);
        prepare_high<STEP + EARLY>();
        add_row<STEP, 1>(x, inputs);
        add_row<STEP, 2>(x, inputs);
        add_row<STEP, 3>(x, inputs);
        add_row<STEP, 4>(x, inputs);
        add_row<STEP, 5>(x, inputs);
    }

    template <int... STEP>
    inline __attribute__((always_inline)) void steps(const float* x, float32x4_t* inputs,
                                                     std::integer_sequence<int, STEP...>) {
        (step<STEP>(x, inputs), ...);
    }

    template <int VECTOR>
    inline __attribute__((always_inline)) void start_vector() {
        if constexpr (by_vector_units(VECTOR)) {
            load_pairs<VECTOR, 0>();
        } else {
            widen_by_integer_units<VECTOR, 0>();
            widen_by_integer_units<VECTOR, 1>();
        }
    }

    template <int... VECTOR>
    inline __attribute__((always_inline)) void start_vectors(std::integer_sequence<int, VECTOR...>) {
        (start_vector<VECTOR>(), ...);
    }

    template <int... STEP>
    inline __attribute__((always_inline)) void start_steps(std::integer_sequence<int, STEP...>) {
        ((prepare_low<STEP>(), prepare_high<STEP>()), ...);
    }

    const Pair *here_, *next_;  // of this turn and the next
    float* places_;             // widened weights, [VECTORS, TURN, 8]
    float32x4_t total_[SUMS], wide_[EARLY + 1][2];
    uint16x8_t pairs_[VECTORS], zeros_ = vdupq_n_u16(0);
};

// Inlined, it would run out of registers.
template <int ROWS, int PASS>
__attribute__((noinline)) void add_turns(const float* x, const Pair* weights, long turns, float* sums, bool begin) {
    using Tile = PairTile<ROWS, PASS>;
    constexpr int FIRST = PASS * Tile::VECTORS * 4;
    alignas(64) float places[Tile::VECTORS * TURN * 8];
    Tile tile(weights + FIRST, places);
    tile.load(sums + FIRST, begin);
    tile.start();
    for (; turns > 0; turns--, x += TURN * ROWS) tile.add(x, turns == 1);
    tile.store(sums + FIRST);
}

// Weights lie as [count, HALF] pairs, inputs as [count, ROWS].
template <int ROWS>
void add_few(const float* x, const Pair* weights, long count, float* sums, bool begin) {
    long turns = count / TURN, done = turns * TURN;
    if (turns) {
        add_turns<ROWS, 0>(x, weights, turns, sums, begin);
        if constexpr (ROWS > 3) add_turns<ROWS, 1>(x, weights, turns, sums, begin);
    }
    if (done < count)
        add_pairs<ROWS>(PackedInputs<ROWS>{x + done * ROWS}, weights + done * HALF, count - done, sums,
                        begin && done == 0);
}

}  // namespace weft
