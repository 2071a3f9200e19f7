#include "nodes_runtime.h"

#include <algorithm>
#include <stdexcept>

#include "host_side.h"

namespace hybrid_ep {

NodesRuntime::NodesRuntime(const NodesConfig& config,
                           const kernels::several_nodes::Launchers& kernels)
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
    num_send_blocks_ = config.num_nodes == 1
                           ? 0
                           : std::clamp(config.network_channels, 1, config_.num_sms_dispatch - 1);

    calls_ = std::make_shared<CallState>(config.timeout_s, config.trace, config.num_routes,
                                         config.layout_base);
    context_.nodes = config.layout();
    require_at_most("bytes of symmetric memory", context_.nodes.total_bytes, kMostTermBytes);
    context_.node = config.rank / config.ranks_per_node;
    context_.local_rank = config.rank % config.ranks_per_node;
    context_.num_routes = config.num_routes;
    context_.uses_mapped = config.uses_mapped;
    context_.world.rank = config.rank;
    context_.world.first_peer = context_.node * config.ranks_per_node;
    context_.world.num_peers = config.ranks_per_node;
    context_.world.buffer = context_.nodes.world;
    context_.world.handle = layout::HandleLayout::make(context_.nodes.world);
    context_.world.trace = calls_->trace();
    context_.kept = layout::NodesHandleLayout::make(context_.world.handle, config.num_nodes);
    routing_blocks_ = std::min(context_.nodes.world.num_chunks, 64);
}

void NodesRuntime::attach(const std::vector<uintptr_t>& peers,
                          const std::vector<uintptr_t>& rails) {
    DeviceGuard guard(config_.device);
    for (int peer = 0; peer < config_.ranks_per_node; ++peer) {
        context_.world.peers.base[peer] = at<char>(peers.at(peer));
    }
    for (size_t node = 0; node < rails.size(); ++node) {
        context_.rails.base[node] = at<char>(rails[node]);
    }
    context_.world.watch = calls_->watch(context_.at(context_.nodes.world.calls_offset));
    check_cuda(cudaMemset(context_.mine(), 0, symmetric_bytes()), "zeroing symmetric memory");
    check_cuda(cudaDeviceSynchronize(), "zeroing symmetric memory");
}

void NodesRuntime::delay_puts(int most_us) {
    DeviceGuard guard(config_.device);
    card_ = std::make_unique<DelayingNetworkCard>(config_.device, most_us, config_.rank);
    context_.queue = card_->queue();
}

void NodesRuntime::destroy() {
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

uint64_t NodesRuntime::route(const Choices& choices, const NewLayout& layout, bool want_mail,
                             uintptr_t stream) {
    DeviceGuard guard(config_.device);
    require_route(context_.nodes.world, choices, layout);
    kernels::several_nodes::PublishRoutingParams publish{};
    publish.context = context_;
    publish.choices = choices;
    publish.num_blocks = routing_blocks_;
    publish.words = layout.words;
    kernels_.publish_routing(publish, to_stream(stream));

    const kernels::AssignRowsParams assign =
        assign_rows_params(context_.world, routing_blocks_, choices, layout, want_mail, *calls_);
    kernels::launch_assign_rows(assign, to_stream(stream));
    kernels::several_nodes::launch_keep_routing({context_, layout.words}, to_stream(stream));
    return assign.ticket;
}

void NodesRuntime::begin_dispatch(const Sent& sent) {
    dispatch_ = {};
    dispatch_.context = context_;
    dispatch_.dispatch = dispatch_params(context_.world, sent, config_.slice_bytes);
}

void NodesRuntime::end_dispatch(const Received& received, uintptr_t stream) {
    dispatch_.dispatch.pulls = true;
    dispatch_.dispatch.received = received;
    dispatch_.dispatch.num_blocks = config_.num_sms_dispatch - num_send_blocks_;
    dispatch_.dispatch.first_block = dispatch_.num_send_blocks = num_send_blocks_;
    kernels_.dispatch(dispatch_, to_stream(stream));
}

void NodesRuntime::publish(const Sent& sent, uintptr_t stream) {
    DeviceGuard guard(config_.device);
    begin_dispatch(sent);
    is_half_made_ = true;
    publish_early(stream);
}

void NodesRuntime::publish_early(uintptr_t stream) {
    publish_early_parcels(dispatch_.dispatch);
    dispatch_.dispatch.num_blocks = config_.num_sms_publish;
    kernels_.dispatch(dispatch_, to_stream(stream));
}

uint64_t NodesRuntime::publish_fresh(const Choices& choices, const NewLayout& layout,
                                     const Sent& sent, uintptr_t stream) {
    DeviceGuard guard(config_.device);
    begin_dispatch(sent);  // which may refuse it
    require_route(context_.nodes.world, choices, layout);
    is_half_made_ = true;
    const uint64_t ticket = route(choices, layout, true, stream);
    publish_early(stream);
    return ticket;
}

void NodesRuntime::pull(const Received& received, uintptr_t stream) {
    DeviceGuard guard(config_.device);
    require_received(dispatch_.dispatch, received);
    is_half_made_ = false;
    publish_rest(dispatch_.dispatch);
    end_dispatch(received, stream);
}

void NodesRuntime::dispatch(const Sent& sent, const Received& received, uintptr_t stream) {
    DeviceGuard guard(config_.device);
    begin_dispatch(sent);
    require_received(dispatch_.dispatch, received);
    end_dispatch(received, stream);
}

void NodesRuntime::dispatch_fresh(const Choices& choices, const NewLayout& layout, const Sent& sent,
                                  const Received& received, uintptr_t stream) {
    DeviceGuard guard(config_.device);
    begin_dispatch(sent);
    require_received(dispatch_.dispatch, received);
    route(choices, layout, false, stream);
    end_dispatch(received, stream);
}

void NodesRuntime::combine(const Summed& summed, uintptr_t stream) {
    DeviceGuard guard(config_.device);
    kernels::several_nodes::CombineParams p{};
    p.context = context_;
    p.summed = summed;
    // pushing reads every row of the experts, the other roles sums of them
    p.num_forward_blocks = config_.num_nodes == 1 ? 0 : std::max(1, config_.num_sms_combine / 5);
    p.num_home_blocks = std::max(1, config_.num_sms_combine / 3);
    p.num_push_blocks = config_.num_sms_combine - p.num_forward_blocks - p.num_home_blocks;
    p.slices = layout::SliceLayout::make(summed.row_bytes, layout::kMostSumBytes);
    p.ring = layout::sum_ring(p.slices);
    require_combine(context_.world, summed, config_.inbox_row_bytes, p.ring);
    kernels_.combine(p, to_stream(stream));
}

std::optional<int64_t> NodesRuntime::required_rows(uint64_t ticket, uintptr_t stream,
                                                   bool (*is_interrupted)()) const {
    const std::shared_ptr<CallState> calls = calls_;
    return calls->required_rows(ticket, to_stream(stream), is_interrupted);
}

std::optional<FaultReport> NodesRuntime::fault() const {
    return calls_ == nullptr ? std::nullopt : calls_->fault();
}

void NodesRuntime::give_up(int reason) {
    DeviceGuard guard(config_.device);
    tell_peers(context_.world.peers, config_.ranks_per_node,
               context_.nodes.world.gave_up(config_.rank), uint64_t(reason));
    if (config_.num_nodes == 1) return;
    cudaStream_t beside_all = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&beside_all, cudaStreamNonBlocking), "stream to give up");
    kernels_.give_up({context_, uint64_t(reason)}, beside_all);
    check_cuda(cudaStreamDestroy(beside_all), "stream to give up");  // once the kernel has run
}

int64_t NodesRuntime::num_routes() const {
    DeviceGuard guard(config_.device);
    return calls_->num_routes();
}

std::vector<TraceEvent> NodesRuntime::take_trace() {
    DeviceGuard guard(config_.device);
    return calls_->take_trace();
}

}  // namespace hybrid_ep
