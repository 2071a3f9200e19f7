// What a rank tells its peers when it begins a verb (route, dispatch or combine), in 64 bits.
//
// Verbs that belong together have the same announcement on every rank. Two that do not belong
// together have others, whatever their sizes: so a pairing of other calls is a fault, never data.
// (Of layouts whose routes are 4 million apart it could not tell; no handle is kept that long.)
#pragma once

#include "layout/bytes.h"

namespace hybrid_ep::layout {

// Of one rank to one peer: a word for each of four verbs in turn; then one that says whether the
// rank has given up on this Buffer. Four, because a rank is at most three verbs ahead of a peer:
// the peer's dispatch v+1 announces itself while its route v still ends; so the rank may end both,
// make route v+2, and announce dispatch v+3.
constexpr int kAnnouncedVerbs = 4, kGaveUpWord = kAnnouncedVerbs, kCallWords = kAnnouncedVerbs + 1;

// From the top: the number of the verb among all verbs of the Buffer (24 bits), the number of the
// route that made the layout (22), the phase (2), the signature of the sizes (16). Both numbers
// count from 1 and wrap around, so they are compared for equality alone.
HYBRID_EP_HD uint64_t announcement(uint64_t verb, uint64_t route, int phase, uint32_t signature) {
    return (verb & 0xFFFFFF) << 40 | (route & 0x3FFFFF) << 18 | uint64_t(phase) << 16 |
           (signature & 0xFFFF);
}
HYBRID_EP_HD uint32_t verb_of(uint64_t announcement) { return uint32_t(announcement >> 40); }
HYBRID_EP_HD int phase_of(uint64_t announcement) { return int(announcement >> 16 & 3); }

// The signature of a route is topk, and above it the most experts of any token of the rank, if they
// are more than the token has top-k slots, else 0. So all ranks hear of such a token before the
// route ends. It is no part of what must be equal.
constexpr int kTopkBits = 6, kMostExpertsTold = 1023;
static_assert(kMaxTopk < 1 << kTopkBits, "topk fits below the experts in a route's signature");
HYBRID_EP_HD uint32_t route_signature(int topk, int experts_beyond) {
    return uint32_t(topk | min_of(experts_beyond, kMostExpertsTold) << kTopkBits);
}
// Of a route; kMostExpertsTold: so many or more.
HYBRID_EP_HD int experts_beyond(uint64_t announcement) {
    return int(announcement >> kTopkBits & kMostExpertsTold);
}
HYBRID_EP_HD uint64_t what_must_be_equal(uint64_t announcement) {
    constexpr int kRoute = 0;  // Phase::kRoute
    const uint64_t beyond = uint64_t(kMostExpertsTold) << kTopkBits;
    return phase_of(announcement) == kRoute ? announcement & ~beyond : announcement;
}
HYBRID_EP_HD bool belong_together(uint64_t announcement, uint64_t other) {
    return what_must_be_equal(announcement) == what_must_be_equal(other);
}

// What is passed on of a rank that has announced nothing within the deadline: a phase that is none.
HYBRID_EP_HD uint64_t nothing_announced(uint64_t mine) {
    return what_must_be_equal(mine) | 3 << 16;
}

}  // namespace hybrid_ep::layout
