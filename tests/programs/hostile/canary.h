// The pattern that must not be found elsewhere: 128 bits at a pitch of 16 bytes. The high word is the same everywhere, the low
// one carries the number of the cell that wrote it. A whole tag exists only where one was written or found: the searcher
// compares complements.
#pragma once

#include "driver.h"

static const uint64_t NOT_HIGH = ~0xc0ffee5eed5eca11ull;
static const uint64_t NOT_LOW = ~0x5109ce51a000000ull;
static const uint64_t CELLS = 1 << 20;

struct alignas(16) Tag {
    uint64_t high, low;
};

__host__ __device__ inline Tag tag_of(uint64_t cell) { return {~NOT_HIGH, ~NOT_LOW + cell}; }

// The cell that wrote these 16 bytes, or -1.
__host__ __device__ inline long found(uint64_t high, uint64_t low) {
    uint64_t cell = low + NOT_LOW + 1;
    return ~high == NOT_HIGH && cell < CELLS ? (long)cell : -1;
}
