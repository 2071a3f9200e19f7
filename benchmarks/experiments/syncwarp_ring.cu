// Does racecheck know that __syncwarp() orders? A ring of one slot, as the kernels have them: warp 0
// fills it; the lanes of warp 1 read it, __syncwarp(), and one lane frees it at an mbarrier that warp
// 0 waits at. With an argument all lanes free it.
//
//   nvcc -std=c++17 -O2 -arch=sm_90 -lineinfo -o build/syncwarp_ring
//        benchmarks/experiments/syncwarp_ring.cu
//   compute-sanitizer --tool racecheck build/syncwarp_ring        hazards are reported
//   compute-sanitizer --tool racecheck build/syncwarp_ring all    none
#include <cstdint>
#include <cstdio>

__device__ uint32_t in_shared(const void* p) { return __cvta_generic_to_shared(p); }
__device__ void init(uint64_t* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(in_shared(barrier)), "r"(count));
}
__device__ void arrive(uint64_t* barrier) {
    asm volatile("{ .reg .b64 s; mbarrier.arrive.shared::cta.b64 s, [%0]; }" ::"r"(
                     in_shared(barrier))
                 : "memory");
}
__device__ void wait(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{ .reg .pred p; L: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra D; bra L; "
        "D: }" ::"r"(in_shared(barrier)),
        "r"(parity)
        : "memory");
}

template <int kFreers>
__global__ void ring(int* out, int turns) {
    __shared__ int slot[32];
    __shared__ uint64_t filled, freed;
    if (threadIdx.x == 0) {
        init(&filled, 32);
        init(&freed, kFreers);
    }
    __syncthreads();
    int lane = threadIdx.x % 32, sum = 0;
    for (int turn = 0; turn < turns; ++turn) {
        if (threadIdx.x < 32) {
            if (turn > 0) wait(&freed, (turn - 1) & 1);
            slot[lane] = turn + lane;
            arrive(&filled);
        } else {
            wait(&filled, turn & 1);
            sum += slot[31 - lane];
            __syncwarp();
            if (kFreers == 32 || lane == 0) arrive(&freed);
        }
    }
    if (threadIdx.x >= 32) out[lane] = sum;
}

int main(int argc, char**) {
    int* out = nullptr;
    cudaMalloc(&out, 32 * sizeof(int));
    if (argc > 1) {
        ring<32><<<1, 64>>>(out, 50);
    } else {
        ring<1><<<1, 64>>>(out, 50);
    }
    int host[32] = {};
    cudaMemcpy(host, out, sizeof(host), cudaMemcpyDeviceToHost);
    std::printf("sum %d, %s\n", host[0], cudaGetErrorString(cudaGetLastError()));
}
