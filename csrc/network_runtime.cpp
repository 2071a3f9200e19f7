#include "network_runtime.h"

#include <algorithm>
#include <stdexcept>

#include "host_side.h"

namespace hybrid_ep {

NetworkRuntime::NetworkRuntime(const NetworkConfig& config, const kernels::NetworkKernels& kernels)
    : config_(config), kernels_(kernels) {
    DeviceGuard guard(config.device);
    require_shared_memory(config.device);
    // one block per SM, all resident, and at least one for each role
    int num_sms = 0;
    check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, config.device),
               "number of SMs");
    const int most = std::min(num_sms, layout::kMaxChannels);
    config_.num_sms_publish = std::min(config.num_sms_publish, most);
    config_.num_sms_dispatch = std::clamp(config.num_sms_dispatch, 2, most);
    config_.num_sms_combine = std::clamp(config.num_sms_combine, 3, most);
    config_.num_sms_send = config.num_nodes == 1
                               ? 0
                               : std::clamp(config.num_sms_send, 1, config_.num_sms_dispatch - 1);

    calls_ = std::make_shared<CallState>(config.timeout_s, config.trace, config.num_routes,
                                         config.layout_base);
    context_.relay = config.layout();
    require_at_most("bytes of symmetric memory", context_.relay.total_bytes, kMostTermBytes);
    context_.node = config.rank / config.ranks_per_node;
    context_.local_rank = config.rank % config.ranks_per_node;
    context_.num_routes = config.num_routes;
    context_.uses_mapped = config.uses_mapped;
    context_.world.rank = config.rank;
    context_.world.first_peer = context_.node * config.ranks_per_node;
    context_.world.num_peers = config.ranks_per_node;
    context_.world.buffer = context_.relay.world;
    context_.world.handle = layout::HandleLayout::make(context_.relay.world);
    context_.world.trace = calls_->trace();
    context_.kept = layout::RelayHandleLayout::make(context_.world.handle, config.num_nodes);
    routing_blocks_ = std::min(context_.relay.world.num_chunks, 64);
}

void NetworkRuntime::attach(const std::vector<uintptr_t>& peers,
                            const std::vector<uintptr_t>& rails) {
    DeviceGuard guard(config_.device);
    for (int peer = 0; peer < config_.ranks_per_node; ++peer) {
        context_.world.peers.base[peer] = at<char>(peers.at(peer));
    }
    for (size_t node = 0; node < rails.size(); ++node) {
        context_.rails.base[node] = at<char>(rails[node]);
    }
    context_.world.watch = calls_->watch(context_.at(context_.relay.world.calls_offset));
    check_cuda(cudaMemset(context_.mine(), 0, symmetric_bytes()), "zeroing symmetric memory");
    check_cuda(cudaDeviceSynchronize(), "zeroing symmetric memory");
}

void NetworkRuntime::delay_puts(int most_us) {
    DeviceGuard guard(config_.device);
    card_ = std::make_unique<DelayingNetworkCard>(config_.device, most_us, config_.rank);
    context_.queue = card_->queue();
}

void NetworkRuntime::destroy() {
    if (calls_ == nullptr) return;
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(config_.device);
    cudaDeviceSynchronize();  // this rank's kernels end within the deadline, whatever peers do
    card_.reset();
    calls_.reset();
    cudaSetDevice(before);
    cudaGetLastError();
}

uint64_t NetworkRuntime::route(const Choices& choices, const NewLayout& layout, bool want_mail,
                               uintptr_t stream) {
    DeviceGuard guard(config_.device);
    require_route(context_.relay.world, choices, layout);
    kernels::SpreadRoutingParams spread{};
    spread.context = context_;
    spread.choices = choices;
    spread.num_blocks = routing_blocks_;
    spread.words = layout.words;
    kernels_.spread_routing(spread, to_stream(stream));

    const kernels::AssignRowsParams assign =
        assign_rows_params(context_.world, routing_blocks_, choices, layout, want_mail, *calls_);
    kernels::launch_assign_rows(assign, to_stream(stream));
    kernels::launch_keep_routing({context_, layout.words}, to_stream(stream));
    return assign.ticket;
}

void NetworkRuntime::begin_dispatch(const Sent& sent) {
    rows_ = {};
    rows_.context = context_;
    rows_.dispatch = dispatch_params(context_.world, sent, config_.slice_bytes);
}

void NetworkRuntime::end_dispatch(const Received& received, uintptr_t stream) {
    rows_.dispatch.pulls = true;
    rows_.dispatch.received = received;
    rows_.dispatch.num_blocks = config_.num_sms_dispatch - config_.num_sms_send;
    rows_.dispatch.first_block = rows_.num_send_blocks = config_.num_sms_send;
    kernels_.relay_rows(rows_, to_stream(stream));
}

void NetworkRuntime::publish(const Sent& sent, uintptr_t stream) {
    DeviceGuard guard(config_.device);
    begin_dispatch(sent);
    is_half_made_ = true;
    publish_early(stream);
}

void NetworkRuntime::publish_early(uintptr_t stream) {
    publish_early_parcels(rows_.dispatch);
    rows_.dispatch.num_blocks = config_.num_sms_publish;
    kernels_.relay_rows(rows_, to_stream(stream));
}

uint64_t NetworkRuntime::publish_fresh(const Choices& choices, const NewLayout& layout,
                                       const Sent& sent, uintptr_t stream) {
    DeviceGuard guard(config_.device);
    begin_dispatch(sent);  // which may refuse it
    require_route(context_.relay.world, choices, layout);
    is_half_made_ = true;
    const uint64_t ticket = route(choices, layout, true, stream);
    publish_early(stream);
    return ticket;
}

void NetworkRuntime::pull(const Received& received, uintptr_t stream) {
    DeviceGuard guard(config_.device);
    require_received(rows_.dispatch, received);
    is_half_made_ = false;
    publish_rest(rows_.dispatch);
    end_dispatch(received, stream);
}

void NetworkRuntime::dispatch(const Sent& sent, const Received& received, uintptr_t stream) {
    DeviceGuard guard(config_.device);
    begin_dispatch(sent);
    require_received(rows_.dispatch, received);
    end_dispatch(received, stream);
}

void NetworkRuntime::dispatch_fresh(const Choices& choices, const NewLayout& layout,
                                    const Sent& sent, const Received& received, uintptr_t stream) {
    DeviceGuard guard(config_.device);
    begin_dispatch(sent);
    require_received(rows_.dispatch, received);
    route(choices, layout, false, stream);
    end_dispatch(received, stream);
}

void NetworkRuntime::combine(const Summed& summed, uintptr_t stream) {
    DeviceGuard guard(config_.device);
    kernels::RelaySumsParams p{};
    p.context = context_;
    p.summed = summed;
    // pushing reads every row of the experts, the other roles sums of them
    p.num_forward_blocks = config_.num_nodes == 1 ? 0 : std::max(1, config_.num_sms_combine / 5);
    p.num_home_blocks = std::max(1, config_.num_sms_combine / 3);
    p.num_push_blocks = config_.num_sms_combine - p.num_forward_blocks - p.num_home_blocks;
    p.slices = layout::SliceLayout::make(summed.row_bytes, layout::kMostSumBytes);
    p.ring = layout::sum_ring(p.slices);
    require_combine(context_.world, summed, config_.inbox_row_bytes, p.ring);
    kernels_.relay_sums(p, to_stream(stream));
}

std::optional<int64_t> NetworkRuntime::required_rows(uint64_t ticket, uintptr_t stream,
                                                     bool (*is_interrupted)()) const {
    const std::shared_ptr<CallState> calls = calls_;
    return calls->required_rows(ticket, to_stream(stream), is_interrupted);
}

std::optional<FaultReport> NetworkRuntime::fault() const {
    return calls_ == nullptr ? std::nullopt : calls_->fault();
}

void NetworkRuntime::give_up(int reason) {
    DeviceGuard guard(config_.device);
    tell_peers(context_.world.peers, config_.ranks_per_node,
               context_.relay.world.gave_up(config_.rank), uint64_t(reason));
    if (config_.num_nodes == 1) return;
    cudaStream_t beside_all = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&beside_all, cudaStreamNonBlocking), "stream to give up");
    kernels_.give_up({context_, uint64_t(reason)}, beside_all);
    check_cuda(cudaStreamDestroy(beside_all), "stream to give up");  // once the kernel has run
}

int64_t NetworkRuntime::num_routes() const {
    DeviceGuard guard(config_.device);
    return calls_->num_routes();
}

std::vector<TraceEvent> NetworkRuntime::take_trace() {
    DeviceGuard guard(config_.device);
    return calls_->take_trace();
}

}  // namespace hybrid_ep
