// Dispatch, in one kernel: my tokens become readable for my peers, and every copy that is mine is
// pulled once and lands in all its rows.
//
//   publish   x[t], scales, weights --> outbox record [row | scales | weights], parcel by parcel;
//             a flag in every peer announces the parcel
//   pull      outbox record of the source --TMA load over NVLink--> slot
//             slot --TMA stores--> rows[row_i], weights[row_i], scales[row_i]
//
// Publishing and pulling are done by different warps of each block and do not wait for each other,
// so no two ranks ever do. Only tokens that go to a peer are published, others come from x; but
// where the copy engine publishes, it has begun before this kernel, with all rows from a token on.
// The two may also be two launches, with the host's wait for the number of rows between them.
#include "device/copy_walk.cuh"
#include "kernels/dispatch/block.cuh"
#include "kernels/launch.cuh"

namespace hybrid_ep::kernels {
namespace {

// Takes the next copies, a lane each, waits until they are announced, and lists them.
class OutboxWalker {
  public:
    __device__ OutboxWalker(const DispatchParams& p, const layout::HandleView& handle,
                            PullSmem& smem, uint64_t epoch)
        : p_(p),
          smem_(smem),
          epoch_(epoch),
          walk_(handle, p.context.buffer.num_ranks, p.context.rank, p.context.buffer.num_ranks,
                &p.context.watch.state->steps_taken, p.num_blocks, JobList::most_copies(p)),
          jobs_(p, handle, smem) {}

    __device__ void run() {
        const Context& c = p_.context;
        CopyWalk::Taken mine;
        while (walk_.take(mine)) {
            const bool has_copy = mine.valid && mine.copy.num_rows > 0 && has_rows(p_);
            if (!await_announced(has_copy, mine)) break;
            FoundCopy found{};
            if (has_copy) {
                found = {mine.copy, mine.rows,
                         c.peers.base[mine.source] + c.buffer.record(epoch_, mine.copy.token),
                         mine.source == c.rank, nullptr};
            }
            jobs_.add(has_copy, found);
        }
        jobs_.end();
    }

  private:
    __device__ bool await_announced(bool has_copy, const CopyWalk::Taken& mine) {
        const Stopwatch waiting(p_.context.trace);
        bool good = true;
        if (has_copy && publishes(p_)) {
            const int parcel = mine.copy.token / kParcelTokens;
            const uint64_t* flag = flag_in(p_, p_.context.rank, mine.source, parcel);
            good = wait_flag(flag, epoch_, p_.record.signature(), p_.context.watch,
                             Phase::kDispatch, mine.source, parcel);
            ptx::fence_proxy_async();
        }
        good = __all_sync(kAllLanes, good);
        if (lane_id() == 0) {
            if (!good) smem_.failed = true;
            waiting.note(Span::kAwaitRows, epoch_);
        }
        return good;
    }

    const DispatchParams& p_;
    PullSmem& smem_;
    uint64_t epoch_;
    CopyWalk walk_;
    JobList jobs_;
};

template <typename Rows>
__device__ __forceinline__ void make_call(const DispatchParams& p, const Rows& rows) {
    extern __shared__ __align__(128) char dynamic_smem[];
    __shared__ DispatchSmem smem;
    const uint64_t epoch = current_epoch(p.context.watch.state, Phase::kDispatch);
    if (!run_dispatch<OutboxWalker>(p, p, rows, dynamic_smem, smem) || !p.pulls) return;
    end_block(p.context.watch, epoch);
}

__global__ void __launch_bounds__(kDispatchThreads, 1)
    dispatch(const __grid_constant__ DispatchParams p) {
    make_call(p, StoreRows{});
}

constexpr int kScalers = layout::kScalersOfOneNode;
constexpr int kBackwardThreads = kThreadsFor<ScaleRows<float, kScalers>>;

template <typename T>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    combine_backward(const __grid_constant__ CombineBackwardParams p) {
    make_call(p.dispatch, ScaleRows<T, kScalers>{p.weighted});
}

}  // namespace

void launch_dispatch(const DispatchParams& p, cudaStream_t stream) {
    launch(kKernel<dispatch>, p, p.num_blocks, kDispatchThreads,
           layout::dynamic_smem_bytes(p.ring, 1), stream,
           {/*behind_ours=*/p.behind_routing, /*in_pairs=*/true});
}

void launch_combine_backward(const CombineBackwardParams& p, cudaStream_t stream) {
    const auto kernel =
        for_type(p.weighted.type, [](auto t) { return kKernel<combine_backward<decltype(t)>>; });
    launch(kernel, p, p.dispatch.num_blocks, kBackwardThreads,
           layout::scale_smem_bytes(p.dispatch.ring, kScalers), stream, kInPairs);
}

}  // namespace hybrid_ep::kernels
