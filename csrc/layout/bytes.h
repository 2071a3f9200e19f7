// Arithmetic that host and device share.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define HYBRID_EP_HD __host__ __device__ __forceinline__
#else
#define HYBRID_EP_HD inline
#endif

namespace hybrid_ep::layout {

constexpr int kBulkAlign = 16;     // what a TMA bulk copy asks of addresses and sizes
constexpr int kTileTokens = 128;   // tokens whose routing is counted and scanned together
constexpr int kParcelTokens = 16;  // tokens that are published, and announced, together
constexpr int kMaxRanks = 72;      // of one NVLink domain
constexpr int kMaxTopk = 32;       // a lane per top-k slot
constexpr int kMaxChannels = 256;  // flags of a phase and source: blocks of a grid

template <typename T>
HYBRID_EP_HD constexpr T round_up(T value, T multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

template <typename T>
HYBRID_EP_HD constexpr T ceil_div(T value, T divisor) {
    return (value + divisor - 1) / divisor;
}

HYBRID_EP_HD constexpr int min_of(int a, int b) { return a < b ? a : b; }

}  // namespace hybrid_ep::layout
