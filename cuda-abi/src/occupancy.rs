//! The threads that the registers of a multiprocessor suffice for: the arithmetic of the vendor's occupancy calculator.

/// Threads of a warp.
pub const WARP: u32 = 32;
/// Unit in which registers are allocated to warps.
const REGISTER_UNIT: u32 = 256;
/// Register files of a multiprocessor. A warp has its registers in one of them.
const PARTITIONS: u32 = 4;

/// Returns how many threads are resident at most, in whole warps, if each takes `registers` of the `available` ones. Functions
/// without registers have no such bound: `u32::MAX`.
pub const fn resident_threads(available: u32, registers: u32) -> u32 {
    match registers.saturating_mul(WARP).checked_next_multiple_of(REGISTER_UNIT) {
        Some(0) => u32::MAX,
        Some(per_warp) => available / PARTITIONS / per_warp * PARTITIONS * WARP,
        None => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::resident_threads;

    #[test]
    fn registers_are_allocated_in_units_to_warps_of_one_register_file() {
        for (registers, threads) in
            [(0, u32::MAX), (16, 4096), (32, 2048), (64, 1024), (72, 896), (96, 640), (97, 512), (255, 256)]
        {
            assert_eq!(resident_threads(1 << 16, registers), threads, "{registers} registers");
        }
        assert_eq!(resident_threads(1 << 16, u32::MAX), 0);
        assert_eq!(resident_threads(0, 16), 0);
    }
}
