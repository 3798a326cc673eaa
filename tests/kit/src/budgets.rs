//! The budgets of counted work, all of them. A count that callgrind makes is the same however busy the machine is, so a test fails by the
//! change that makes the work dearer. Lower a budget with the change that makes the work cheaper.

/// Percent by which a count of instructions may exceed its budget: C libraries differ a little, and so do builds.
const TOLERANCE: u64 = 2;

macro_rules! budgets {
    ($($(#[doc = $meaning:literal])+ $name:ident = $value:literal;)+) => {
        $($(#[doc = $meaning])+ pub const $name: u64 = $value;)+

        /// Every budget with its name and its meaning, for pages.
        pub const ALL: &[(&str, u64, &str)] = &[$((stringify!($name), $name, concat!($($meaning),+))),+];
    };
}

budgets! {
    /// Instructions of `cuLaunchKernel` in the guest's library, with three parameters, on the default stream.
    GUEST_LAUNCH = 1_460;
    /// Instructions of a launch in the worker, from its submission until its end is observed, in a VM that shares its unit with no other.
    WORKER_LAUNCH = 700;
    /// Calls of the driver for a thousand launches in the worker: the launches and their markers. No other VM shares the unit.
    DRIVER_CALLS = 1_050;
    /// The same while another VM requests the unit.
    DRIVER_CALLS_SHARED = 1_250;
    /// Page faults of a worker, without those that read a file, until the first launch of its session is complete.
    WORKER_START_FAULTS = 360;
}

/// True if a count of instructions is within its budget.
#[must_use]
pub const fn is_within(count: u64, budget: u64) -> bool {
    count * 100 <= budget * (100 + TOLERANCE)
}

#[cfg(test)]
mod tests {
    use super::{ALL, is_within};

    #[test]
    fn each_budget_has_a_meaning() {
        assert!(!ALL.is_empty() && ALL.iter().all(|(_, _, meaning)| meaning.ends_with('.')));
    }

    #[test]
    fn count_may_exceed_its_budget_by_the_tolerance_and_no_more() {
        assert!(is_within(1, 1_000) && is_within(1_020, 1_000));
        assert!(!is_within(1_021, 1_000));
    }
}
