// Times llama.cpp without HTTP and without Python; see benchmarks/peers/llama_build.py.
//
//   llama_steps time MODEL THREADS REPEATS PROMPT SHORT LONG PREFILL ROWS...
//   llama_steps quantize MODEL TARGET THREADS bf16|f16|q8_0|q4_0
//
// `time` prints wall and CPU milliseconds as JSON, the best of the repetitions of each: of a decode step for each number
// of rows, after SHORT of the LONG tokens that follow prompts of PROMPT tokens; and of a prompt of PREFILL tokens.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <string>
#include <vector>

#include "llama.h"

namespace {

constexpr int BATCH = 2048;  // tokens of a call

struct Spent {
    double wall, cpu;  // milliseconds
};

Spent now() {
    timespec cpu;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu);
    auto wall = std::chrono::steady_clock::now().time_since_epoch();
    return {std::chrono::duration<double, std::milli>(wall).count(), cpu.tv_sec * 1e3 + cpu.tv_nsec * 1e-6};
}

// The best of several repetitions, by each clock.
struct Best {
    Spent least{1e12, 1e12};

    void add(Spent from, Spent to, double count) {
        least.wall = std::min(least.wall, (to.wall - from.wall) / count);
        least.cpu = std::min(least.cpu, (to.cpu - from.cpu) / count);
    }

    void print(const std::string& name, const char* end) const {
        std::printf("\"%s\": [%.3f, %.3f]%s", name.c_str(), least.wall, least.cpu, end);
    }
};

class Model {
   public:
    Model(const char* path, int threads, int rows, int length) {
        auto options = llama_model_default_params();
        options.n_gpu_layers = 0;
        model_ = llama_model_load_from_file(path, options);
        if (!model_) throw std::runtime_error("cannot load the model");
        auto wanted = llama_context_default_params();
        wanted.n_ctx = rows * length;
        wanted.n_batch = BATCH;
        wanted.n_ubatch = 512;
        wanted.n_seq_max = rows;
        wanted.kv_unified = true;
        wanted.n_threads = wanted.n_threads_batch = threads;
        const char* folder_end = std::strrchr(path, '/');
        if (std::strstr(folder_end ? folder_end : path, "f32")) wanted.type_k = wanted.type_v = GGML_TYPE_F32;
        context_ = llama_init_from_model(model_, wanted);
        if (!context_) throw std::runtime_error("cannot create a context");
        vocabulary_ = llama_vocab_n_tokens(llama_model_get_vocab(model_));
        batch_ = llama_batch_init(BATCH, 0, 1);
    }

    Best time_steps(int rows, int repeats, int prompt, int brief, int full) {
        Best best;
        for (int repeat = 0; repeat < repeats; repeat++) {
            std::vector<int> place(rows);
            clear();
            for (int row = 0; row < rows; row++) place[row] = read_prompt(row, prompt, repeat);
            decode();
            Spent began{};
            for (int step = 0; step < full; step++) {
                if (step == brief) began = now();
                std::vector<llama_token> tokens(rows);
                for (int row = 0; row < rows; row++) tokens[row] = likeliest(place[row]);
                batch_.n_tokens = 0;
                for (int row = 0; row < rows; row++) place[row] = add(tokens[row], prompt + step, row, true);
                decode();
            }
            best.add(began, now(), full - brief);
        }
        return best;
    }

    Best time_prompt(int length, int repeats) {
        Best best;
        // The first one allocates.
        for (int repeat = 0; repeat <= repeats; repeat++) {
            clear();
            int place = read_prompt(0, length, repeat);
            Spent began = now();
            decode();
            likeliest(place);
            if (repeat) best.add(began, now(), 1);
        }
        return best;
    }

   private:
    void clear() {
        llama_memory_clear(llama_get_memory(context_), true);
        batch_.n_tokens = 0;
    }

    int add(llama_token token, int position, int row, bool wants_logits) {
        if (batch_.n_tokens == BATCH) throw std::runtime_error("too many tokens for one call: fewer rows");
        int i = batch_.n_tokens++;
        batch_.token[i] = token;
        batch_.pos[i] = position;
        batch_.n_seq_id[i] = 1;
        batch_.seq_id[i][0] = row;
        batch_.logits[i] = wants_logits;
        return i;
    }

    // Returns the place of its last token in the batch.
    int read_prompt(int row, int length, int seed) {
        int place = 0;
        for (int i = 0; i < length; i++)
            place = add((row * 7919L + i * 104729L + seed) % vocabulary_, i, row, i == length - 1);
        return place;
    }

    void decode() {
        if (llama_decode(context_, batch_)) throw std::runtime_error("a step failed");
        llama_synchronize(context_);
    }

    llama_token likeliest(int place) {
        const float* logits = llama_get_logits_ith(context_, place);
        return llama_token(std::max_element(logits, logits + vocabulary_) - logits);
    }

    llama_model* model_;
    llama_context* context_;
    llama_batch batch_;
    int vocabulary_;
};

int quantize(const char* source, const char* target, int threads, const std::string& kind) {
    auto options = llama_model_quantize_default_params();
    options.nthread = threads;
    options.ftype = kind == "bf16"  ? LLAMA_FTYPE_MOSTLY_BF16
                    : kind == "f16" ? LLAMA_FTYPE_MOSTLY_F16
                    : kind == "q8_0" ? LLAMA_FTYPE_MOSTLY_Q8_0
                                     : LLAMA_FTYPE_MOSTLY_Q4_0;
    return llama_model_quantize(source, target, &options) ? 1 : 0;
}

}  // namespace

int main(int count, char** values) {
    auto show = [](ggml_log_level level, const char* text, void*) {
        if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
    };
    llama_log_set(show, nullptr);
    llama_backend_init();
    std::string task = count > 1 ? values[1] : "";
    if (task == "quantize" && count == 6) return quantize(values[2], values[3], std::stoi(values[4]), values[5]);
    if (task != "time" || count < 10) {
        std::fputs("usage: at the top of llama_steps.cpp\n", stderr);
        return 2;
    }
    std::vector<int> numbers;
    for (int i = 3; i < count; i++) numbers.push_back(std::stoi(values[i]));
    int threads = numbers[0], repeats = numbers[1], prompt = numbers[2], brief = numbers[3], full = numbers[4];
    int prefill = numbers[5];
    std::vector<int> rows(numbers.begin() + 6, numbers.end());
    Model model(values[2], threads, *std::max_element(rows.begin(), rows.end()), std::max(prefill, prompt + full));
    std::printf("{");
    for (int each : rows) model.time_steps(each, repeats, prompt, brief, full).print(std::to_string(each), ", ");
    model.time_prompt(prefill, repeats).print("prefill", "}\n");
}
