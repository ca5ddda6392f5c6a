// Replay of a recorded step: kernels one after the other, without Python in between.

struct Call {
    void (*kernel)(const void* values);
    const void* values;
};

extern "C" void weft_replay(const Call* calls, long count) {
    for (long i = 0; i < count; i++) calls[i].kernel(calls[i].values);
}
