// Puts that kernels have posted and a card carries out later, as a network card does: in any order,
// reading their bytes when it gets to them (kernels/delaying_card.h).
#pragma once

#include "layout/bytes.h"

namespace hybrid_ep {

class DelayingCard;

struct PostedPut {
    char* to;
    const char* from;
    uint64_t bytes;  // 0: a signal by itself
    uint64_t* flag;
    uint64_t value;
    uint64_t adds;    // to the flag; else sets it
    uint64_t number;  // of the put, from 1; written last
};

// In device memory.
struct PutQueue {
    static constexpr uint64_t kCapacity = 1u << 13;
    static constexpr int kCarriers = 16;  // put n is that of carrier n % kCarriers

    PostedPut* puts;  // put n is at n % kCapacity; null: no card
    uint64_t* posted;
    uint64_t* next;           // of each carrier, the put that it carries out next
    uint64_t *begun, *ended;  // launches of the card
    uint64_t* over;           // kernels with puts that have ended
    uint32_t most_ns;         // that a put waits for; one in 64 waits for up to 16 times as long
    DelayingCard* card;       // the host's side
};

}  // namespace hybrid_ep
