// Activation functions by the number that Python gives them (activation.py).
#pragma once

#include "vector.h"

namespace weft {

enum Activation { NONE, SILU, GELU, GELU_TANH, RELU, SQUARED_RELU, SIGMOID };

inline Vector error_function(Vector x) {
    for (long i = 0; i < LANES; i++) x[i] = std::erf(x[i]);
    return x;
}

inline Vector activated(Vector x, long kind) {
    switch (kind) {
        case SILU: return x * sigmoid(x);
        case GELU: return 0.5f * x * (1.0f + error_function(x * 0.707106781f));
        case GELU_TANH: return 0.5f * x * (1.0f + tangent(0.797884561f * (x + 0.044715f * x * x * x)));
        case RELU: return if_less(x, Vector{}, Vector{}, x);
        case SQUARED_RELU: return if_less(x, Vector{}, Vector{}, x * x);
        case SIGMOID: return sigmoid(x);
        default: return x;
    }
}

}  // namespace weft
