use super::*;

// Promise: Q6
#[test]
fn image_takes_whole_blocks_or_an_even_part_of_one() {
    const MIB: u64 = 1 << 20;
    let cases = [
        (0, 0),
        (100, 100),
        (GROWTH_BYTES + MIB / 2, MIB / 2 + GROWTH_BYTES),
        (GROWTH_BYTES + 700 * MIB / 1000, MIB),
        (GROWTH_BYTES + MIB + 1, 2 * MIB),
        (3 * MIB, 4 * MIB),
        (4 * MIB + 100, 4 * MIB + 100),
        (4 * MIB + GROWTH_BYTES + 1, 6 * MIB),
        (u64::MAX, u64::MAX),
    ];
    for (bytes, expected) in cases {
        assert_eq!(in_blocks(bytes), expected, "{bytes} bytes");
    }
}
