// How long each verb's kernels take, without Python and torch: ranks are forked processes, one a
// GPU (or several, if there are fewer), that run the library's Runtime on random routing.
//
//   make kernel-times
//   build/kernel_times [ranks] [tokens] [hidden] [experts] [topk] [SMs ...]
//
// A negative number of SMs prints what rank 0 did, span by span, as well.
//
// Builds in seconds and runs in one, so that a change to a kernel can be timed many times in a
// minute. Medians of the slowest rank in microseconds; bf16, fresh routing each time, inputs in
// rotation.
#include <cuda_runtime.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "one_node.h"

namespace {

using hybrid_ep::check_cuda;

constexpr int kMaxRanks = 16, kInputs = 3, kWarmup = 4, kCalls = 20;
constexpr int kPhases = 5;
const char* const kPhaseNames[kPhases] = {"fresh", "cached", "combine", "pull the bytes",
                                          "push the bytes"};
const char* const kSpanNames[] = {"publish routing", "await routing", "assign rows", "publish rows",
                                  "zero padding",    "await rows",    "pull rows",   "await inbox",
                                  "push sums",       "await sums",    "sum at home"};

// Shared by the processes.
struct Board {
    std::atomic<int> arrived, round;
    char ipc_handles[kMaxRanks][256];
    float us[kMaxRanks][kCalls][kPhases];
};

struct Shape {
    int ranks, tokens, hidden, experts, topk;
};

void barrier(Board* board, int ranks) {
    const int round = board->round.load();
    if (board->arrived.fetch_add(1) + 1 == ranks) {
        board->arrived = 0;
        board->round.fetch_add(1);
    } else {
        while (board->round.load() == round) usleep(5);
    }
}

template <typename T>
T* to_device(const std::vector<T>& values) {
    T* to = nullptr;
    check_cuda(cudaMalloc(&to, values.size() * sizeof(T)), "an input");
    check_cuda(cudaMemcpy(to, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
               "an input");
    return to;
}

template <typename T>
T* room(int64_t count) {
    T* at = nullptr;
    check_cuda(cudaMalloc(&at, std::max<int64_t>(count * sizeof(T), 16)), "an output");
    return at;
}

constexpr size_t kBallastBytes = 1ull << 30;

// About a millisecond of work.
void keep_busy(char* ballast, cudaStream_t stream) {
    for (int i = 0; i < 3; ++i) cudaMemsetAsync(ballast, 0, kBallastBytes, stream);
}

struct Inputs {
    const uint16_t* x;
    const int32_t* topk_idx;
    const float* weights;
};

Inputs draw(const Shape& shape, std::mt19937& random) {
    // bf16 between 1 and 2, of either sign: what matters is that bits differ
    std::vector<uint16_t> x(int64_t(shape.tokens) * shape.hidden);
    for (auto& value : x) value = uint16_t(0x3F80 | (random() & 0x807F));
    std::vector<int32_t> topk_idx(int64_t(shape.tokens) * shape.topk), experts(shape.experts);
    for (int e = 0; e < shape.experts; ++e) experts[e] = e;
    for (int t = 0; t < shape.tokens; ++t) {
        for (int k = 0; k < shape.topk; ++k) {
            std::swap(experts[k], experts[k + random() % (shape.experts - k)]);
            topk_idx[int64_t(t) * shape.topk + k] = experts[k];
        }
    }
    std::vector<float> weights(topk_idx.size());
    for (auto& weight : weights) weight = float(random() % 1000) / 1000.f;
    return {to_device(x), to_device(topk_idx), to_device(weights)};
}

// What rank 0 did: each span from the first block's begin to the last one's end, and how long it
// took a block; medians over the calls.
void print_spans(const std::vector<hybrid_ep::TraceEvent>& events) {
    std::map<std::pair<int, uint32_t>, std::pair<uint64_t, uint64_t>> whole;  // (span, call)
    std::map<int, std::vector<float>> of_block, of_call;
    for (const auto& e : events) {
        auto& [begin, end] = whole.try_emplace({e.span, e.epoch}, ~0ull, 0ull).first->second;
        begin = std::min(begin, e.begin_ns);
        end = std::max(end, e.end_ns);
        of_block[e.span].push_back((e.end_ns - e.begin_ns) / 1e3f);
    }
    for (const auto& [key, range] : whole) {
        of_call[key.first].push_back((range.second - range.first) / 1e3f);
    }
    auto median = [](std::vector<float>& v) {
        std::nth_element(v.begin(), v.begin() + v.size() / 2, v.end());
        return v[v.size() / 2];
    };
    for (auto& [span, times] : of_call) {
        std::printf("  %s %.0f (a block %.1f, %zu)\n", kSpanNames[span], median(times),
                    median(of_block[span]), of_block[span].size() / times.size());
    }
    std::fflush(stdout);
}

void run_rank(Board* board, const Shape& shape, int rank, int sms, bool trace) {
    int gpus = 0;
    check_cuda(cudaGetDeviceCount(&gpus), "number of GPUs");
    const int device = rank % gpus;
    check_cuda(cudaSetDevice(device), "device");
    hybrid_ep::RuntimeConfig config{};
    config.device = device;
    config.rank = rank;
    config.num_ranks = shape.ranks;
    config.num_experts = shape.experts;
    config.max_tokens = shape.tokens;
    config.topk = shape.topk;
    config.row_capacity = config.inbox_row_bytes = shape.hidden * 2;
    config.num_sms_publish = config.num_sms_dispatch = config.num_sms_combine = sms;
    config.slice_bytes = 16384;
    config.timeout_s = 10;
    config.trace = trace;
    hybrid_ep::Runtime runtime(config, hybrid_ep::kOneNode);
    if (shape.ranks > 1) {
        const std::string mine = runtime.ipc_handle();
        std::memcpy(board->ipc_handles[rank], mine.data(), mine.size());
        barrier(board, shape.ranks);
        std::vector<std::string> handles;
        for (int r = 0; r < shape.ranks; ++r) {
            handles.emplace_back(board->ipc_handles[r], mine.size());
        }
        runtime.open_peers(handles);
    }

    std::mt19937 random(rank + 1);
    std::vector<Inputs> inputs;
    for (int i = 0; i < kInputs; ++i) inputs.push_back(draw(shape, random));
    const int row_bytes = shape.hidden * 2, local = shape.experts / shape.ranks;
    const int64_t most_rows = int64_t(shape.tokens) * shape.ranks * std::min(shape.topk, local);
    auto *words = room<int32_t>(runtime.handle_words()), *sizes = room<int32_t>(4 * local + 4);
    auto *rows = room<char>(most_rows * row_bytes), *ballast = room<char>(kBallastBytes),
         *y = room<char>(int64_t(shape.tokens) * row_bytes);
    auto* row_weights = room<float>(most_rows);
    cudaStream_t stream;
    check_cuda(cudaStreamCreate(&stream), "stream");
    const auto on = reinterpret_cast<uintptr_t>(stream);
    cudaEvent_t marks[kPhases + 2];
    for (auto& mark : marks) check_cuda(cudaEventCreate(&mark), "event");

    for (int call = 0; call < kWarmup + kCalls; ++call) {
        const Inputs& in = inputs[call % kInputs];
        hybrid_ep::Choices choices{in.topk_idx, 4, shape.topk, shape.tokens, 1, -1, nullptr, 0, 0};
        int32_t* told = sizes + 2 * local + 2;
        const hybrid_ep::NewLayout layout{words, sizes,    sizes + local,
                                          told,  told + 1, reinterpret_cast<int64_t*>(told + 2)};
        const uint64_t ticket = runtime.route(choices, layout, true, on);
        const auto offsets = runtime.await_offsets(ticket, on, [] { return false; });
        if (!offsets) break;
        barrier(board, shape.ranks);
        keep_busy(ballast, stream);  // so that the host is ahead of the GPU
        // the ranks meet in a dispatch that is not timed
        const hybrid_ep::Sent sent{reinterpret_cast<const char*>(in.x),
                                   row_bytes,
                                   row_bytes,
                                   in.weights,
                                   shape.topk,
                                   /*scales*/ nullptr,
                                   0,
                                   0,
                                   /*dtypes*/ 0,
                                   shape.tokens,
                                   words};
        const hybrid_ep::Received received{rows, row_weights, nullptr, offsets->back()};
        runtime.dispatch(sent, received, on);
        cudaEventRecord(marks[0], stream);
        choices.max_rows = offsets->back();
        runtime.dispatch_fresh(choices, layout, sent, received, on);
        cudaEventRecord(marks[1], stream);
        runtime.dispatch(sent, received, on);
        cudaEventRecord(marks[2], stream);
        runtime.combine({rows, offsets->back(), hybrid_ep::SumType::kBf16, row_bytes, nullptr,
                         nullptr, y, nullptr, shape.tokens, words},
                        on);
        cudaEventRecord(marks[3], stream);
        check_cuda(cudaStreamSynchronize(stream), "the kernels");
        barrier(board, shape.ranks);
        const int64_t bytes = int64_t(shape.tokens) * row_bytes;
        keep_busy(ballast, stream);
        cudaEventRecord(marks[4], stream);
        runtime.copy_peer((rank + 1) % shape.ranks, bytes, sms, false, on);
        cudaEventRecord(marks[5], stream);
        runtime.copy_peer((rank + 1) % shape.ranks, bytes, sms, true, on);
        cudaEventRecord(marks[6], stream);
        check_cuda(cudaStreamSynchronize(stream), "the copies");
        barrier(board, shape.ranks);
        for (int phase = 0; phase < kPhases && call >= kWarmup; ++phase) {
            float ms = 0;
            const int from = phase < 3 ? phase : phase + 1;  // the copies begin at a mark of theirs
            cudaEventElapsedTime(&ms, marks[from], marks[from + 1]);
            board->us[rank][call - kWarmup][phase] = ms * 1e3f;
        }
    }
    cudaStreamSynchronize(stream);
    if (const auto fault = runtime.fault()) {
        std::fprintf(stderr, "rank %d waited for rank %d in vain\n", rank, fault->peer);
        std::exit(1);
    }
    if (trace && rank == 0) print_spans(runtime.take_trace());
    barrier(board, shape.ranks);
    runtime.destroy();
}

int median_us(const Board* board, int ranks, int phase) {
    std::vector<float> slowest(kCalls, 0.f);
    for (int call = 0; call < kCalls; ++call) {
        for (int r = 0; r < ranks; ++r) {
            slowest[call] = std::max(slowest[call], board->us[r][call][phase]);
        }
    }
    std::nth_element(slowest.begin(), slowest.begin() + kCalls / 2, slowest.end());
    return int(slowest[kCalls / 2] + 0.5f);
}

}  // namespace

int main(int argc, char** argv) {
    auto argument = [&](int i, int otherwise) { return argc > i ? std::atoi(argv[i]) : otherwise; };
    const Shape shape{argument(1, 2), argument(2, 4096), argument(3, 7168), argument(4, 16),
                      argument(5, 8)};
    if (shape.ranks < 1 || shape.ranks > kMaxRanks || shape.experts % shape.ranks != 0 ||
        shape.topk > shape.experts) {
        std::fprintf(stderr, "1 to %d ranks that divide the experts, topk of these\n", kMaxRanks);
        return 2;
    }
    std::vector<int> sms;
    for (int i = 6; i < argc; ++i) sms.push_back(std::atoi(argv[i]));
    if (sms.empty()) sms = {16, 32, 48};
    for (int count : sms) {
        void* shared =
            mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        auto* board = new (shared) Board{};
        std::vector<pid_t> ranks;
        for (int rank = 0; rank < shape.ranks; ++rank) {
            const pid_t child = fork();
            if (child != 0) {
                ranks.push_back(child);
                continue;
            }
            try {
                run_rank(board, shape, rank, std::abs(count), count < 0);
            } catch (const std::exception& error) {
                std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
                _exit(1);
            }
            _exit(0);
        }
        bool good = true;
        for (int rank = 0, status = 0; rank < shape.ranks; ++rank) {
            wait(&status);
            if (status == 0) continue;
            good = false;
            for (pid_t other : ranks) kill(other, SIGKILL);  // they would wait for it
        }
        if (!good) return 1;
        std::printf("E %d, %d SMs:", shape.experts, std::abs(count));
        for (int phase = 0; phase < kPhases; ++phase) {
            std::printf(" %s %d", kPhaseNames[phase], median_us(board, shape.ranks, phase));
        }
        std::printf(" us\n");
        munmap(shared, sizeof(Board));
    }
    return 0;
}
