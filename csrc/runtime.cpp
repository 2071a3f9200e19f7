#include "runtime.h"

#include <algorithm>

#include "kernels/loading.h"
#include "preconditions.h"

namespace hybrid_ep {
namespace {

// Streams come from Python as integers.
cudaStream_t to_stream(uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

int num_parcels(const Sent& sent) {
    return layout::ceil_div(sent.num_tokens, layout::kParcelTokens);
}

// One word into the memory of each peer, past whatever the GPU's kernels wait for. Errors are not
// raised: something has failed already, and perhaps CUDA itself.
void tell_peers(const Context& context, int64_t offset, uint64_t word) {
    cudaStream_t own = nullptr;
    if (cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking) != cudaSuccess) return;
    for (int peer = 0; peer < context.num_peers; ++peer) {
        if (context.peers.base[peer] == nullptr) continue;
        cudaMemcpyAsync(context.peers.base[peer] + offset, &word, sizeof(word),
                        cudaMemcpyHostToDevice, own);
    }
    cudaStreamSynchronize(own);
    cudaStreamDestroy(own);
    cudaGetLastError();
}

}  // namespace

Runtime::Runtime(const RuntimeConfig& config, const Target& target)
    : config_(config), kernels_(target.kernels), context_(target.context(config)) {
    DeviceGuard guard(config.device);
    require_shared_memory(config.device);
    require_at_most("bytes of symmetric memory", symmetric_bytes(), target.most_bytes);
    kernels::load_kernels();

    // one block per SM, all resident: no grid is larger than what runs at once
    int num_sms = 0;
    check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, config.device),
               "number of SMs");
    most_blocks_ = std::min(num_sms, layout::kMaxChannels);
    config_.num_sms_publish = std::min(config.num_sms_publish, most_blocks_);
    routing_blocks_ = std::min(context_.world.buffer.num_tiles, 64);

    if (target.owns_memory) {
        memory_ =
            std::make_unique<memory::PeerMemory>(config.rank, config.num_ranks, symmetric_bytes());
    }
    calls_ = std::make_shared<CallState>(config);
    context_.world.trace = calls_->trace();
    if (target.may_use_copy_engine) engine_ = std::make_unique<CopyEngine>(config.device);
    if (memory_ != nullptr) take_addresses();
}

// ---- memory

// Of my memory, for my node, and for my rail, where the loopback's puts go.
void Runtime::take_addresses() {
    const Peers& all = memory_->peers();
    for (int peer = 0; peer < context_.world.num_peers; ++peer) {
        context_.world.peers.base[peer] = all.base[context_.world.first_peer + peer];
    }
    for (int node = 0; node < context_.nodes.num_nodes; ++node) {
        context_.rails.base[node] = all.base[context_.rail_peer(node)];
    }
    take_watch();
}

void Runtime::take_watch() {
    context_.world.watch = calls_->watch(context_.at(context_.world.buffer.calls_offset));
}

void Runtime::open_peers(const std::vector<std::string>& handles) {
    DeviceGuard guard(config_.device);
    memory_->open(handles);
    take_addresses();
}

void Runtime::attach(const std::vector<uintptr_t>& peers) {
    DeviceGuard guard(config_.device);
    for (int peer = 0; peer < context_.world.num_peers; ++peer) {
        context_.world.peers.base[peer] = reinterpret_cast<char*>(peers.at(peer));
    }
    take_watch();
    check_cuda(cudaMemset(context_.mine(), 0, symmetric_bytes()), "zeroing symmetric memory");
    check_cuda(cudaDeviceSynchronize(), "zeroing symmetric memory");
}

void Runtime::post_puts(const PutQueue& queue, std::shared_ptr<void> card) {
    context_.queue = queue;
    card_ = std::move(card);
}

void Runtime::destroy() {
    if (calls_ == nullptr) return;
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(config_.device);
    cudaDeviceSynchronize();  // this rank's kernels end within the deadline, whatever peers do
    card_.reset();            // which carries out what they posted
    context_.world.peers = context_.rails = {};
    memory_.reset();
    calls_.reset();
    engine_.reset();
    cudaSetDevice(before);
    cudaGetLastError();
}

void Runtime::unmap_peers() {
    DeviceGuard guard(config_.device);
    cudaDeviceSynchronize();
    memory_->unmap_peers();
    take_addresses();
}

void Runtime::free_now() {
    DeviceGuard guard(config_.device);
    memory_->free_now();
    destroy();
}

// ---- the verbs

uint64_t Runtime::route(const Choices& choices, const NewLayout& layout, bool want_mail,
                        uintptr_t stream) {
    DeviceGuard guard(config_.device);
    require_route(context_.world.buffer, choices, layout);
    kernels_.publish_routing(context_, {context_.world, choices, routing_blocks_, layout.words},
                             to_stream(stream));

    kernels::AssignRowsParams p{};
    p.context = context_.world;
    p.num_publish_blocks = routing_blocks_;
    p.align = choices.align;
    p.max_rows = choices.max_rows;
    p.layout = layout;
    if (want_mail) {
        p.ticket = calls_->next_ticket();
        p.mail = calls_->mail_of(p.ticket);
    }
    kernels_.assign_rows(context_, p, to_stream(stream));
    return p.ticket;
}

// As if SMs published all tokens, in one launch; where its rows go is not known yet.
void Runtime::begin_dispatch(const Sent& sent) {
    kernels::DispatchParams& p = begun_ = {};
    p.context = context_.world;
    p.record = {sent.row_bytes, sent.scale_bytes,
                sent.weights != nullptr ? 4 * p.context.buffer.topk : 0,
                layout::kind_of_call(sent.dtypes, sent.num_sms)};
    p.end_parcel = num_parcels(sent);
    p.copied = {sent.num_tokens};
    p.sent = sent;
    p.slices = layout::SliceLayout::make(sent.row_bytes, config_.slice_bytes);
    p.ring = layout::move_ring(p.slices, p.record);
    require_dispatch(p);
}

// Some of the parcels are published while the host waits for the number of rows, which takes about
// as long; the others beside the pull.
void Runtime::publish_early(bool behind_routing, cudaStream_t stream) {
    constexpr int kEarlyEighths = 3;
    begun_.end_parcel = begun_.end_parcel * kEarlyEighths / 8;
    begun_.behind_routing = behind_routing && kernels_.routing_ends_in_assign_rows;
    begun_.num_blocks = config_.num_sms_publish;
    if (begun_.sent.num_sms > 0) {
        begun_.num_blocks = std::min(begun_.num_blocks, begun_.sent.num_sms);
    }
    kernels_.dispatch(context_, begun_, stream);
}

void Runtime::publish_by_engine(cudaStream_t stream) {
    if (engine_ == nullptr) return;
    engine_->publish(begun_, sms_of_dispatch(), num_dispatches_ + 1, stream);
}

// The call's own number, or the Config's where it is 0; as far as the kernels can use it.
int Runtime::sms_of(int call, int config, int least) const {
    return std::clamp(call > 0 ? call : config, least, most_blocks_);
}
int Runtime::sms_of_dispatch() const {
    return sms_of(begun_.sent.num_sms, config_.num_sms_dispatch, kernels_.least_dispatch_blocks);
}

// The blocks that send, if there are any, come first.
void Runtime::begin_pull(const Received& received) {
    const int blocks = sms_of_dispatch();
    begun_.pulls = true;
    begun_.received = received;
    begun_.first_block =
        context_.nodes.num_nodes == 1 ? 0 : std::clamp(config_.network_channels, 1, blocks - 1);
    begun_.num_blocks = blocks - begun_.first_block;
}

void Runtime::end_dispatch(const Received& received, cudaStream_t stream) {
    begin_pull(received);
    kernels_.dispatch(context_, begun_, stream);
    ++num_dispatches_;
}

void Runtime::publish(const Sent& sent, uintptr_t stream) {
    DeviceGuard guard(config_.device);
    begin_dispatch(sent);
    is_half_made_ = true;
    publish_early(false, to_stream(stream));
}

uint64_t Runtime::publish_fresh(const Choices& choices, const NewLayout& layout, const Sent& sent,
                                uintptr_t stream) {
    DeviceGuard guard(config_.device);
    begin_dispatch(sent);  // which may refuse it
    require_route(context_.world.buffer, choices, layout);
    is_half_made_ = true;
    const uint64_t ticket = route(choices, layout, true, stream);
    publish_early(true, to_stream(stream));
    return ticket;
}

void Runtime::pull(const Received& received, uintptr_t stream) {
    DeviceGuard guard(config_.device);
    require_received(begun_, received);
    is_half_made_ = false;
    begun_.behind_routing = false;
    begun_.first_parcel = begun_.end_parcel;
    begun_.end_parcel = num_parcels(begun_.sent);
    end_dispatch(received, to_stream(stream));
}

void Runtime::dispatch(const Sent& sent, const Received& received, uintptr_t stream) {
    DeviceGuard guard(config_.device);
    begin_dispatch(sent);
    require_received(begun_, received);
    publish_by_engine(to_stream(stream));
    end_dispatch(received, to_stream(stream));
}

void Runtime::dispatch_fresh(const Choices& choices, const NewLayout& layout, const Sent& sent,
                             const Received& received, uintptr_t stream) {
    DeviceGuard guard(config_.device);
    begin_dispatch(sent);
    require_route(context_.world.buffer, choices, layout);
    require_received(begun_, received);
    begun_.behind_routing = kernels_.routing_ends_in_assign_rows;
    publish_by_engine(to_stream(stream));  // it need not know the routing
    route(choices, layout, false, stream);
    end_dispatch(received, to_stream(stream));
}

void Runtime::combine(const Summed& summed, uintptr_t stream) {
    DeviceGuard guard(config_.device);
    kernels::CombineParams p{};
    p.context = context_.world;
    p.summed = summed;
    p.num_blocks = sms_of(summed.num_sms, config_.num_sms_combine, kernels_.least_combine_blocks);
    p.slices = layout::SliceLayout::make(summed.row_bytes, layout::kMostSumBytes);
    p.ring = layout::sum_ring(p.slices);
    require_combine(p, config_.inbox_row_bytes);
    kernels_.combine(context_, p, to_stream(stream));
}

void Runtime::combine_backward(const Sent& sent, const Received& received, const Weighted& weighted,
                               uintptr_t stream) {
    DeviceGuard guard(config_.device);
    begin_dispatch(sent);
    require_received(begun_, received);
    begin_pull(received);
    begun_.slices = {1, sent.row_bytes};
    begun_.ring = layout::scale_ring(sent.row_bytes, kernels_.num_scalers);
    require_combine_backward({begun_, weighted});
    publish_by_engine(to_stream(stream));
    kernels_.combine_backward(context_, {begun_, weighted}, to_stream(stream));
    ++num_dispatches_;
}

int64_t Runtime::copy_peer(int peer, int64_t num_bytes, int num_sms, bool push, uintptr_t stream) {
    DeviceGuard guard(config_.device);
    if (peer < 0 || peer >= config_.num_ranks) throw std::runtime_error("no such peer");
    const layout::BufferLayout& buffer = context_.world.buffer;
    const int64_t half = (buffer.routing_offset - buffer.outbox_offset) / 2 / 128 * 128;
    const auto slices = layout::SliceLayout::make(buffer.inbox_row_bytes, config_.slice_bytes);
    char *mine = context_.mine(), *theirs = context_.peer(peer);
    kernels::CopyPeerParams p{};
    p.from = (push ? mine : theirs) + buffer.outbox_offset;
    p.to = (push ? theirs : mine) + buffer.outbox_offset + half;
    p.num_bytes = std::min(num_bytes, half) / layout::kBulkAlign * layout::kBulkAlign;
    p.num_blocks = num_sms;
    p.ring = layout::move_ring(slices, {buffer.inbox_row_bytes, 0, 0, 0});
    kernels_.copy_peer(p, to_stream(stream));
    return p.num_bytes;
}

// ---- around the verbs

std::optional<std::vector<int32_t>> Runtime::await_offsets(uint64_t ticket, uintptr_t stream,
                                                           bool (*is_interrupted)()) const {
    const std::shared_ptr<CallState> calls = calls_;
    return calls->await_offsets(ticket, to_stream(stream), is_interrupted);
}

std::optional<FaultReport> Runtime::fault() const {
    return calls_ == nullptr ? std::nullopt : calls_->fault();
}

void Runtime::give_up(int reason) {
    DeviceGuard guard(config_.device);
    tell_peers(context_.world, context_.world.buffer.gave_up(config_.rank), uint64_t(reason));
    if (context_.nodes.num_nodes == 1) return;
    cudaStream_t beside_all = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&beside_all, cudaStreamNonBlocking), "stream to give up");
    kernels_.give_up(context_, uint64_t(reason), beside_all);
    check_cuda(cudaStreamDestroy(beside_all), "stream to give up");  // once the kernel has run
}

int64_t Runtime::num_routes() const {
    DeviceGuard guard(config_.device);
    return calls_->num_routes();
}

std::vector<TraceEvent> Runtime::take_trace() {
    DeviceGuard guard(config_.device);
    return calls_->take_trace();
}

}  // namespace hybrid_ep
