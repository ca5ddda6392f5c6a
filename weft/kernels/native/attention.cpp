// Attention over pages of the model's own type.

#include "attention.h"

extern "C" void weft_attention(const weft::Layer* call) { weft::attend_layer<void>(*call); }
