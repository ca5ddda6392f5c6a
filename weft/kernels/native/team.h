// Threads of PyTorch's OpenMP, for work between two matmuls of PyTorch's library. After a matmul they wait for the next
// one without leaving their cores, for milliseconds, and the threads of the pool would not get there.
#pragma once

#include "pool.h"

namespace weft {

// OpenMP's function for a parallel region, `GOMP_parallel`: runs body(data) on each of the threads.
using Parallel = void (*)(void (*body)(void* data), void* data, unsigned threads, unsigned flags);

// body(index) for every index below `pieces`, on up to `threads` threads of the team; of the pool if there is no team.
template <class Body>
void share_in_team(Parallel parallel, long pieces, long threads, const Body& body) {
    if (!parallel || threads < 2 || pieces < 2) return share(pieces, threads, body);
    struct Work {
        const Body& body;
        long pieces;
        std::atomic<long> next{0};
    } work{body, pieces};
    auto take = [](void* data) {
        auto work = static_cast<Work*>(data);
        for (long piece; (piece = work->next.fetch_add(1, std::memory_order_relaxed)) < work->pieces;)
            work->body(piece);
    };
    parallel(take, &work, unsigned(threads), 0);
}

}  // namespace weft
