//! Figures of measurements, and numbers at random.

use std::time::Duration;

/// Time for which the calling thread has used processors. Unlike the time of a clock it does not grow while other processes run.
pub fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.try_into().expect("a time that is not negative")
}

/// The figure at a share of the sorted figures, such as 0.99; `None` if there are none.
#[allow(clippy::cast_sign_loss, reason = "a share is positive")]
pub fn quantile<T: Copy + PartialOrd>(figures: &[T], share: f64) -> Option<T> {
    let mut sorted = figures.to_vec();
    sorted.sort_by(|one, other| one.partial_cmp(other).expect("a number"));
    sorted.get((sorted.len() as f64 * share) as usize).or(sorted.last()).copied()
}

/// The median of some figures. Panics if there are none.
pub fn median<T: Copy + PartialOrd>(figures: &[T]) -> T {
    quantile(figures, 0.5).expect("a figure")
}

/// Pseudo-random numbers, equal for equal seeds (SplitMix64).
pub struct Random(pub u64);

impl Random {
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next_u64() % bound
    }

    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.next_u64() as u8).collect()
    }
}
