#include "network_runtime.h"

#include <algorithm>
#include <stdexcept>

#include "device_guard.h"

namespace hybrid_ep {
namespace {

template <typename T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

cudaStream_t to_stream(uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

}  // namespace

NetworkRuntime::NetworkRuntime(const NetworkConfig& config, const kernels::NetworkKernels& kernels)
    : config_(config), kernels_(kernels) {
    DeviceGuard guard(config.device);
    // one block per SM, all resident, and at least one for each role
    int num_sms = 0;
    check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, config.device),
               "number of SMs");
    const int most = std::min(num_sms, layout::kMaxChannels);
    config_.num_sms_publish = std::min(config.num_sms_publish, most);
    config_.num_sms_dispatch = std::clamp(config.num_sms_dispatch, 2, most);
    config_.num_sms_combine = std::clamp(config.num_sms_combine, 3, most);
    config_.num_sms_send = std::clamp(config.num_sms_send, 1, config_.num_sms_dispatch - 1);

    calls_ = std::make_unique<CallState>(config.timeout_s, config.trace);
    context_.relay = config.layout();
    context_.node = config.rank / config.ranks_per_node;
    context_.local_rank = config.rank % config.ranks_per_node;
    context_.world.rank = config.rank;
    context_.world.buffer = context_.relay.world;
    context_.world.handle = layout::HandleLayout::make(context_.relay.world);
    context_.world.watch = calls_->watch();
    context_.world.trace = calls_->trace();
    context_.kept = layout::RelayHandleLayout::make(context_.world.handle, config.num_nodes);
    routing_blocks_ = std::min(context_.relay.world.num_chunks, 64);
}

void NetworkRuntime::attach(const std::vector<uintptr_t>& peers,
                            const std::vector<uintptr_t>& rails) {
    DeviceGuard guard(config_.device);
    for (int peer = 0; peer < config_.ranks_per_node; ++peer) {
        context_.peers.base[peer] = at<char>(peers.at(peer));
    }
    for (size_t node = 0; node < rails.size(); ++node) {
        context_.rails.base[node] = at<char>(rails[node]);
    }
    context_.world.mine() = context_.mine();
    check_cuda(cudaMemset(context_.mine(), 0, symmetric_bytes()), "zeroing symmetric memory");
    check_cuda(cudaDeviceSynchronize(), "zeroing symmetric memory");
}

void NetworkRuntime::destroy() {
    if (calls_ == nullptr) return;
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(config_.device);
    cudaDeviceSynchronize();  // this rank's kernels end within the deadline, whatever peers do
    calls_.reset();
    cudaSetDevice(before);
    cudaGetLastError();
}

uint64_t NetworkRuntime::route(uintptr_t topk_idx, int idx_bytes, int64_t idx_stride,
                               int num_tokens, int align, int64_t max_rows, bool want_mail,
                               uintptr_t words, uintptr_t counts, uintptr_t offsets,
                               uintptr_t required_rows, uintptr_t stream) {
    DeviceGuard guard(config_.device);
    kernels::SpreadRoutingParams spread{};
    spread.context = context_;
    spread.topk_idx = at<void>(topk_idx);
    spread.idx_bytes = idx_bytes;
    spread.idx_stride = idx_stride;
    spread.num_tokens = num_tokens;
    spread.num_blocks = routing_blocks_;
    spread.words = at<int32_t>(words);
    kernels_.spread_routing(spread, to_stream(stream));

    kernels::AssignRowsParams assign{};
    assign.context = context_.world;
    assign.num_publish_blocks = routing_blocks_;
    assign.align = align;
    assign.max_rows = max_rows;
    assign.words = at<int32_t>(words);
    assign.counts = at<int32_t>(counts);
    assign.offsets = at<int32_t>(offsets);
    assign.required_rows = at<int32_t>(required_rows);
    if (want_mail) {
        assign.ticket = calls_->next_ticket();
        assign.mail = calls_->mail_of(assign.ticket);
    }
    kernels::launch_assign_rows(assign, to_stream(stream));
    kernels::launch_keep_routing({context_, at<int32_t>(words)}, to_stream(stream));
    return assign.ticket;
}

void NetworkRuntime::publish(uintptr_t x, int64_t x_stride, int row_bytes, uintptr_t weights,
                             int64_t weights_stride, uintptr_t scales, int64_t scales_stride,
                             int scale_bytes, int num_tokens, uintptr_t words, uintptr_t stream) {
    DeviceGuard guard(config_.device);
    kernels::FillOutboxParams& p = fill_;
    p.context = context_;
    p.record = {row_bytes, scale_bytes, weights != 0 ? 4 * config_.topk : 0};
    p.x = at<char>(x);
    p.scales = at<char>(scales);
    p.weights = at<float>(weights);
    p.x_stride = x_stride;
    p.scales_stride = scales_stride;
    p.weights_stride = weights_stride;
    p.num_tokens = num_tokens;
    p.num_blocks = config_.num_sms_publish;
    p.slices = layout::SliceLayout::make(row_bytes, config_.slice_bytes);
    p.ring = layout::move_warp_ring(p.slices, p.record);
    p.words = at<int32_t>(words);
    kernels::launch_fill_outbox(p, to_stream(stream));
}

void NetworkRuntime::pull(uintptr_t rows, uintptr_t row_weights, uintptr_t row_scales,
                          int64_t num_rows, uintptr_t stream) {
    DeviceGuard guard(config_.device);
    kernels::RelayRowsParams p{};
    p.context = context_;
    p.record = fill_.record;
    p.rows = at<char>(rows);
    p.scales = at<char>(row_scales);
    p.weights = at<float>(row_weights);
    p.num_rows = num_rows;
    p.num_fill_blocks = fill_.num_blocks;
    p.num_send_blocks = config_.num_sms_send;
    p.num_pull_blocks = config_.num_sms_dispatch - config_.num_sms_send;
    p.slices = fill_.slices;
    p.ring = fill_.ring;
    p.words = fill_.words;
    kernels_.relay_rows(p, to_stream(stream));
}

void NetworkRuntime::dispatch(uintptr_t x, int64_t x_stride, int row_bytes, uintptr_t weights,
                              int64_t weights_stride, uintptr_t scales, int64_t scales_stride,
                              int scale_bytes, int num_tokens, uintptr_t words, uintptr_t rows,
                              uintptr_t row_weights, uintptr_t row_scales, int64_t num_rows,
                              uintptr_t stream) {
    publish(x, x_stride, row_bytes, weights, weights_stride, scales, scales_stride, scale_bytes,
            num_tokens, words, stream);
    pull(rows, row_weights, row_scales, num_rows, stream);
}

void NetworkRuntime::dispatch_fresh(uintptr_t topk_idx, int idx_bytes, int64_t idx_stride,
                                    int align, uintptr_t sizes, uintptr_t x, int64_t x_stride,
                                    int row_bytes, uintptr_t weights, int64_t weights_stride,
                                    uintptr_t scales, int64_t scales_stride, int scale_bytes,
                                    int num_tokens, uintptr_t words, uintptr_t rows,
                                    uintptr_t row_weights, uintptr_t row_scales, int64_t num_rows,
                                    uintptr_t stream) {
    const int experts = context_.relay.world.num_local_experts;
    const uintptr_t offsets = sizes + sizeof(int32_t) * experts;
    const uintptr_t required_rows = offsets + sizeof(int32_t) * (experts + 1);
    route(topk_idx, idx_bytes, idx_stride, num_tokens, align, num_rows, false, words, sizes,
          offsets, required_rows, stream);
    dispatch(x, x_stride, row_bytes, weights, weights_stride, scales, scales_stride, scale_bytes,
             num_tokens, words, rows, row_weights, row_scales, num_rows, stream);
}

void NetworkRuntime::combine(uintptr_t rows, int type, int row_bytes, uintptr_t weights,
                             uintptr_t values, uintptr_t y, uintptr_t home_values, int num_tokens,
                             uintptr_t words, uintptr_t stream) {
    DeviceGuard guard(config_.device);
    kernels::RelaySumsParams p{};
    p.context = context_;
    p.type = kernels::SumType(type);
    p.row_bytes = row_bytes;
    p.rows = at<char>(rows);
    p.weights = at<float>(weights);
    p.values = at<float>(values);
    p.y = at<char>(y);
    p.home_values = at<float>(home_values);
    p.num_tokens = num_tokens;
    // pushing reads every row of the experts, the other roles only sums of them
    p.num_forward_blocks = p.num_home_blocks = std::max(1, config_.num_sms_combine / 4);
    p.num_push_blocks = config_.num_sms_combine - p.num_forward_blocks - p.num_home_blocks;
    p.ring = layout::sum_warp_ring();
    p.words = at<int32_t>(words);
    kernels_.relay_sums(p, to_stream(stream));
}

std::optional<int64_t> NetworkRuntime::required_rows(uint64_t ticket, uintptr_t stream) const {
    return calls_->required_rows(ticket, to_stream(stream));
}

std::optional<FaultReport> NetworkRuntime::fault() const {
    return calls_ == nullptr ? std::nullopt : calls_->fault();
}

std::vector<TraceEvent> NetworkRuntime::take_trace() {
    DeviceGuard guard(config_.device);
    return calls_->take_trace();
}

}  // namespace hybrid_ep
