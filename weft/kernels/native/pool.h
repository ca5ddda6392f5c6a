// Shares the pieces of a kernel among threads. How is in pool.cpp, because headers of threads take long to compile.
#pragma once

namespace weft {

using Piece = void (*)(const void* work, long index);

// piece(work, index) for every index below `pieces`, on up to `threads` threads; returns when all are done.
void run_pieces(long pieces, long threads, Piece piece, const void* work);

// body(index) for every index below `pieces`, on up to `threads` threads.
template <class Body>
void share(long pieces, long threads, const Body& body) {
    if (threads < 2 || pieces < 2) {
        for (long index = 0; index < pieces; index++) body(index);
        return;
    }
    run_pieces(
        pieces, threads, [](const void* work, long index) { (*static_cast<const Body*>(work))(index); }, &body);
}

}  // namespace weft
