// Gathers by a single lane.
#pragma once

namespace hybrid_ep::device {

// One lane: store(i, load(i)) for each i below `count`. So many floats are loaded before one is
// stored: a store waits for what it stores, most of a microsecond, and the compiler moves no load
// before a store that might be to the same address.
template <int kAtOnce = 8, typename Load, typename Store>
__device__ __forceinline__ void load_then_store(int count, Load load, Store store) {
    for (int first = 0; first < count; first += kAtOnce) {
        float value[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) value[i] = first + i < count ? load(first + i) : 0.f;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (first + i < count) store(first + i, value[i]);
        }
    }
}

}  // namespace hybrid_ep::device
