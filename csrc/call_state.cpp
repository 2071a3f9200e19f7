#include "call_state.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "check.h"
#include "layout/buffer_layout.h"

namespace hybrid_ep {

CallState::CallState(const RuntimeConfig& config)
    : timeout_s_(config.timeout_s), num_local_experts_(config.num_experts / config.num_ranks) {
    try {
        make(config);
    } catch (...) {
        destroy();
        throw;
    }
}

void CallState::make(const RuntimeConfig& config) {
    check_cuda(cudaMalloc(reinterpret_cast<void**>(&state_), sizeof(DeviceState)), "call state");
    DeviceState state{};
    state.epoch[int(layout::Phase::kRoute)] = uint64_t(config.num_routes);
    state.layout_base = uint64_t(config.layout_base);
    check_cuda(cudaMemcpy(state_, &state, sizeof(state), cudaMemcpyHostToDevice), "call state");
    if (config.trace) {
        check_cuda(cudaMalloc(reinterpret_cast<void**>(&trace_.events),
                              Trace::kCapacity * sizeof(TraceEvent)),
                   "trace");
        check_cuda(cudaMalloc(reinterpret_cast<void**>(&trace_.count), sizeof(uint32_t)), "trace");
        check_cuda(cudaMemset(trace_.count, 0, sizeof(uint32_t)), "trace");
    }
    void* host = nullptr;
    const size_t fault_bytes = layout::round_up<size_t>(sizeof(Fault), 128);
    const size_t host_bytes = fault_bytes + kMails * mail_bytes();
    check_cuda(cudaHostAlloc(&host, host_bytes, cudaHostAllocMapped | cudaHostAllocPortable),
               "mapped host memory");
    std::fill_n(static_cast<char*>(host), host_bytes, 0);
    fault_ = static_cast<Fault*>(host);
    mail_ = static_cast<char*>(host) + fault_bytes;
    // A copy from pageable memory may return before it has arrived, and calls come on any stream.
    check_cuda(cudaDeviceSynchronize(), "call state");
}

void CallState::destroy() {
    cudaFree(trace_.events);
    cudaFree(trace_.count);
    cudaFree(state_);
    cudaFreeHost(fault_);
    trace_ = {};
    state_ = nullptr;
    fault_ = nullptr;
    mail_ = nullptr;
}

Watch CallState::watch(const void* calls) const {
    // so long that half as much again, which some waits keep, does not overflow: 146 years
    constexpr uint64_t kNever = 1ull << 62;
    const double ns = timeout_s_ * 1e9;
    const uint64_t timeout_ns = ns < double(kNever) ? uint64_t(ns) : kNever;
    return {state_, fault_, static_cast<const uint64_t*>(calls), timeout_ns};
}

int64_t CallState::num_routes() const {
    DeviceState state{};
    check_cuda(cudaDeviceSynchronize(), "the kernels of the Buffer");
    check_cuda(cudaMemcpy(&state, state_, sizeof(state), cudaMemcpyDeviceToHost), "call state");
    return int64_t(state.epoch[int(layout::Phase::kRoute)]);
}

std::optional<std::vector<int32_t>> CallState::await_offsets(uint64_t ticket, cudaStream_t stream,
                                                             bool (*is_interrupted)()) const {
    Mail* mail = mail_of(ticket);
    const auto start = std::chrono::steady_clock::now();
    // the kernels keep the deadline; this one is for a GPU that makes no progress at all
    const auto deadline = std::chrono::duration<double>(2 * timeout_s_ + 10);
    for (uint64_t polls = 1; __atomic_load_n(&mail->ticket, __ATOMIC_ACQUIRE) != ticket; ++polls) {
        if (polls % 1024 != 0) continue;
        if (fault()) return std::nullopt;
        if (std::chrono::steady_clock::now() - start > deadline) return std::nullopt;
        if (polls % (1 << 16) == 0) {
            cudaError_t error = cudaStreamQuery(stream);
            if (error != cudaErrorNotReady) check_cuda(error, "the kernels of a dispatch");
            if (is_interrupted()) return std::nullopt;
        }
        std::this_thread::yield();
    }
    return std::vector<int32_t>(mail->offsets(), mail->offsets() + num_local_experts_ + 1);
}

std::vector<TraceEvent> CallState::take_trace() {
    if (trace_.events == nullptr) return {};
    uint32_t count = 0;
    check_cuda(cudaDeviceSynchronize(), "the kernels of the trace");
    check_cuda(cudaMemcpy(&count, trace_.count, sizeof(count), cudaMemcpyDeviceToHost), "trace");
    std::vector<TraceEvent> events(std::min(count, Trace::kCapacity));
    check_cuda(cudaMemcpy(events.data(), trace_.events, events.size() * sizeof(TraceEvent),
                          cudaMemcpyDeviceToHost),
               "trace");
    check_cuda(cudaMemset(trace_.count, 0, sizeof(uint32_t)), "trace");
    check_cuda(cudaDeviceSynchronize(), "trace");  // the next call may come on any stream
    return events;
}

std::optional<FaultReport> CallState::fault() const {
    if (fault_ == nullptr) return std::nullopt;
    const uint64_t kind = __atomic_load_n(&fault_->kind, __ATOMIC_ACQUIRE);
    if (kind == 0) return std::nullopt;
    return FaultReport{int(kind),     fault_->phase, fault_->peer, fault_->channel,
                       fault_->epoch, fault_->seen,  fault_->mine};
}

}  // namespace hybrid_ep
