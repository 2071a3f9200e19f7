#include "runtime.h"

#include <algorithm>

#include "host_side.h"

namespace hybrid_ep {
Runtime::Runtime(const RuntimeConfig& config) : config_(config) {
    DeviceGuard guard(config.device);
    require_shared_memory(config.device);
    buffer_ = layout::BufferLayout::make(config.num_ranks, config.num_experts, config.max_tokens,
                                         config.topk, config.row_capacity, config.inbox_row_bytes);
    handle_ = layout::HandleLayout::make(buffer_);
    routing_blocks_ = std::min(buffer_.num_chunks, 64);

    // one block per SM, all resident: no grid is larger than what runs at once
    int num_sms = 0;
    check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, config.device),
               "number of SMs");
    const int most = std::min(num_sms, layout::kMaxChannels);
    config_.num_sms_publish = std::min(config.num_sms_publish, most);
    config_.num_sms_dispatch = std::min(config.num_sms_dispatch, most);
    config_.num_sms_combine = std::min(config.num_sms_combine, most);

    memory_ = std::make_unique<memory::PeerMemory>(config.rank, buffer_);
    calls_ = std::make_shared<CallState>(config.timeout_s, config.trace, config.num_routes,
                                         config.layout_base);
    engine_ = std::make_unique<CopyEngine>(config.device);
}

Runtime::~Runtime() { destroy(); }

void Runtime::unmap_peers() {
    DeviceGuard guard(config_.device);
    cudaDeviceSynchronize();
    memory_->unmap_peers();
}

void Runtime::free_now() {
    DeviceGuard guard(config_.device);
    memory_->free_now();
    destroy();
}

void Runtime::destroy() {
    if (memory_ == nullptr) return;
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(config_.device);
    cudaDeviceSynchronize();  // this rank's kernels end within the deadline, whatever peers do
    memory_.reset();
    calls_.reset();
    engine_.reset();
    cudaSetDevice(before);
    cudaGetLastError();
}

Context Runtime::context() const {
    const Watch watch = calls_->watch(memory_->mine() + buffer_.calls_offset);
    return {memory_->peers(), config_.rank, 0,     config_.num_ranks,
            buffer_,          handle_,      watch, calls_->trace()};
}

uint64_t Runtime::route(const Choices& choices, const NewLayout& layout, bool want_mail,
                        uintptr_t stream) {
    DeviceGuard guard(config_.device);
    require_route(buffer_, choices, layout);
    kernels::PublishRoutingParams publish{};
    publish.context = context();
    publish.choices = choices;
    publish.num_blocks = routing_blocks_;
    publish.words = layout.words;
    kernels::launch_publish_routing(publish, to_stream(stream));

    const kernels::AssignRowsParams assign =
        assign_rows_params(publish.context, routing_blocks_, choices, layout, want_mail, *calls_);
    kernels::launch_assign_rows(assign, to_stream(stream));
    return assign.ticket;
}

// A graph is replayed without the host, who then does not know any more which half of the outbox
// the next call takes.
bool Runtime::engine_can_publish(const Sent& sent, cudaStream_t stream) {
    cudaStreamCaptureStatus capture{};
    check_cuda(cudaStreamIsCapturing(stream, &capture), "state of the stream");
    was_captured_ = was_captured_ || capture != cudaStreamCaptureStatusNone;
    return !was_captured_ && config_.num_ranks > 1 &&
           engine_->can_copy(sent.x_stride, sent.row_bytes);
}

void Runtime::copy_by_engine(const Sent& sent, cudaStream_t stream) {
    const int begin = tokens_by_sms(config_.num_sms_dispatch, sent.num_tokens);
    if (!engine_can_publish(sent, stream) || begin == sent.num_tokens) return;
    const uint64_t call = num_dispatches_ + 1;
    char* outbox = memory_->peers().base[config_.rank] + buffer_.record(call, 0);
    dispatch_.copied =
        engine_->copy({sent.x, sent.x_stride}, {outbox, buffer_.record_bytes}, sent.row_bytes,
                      begin, sent.num_tokens, dispatch_.context.watch.state->rows_copied,
                      flag_value(call, kCopiedSignature), stream);
}

void Runtime::begin_dispatch(const Sent& sent) {
    dispatch_ = dispatch_params(context(), sent, config_.slice_bytes);
}

void Runtime::end_dispatch(const Received& received, cudaStream_t stream) {
    kernels::DispatchParams& p = dispatch_;
    p.pulls = true;
    p.num_blocks = config_.num_sms_dispatch;
    p.received = received;
    kernels::launch_dispatch(p, stream);
    ++num_dispatches_;
}

void Runtime::publish_early(bool behind_routing, cudaStream_t stream) {
    dispatch_.behind_routing = behind_routing;
    dispatch_.num_blocks = config_.num_sms_publish;
    publish_early_parcels(dispatch_);
    kernels::launch_dispatch(dispatch_, stream);
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
    require_route(buffer_, choices, layout);
    is_half_made_ = true;
    const uint64_t ticket = route(choices, layout, true, stream);
    publish_early(true, to_stream(stream));
    return ticket;
}

void Runtime::pull(const Received& received, uintptr_t stream) {
    DeviceGuard guard(config_.device);
    require_received(dispatch_, received);
    is_half_made_ = false;
    dispatch_.behind_routing = false;
    publish_rest(dispatch_);
    end_dispatch(received, to_stream(stream));
}

void Runtime::dispatch(const Sent& sent, const Received& received, uintptr_t stream) {
    DeviceGuard guard(config_.device);
    begin_dispatch(sent);
    require_received(dispatch_, received);
    copy_by_engine(sent, to_stream(stream));
    end_dispatch(received, to_stream(stream));
}

void Runtime::dispatch_fresh(const Choices& choices, const NewLayout& layout, const Sent& sent,
                             const Received& received, uintptr_t stream) {
    DeviceGuard guard(config_.device);
    begin_dispatch(sent);
    require_route(buffer_, choices, layout);
    require_received(dispatch_, received);
    dispatch_.behind_routing = true;
    copy_by_engine(sent, to_stream(stream));  // it need not know the routing
    route(choices, layout, false, stream);
    end_dispatch(received, to_stream(stream));
}

void Runtime::combine(const Summed& summed, uintptr_t stream) {
    DeviceGuard guard(config_.device);
    kernels::CombineParams p{};
    p.context = context();
    p.summed = summed;
    p.num_blocks = config_.num_sms_combine;
    p.slices = layout::SliceLayout::make(summed.row_bytes, layout::kMostSumBytes);
    p.ring = layout::sum_ring(p.slices);
    require_combine(p.context, summed, config_.inbox_row_bytes, p.ring);
    kernels::launch_combine(p, to_stream(stream));
}

int64_t Runtime::copy_peer(int peer, int64_t num_bytes, int num_sms, bool push, uintptr_t stream) {
    DeviceGuard guard(config_.device);
    if (peer < 0 || peer >= config_.num_ranks) throw std::runtime_error("no such peer");
    const int64_t half = (buffer_.routing_offset - buffer_.outbox_offset) / 2 / 128 * 128;
    const auto slices = layout::SliceLayout::make(buffer_.inbox_row_bytes, config_.slice_bytes);
    const char* source = memory_->peers().base[push ? config_.rank : peer];
    kernels::CopyPeerParams p{};
    p.from = source + buffer_.outbox_offset;
    p.to = memory_->peers().base[push ? peer : config_.rank] + buffer_.outbox_offset + half;
    p.num_bytes = std::min(num_bytes, half) / layout::kBulkAlign * layout::kBulkAlign;
    p.num_blocks = num_sms;
    p.ring = layout::move_ring(slices, {buffer_.inbox_row_bytes, 0, 0, 0});
    kernels::launch_copy_peer(p, to_stream(stream));
    return p.num_bytes;
}

std::optional<int64_t> Runtime::required_rows(uint64_t ticket, uintptr_t stream,
                                              bool (*is_interrupted)()) const {
    const std::shared_ptr<CallState> calls = calls_;
    return calls->required_rows(ticket, to_stream(stream), is_interrupted);
}

std::optional<FaultReport> Runtime::fault() const {
    return calls_ == nullptr ? std::nullopt : calls_->fault();
}

void Runtime::give_up(int reason) {
    DeviceGuard guard(config_.device);
    tell_peers(memory_->peers(), config_.num_ranks, buffer_.gave_up(config_.rank),
               uint64_t(reason));
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
