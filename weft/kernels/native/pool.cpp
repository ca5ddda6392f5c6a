// Threads take pieces in turn. The caller takes part and never waits for a thread that has not begun: if other programs
// keep a core busy, the other cores do the work. (OpenMP waits for every thread at the end of a loop, and a step of
// some hundred loops then takes a second.) Threads poll for work for a while before they sleep, because the next kernel
// of a step is only microseconds away.
#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

namespace weft {
namespace {

class Pool {
   public:
    // Never destroyed: its threads may outlive static destructors.
    static Pool& shared() {
        static Pool* pool = new Pool;
        return *pool;
    }

    void run(long pieces, long threads, Piece piece, const void* work) {
        std::unique_lock<std::mutex> alone(busy_, std::try_to_lock);
        if (!alone.owns_lock()) {
            for (long index = 0; index < pieces; index++) piece(work, index);
            return;
        }
        grow(threads - 1);
        piece_ = piece;
        work_ = work;
        pieces_ = pieces;
        done_.store(0, std::memory_order_relaxed);
        helpers_.store(threads - 1, std::memory_order_relaxed);
        left_.store(pieces, std::memory_order_seq_cst);
        if (asleep_.load(std::memory_order_seq_cst)) {
            std::lock_guard<std::mutex> held(sleep_);
            wake_.notify_all();
        }
        while (take()) {
        }
        for (long spins = 0; done_.load(std::memory_order_acquire) < pieces; spins++)
            spins < PATIENCE ? pause() : std::this_thread::yield();
    }

   private:
    static constexpr long PATIENCE = 1000;
    static constexpr auto LOOKOUT = std::chrono::milliseconds(2);

    // Run one piece, if one is left. Its fields may be read after it was taken: the next work begins only when all
    // pieces of this one are done.
    bool take() {
        long left = left_.load(std::memory_order_acquire);
        while (left > 0)
            if (left_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel)) {
                // In order, because processors fetch ahead what follows in memory.
                piece_(work_, pieces_ - left);
                done_.fetch_add(1, std::memory_order_release);
                return true;
            }
        return false;
    }

    void grow(long wanted) {
        try {
            for (; size_ < wanted; size_++) std::thread([this, number = size_] { help(number); }).detach();
        } catch (const std::exception&) {
            // The system has no more threads, or no memory for one: the caller does the rest.
        }
    }

    void help(long number) {
        for (;;) {
            auto until = std::chrono::steady_clock::now() + LOOKOUT;
            while (std::chrono::steady_clock::now() < until)
                for (long spins = 0; spins < 64; spins++) {
                    if (number < helpers_.load(std::memory_order_relaxed) && take())
                        until = std::chrono::steady_clock::now() + LOOKOUT;
                    else
                        pause();
                    // Yield to other work for this core: torch's own threads have some, in steps of many rows.
                    if (spins % 16 == 15) std::this_thread::yield();
                }
            sleep();
        }
    }

    void sleep() {
        std::unique_lock<std::mutex> held(sleep_);
        asleep_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(held, [this] { return left_.load(std::memory_order_seq_cst) > 0; });
        asleep_.fetch_sub(1, std::memory_order_seq_cst);
    }

    static void pause() {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    std::mutex busy_, sleep_;
    std::condition_variable wake_;
    long size_ = 0, pieces_ = 0;
    Piece piece_ = nullptr;
    const void* work_ = nullptr;
    alignas(64) std::atomic<long> left_{0};
    alignas(64) std::atomic<long> done_{0};
    alignas(64) std::atomic<long> helpers_{0};
    std::atomic<long> asleep_{0};
};

}  // namespace

void run_pieces(long pieces, long threads, Piece piece, const void* work) {
    Pool::shared().run(pieces, threads, piece, work);
}

}  // namespace weft
