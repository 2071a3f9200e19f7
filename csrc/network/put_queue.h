// Puts that kernels have posted and a card carries out later, as a network card does: in any order,
// reading their bytes when it gets to them (delaying_network_card.h).
#pragma once

#include "layout/bytes.h"

namespace hybrid_ep {

struct PostedPut {
    char* to;
    const char* from;
    uint64_t bytes;  // 0: a signal by itself
    uint64_t* flag;
    uint64_t value;
    uint64_t adds;    // to the flag; else sets it
    uint64_t number;  // of the put, from 1; written last
};

struct PutQueue {
    static constexpr uint64_t kCapacity = 1u << 13;

    PostedPut* puts;        // in mapped host memory: put n is at n % kCapacity; null: no card
    uint64_t* posted;       // puts so far; in device memory
    const uint64_t* taken;  // of these, those that the card has read; in mapped host memory
};

}  // namespace hybrid_ep
