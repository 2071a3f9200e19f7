// What one SM can load from its own GPU's memory: by TMA into shared memory, by ordinary loads into
// registers, and by both at once; and what it can copy by TMA, a load and one or more stores per row.
// Rows of 14,336 bytes, each read once, far more than L2 holds.
//
//   nvcc -std=c++17 -O3 -gencode=arch=compute_90,code=sm_90 -Icsrc -o build/sm_loads
//        benchmarks/experiments/sm_loads.cu
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>

#include "device/ring.cuh"

using namespace hybrid_ep;
using namespace hybrid_ep::device;

constexpr int kRowBytes = 14336, kVectors = 14, kTargets = 60000;
constexpr int kSlotsRead = 4;  // that stores may still be reading

struct Params {
    const char* rows;
    int num_rows, tma_rows;  // of each block, so many by TMA, the others by warps
    int num_slots, num_warps, num_stores;
    char* to;
};

__device__ void load_by_tma(const Params& p, char* smem, SlotHandover& handover) {
    Turn turn, landed;
    const char* rows = p.rows + int64_t(blockIdx.x) * p.num_rows * kRowBytes;
    const int ahead = p.num_slots - (p.num_stores > 0 ? kSlotsRead : 0);
    for (int i = 0; i < p.tma_rows + ahead; ++i) {
        if (i >= ahead) {
            handover.await_filled(landed);
            for (int k = 0; k < p.num_stores; ++k) {
                const int64_t row = (int64_t(blockIdx.x) * p.num_rows + i) % kTargets;
                ptx::bulk_store(p.to + (row * p.num_stores + k) * kRowBytes,
                                smem + landed.at * kRowBytes, kRowBytes);
            }
            ptx::bulk_commit();
            ptx::bulk_wait_read<kSlotsRead>();
            landed.advance(p.num_slots);
        }
        if (i >= p.tma_rows) continue;
        handover.filled_by(turn, kRowBytes);
        ptx::bulk_load(smem + turn.at * kRowBytes, rows + int64_t(i) * kRowBytes, kRowBytes,
                       handover.barrier(turn));
        turn.advance(p.num_slots);
    }
    ptx::bulk_wait_written<0>();
}

__device__ void load_by_warp(const Params& p, int warp) {
    const char* rows = p.rows + int64_t(blockIdx.x) * p.num_rows * kRowBytes;
    uint4 sum{};
    for (int i = p.tma_rows + warp; i < p.num_rows; i += p.num_warps) {
        auto* row = reinterpret_cast<const uint4*>(rows + int64_t(i) * kRowBytes);
        for (int half = 0; half < 2; ++half) {
            uint4 v[kVectors];
#pragma unroll
            for (int k = 0; k < kVectors; ++k) {
                v[k] = __ldcs(row + (half * kVectors + k) * kWarp + lane_id());
            }
#pragma unroll
            for (int k = 0; k < kVectors; ++k) {
                sum.x ^= v[k].x, sum.y ^= v[k].y, sum.z ^= v[k].z, sum.w ^= v[k].w;
            }
        }
    }
    if (sum.x == 12345) *reinterpret_cast<uint4*>(p.to) = sum;
}

__global__ void __launch_bounds__(1024, 1) load_rows(const Params p) {
    extern __shared__ __align__(128) char smem[];
    __shared__ SlotHandover handover;
    if (threadIdx.x == 0) handover.init(layout::kMostSlots, 1);
    __syncthreads();
    if (warp_id() == 0) {
        if (lane_id() == 0 && p.tma_rows > 0) load_by_tma(p, smem, handover);
    } else {
        load_by_warp(p, warp_id() - 1);
    }
}

int main() {
    constexpr int kRowsPerBlock = 1200;
    const int most_blocks = 132;
    char *rows, *to;
    cudaMalloc(&to, int64_t(kTargets) * 4 * kRowBytes);
    cudaMalloc(&rows, int64_t(most_blocks) * kRowsPerBlock * kRowBytes);
    cudaMemset(rows, 1, int64_t(most_blocks) * kRowsPerBlock * kRowBytes);
    cudaFuncSetAttribute(load_rows, cudaFuncAttributeMaxDynamicSharedMemorySize, 15 * kRowBytes);
    cudaEvent_t begin, end;
    cudaEventCreate(&begin), cudaEventCreate(&end);
    struct Way {
        const char* name;
        int tma_percent, slots, warps, stores;
    };
    const Way ways[] = {{"TMA, 15 slots", 100, 15, 0},    {"TMA, 8 slots", 100, 8, 0},
                        {"TMA, 4 slots", 100, 4, 0},      {"8 warps", 0, 1, 8},
                        {"16 warps", 0, 1, 16},           {"28 warps", 0, 1, 28},
                        {"TMA half, 8 warps", 50, 12, 8}, {"TMA half, 16 warps", 50, 12, 16},
                        {"TMA 70%, 8 warps", 70, 12, 8},  {"TMA, 1 store a row", 100, 15, 0, 1},
                        {"TMA, 2 stores", 100, 15, 0, 2}, {"TMA, 4 stores", 100, 15, 0, 4}};
    for (const Way& way : ways) {
        std::printf("%-20s", way.name);
        for (int blocks : {1, 16, 32, 48, 64, 132}) {
            Params p{rows,      kRowsPerBlock, kRowsPerBlock * way.tma_percent / 100,
                     way.slots, way.warps,     way.stores,
                     to};
            float best = 1e9f;
            for (int i = 0; i < 4; ++i) {
                cudaEventRecord(begin);
                load_rows<<<blocks, 32 * (1 + std::max(way.warps, 0)), 15 * kRowBytes>>>(p);
                cudaEventRecord(end);
                cudaEventSynchronize(end);
                float ms = 0;
                cudaEventElapsedTime(&ms, begin, end);
                best = std::min(best, ms);
            }
            std::printf("  %3d: %5.1f", blocks, double(kRowsPerBlock) * kRowBytes / best / 1e6);
        }
        std::printf("  GB/s a SM  (%s)\n", cudaGetErrorString(cudaGetLastError()));
    }
    return 0;
}
