//! The checks of the demo, printed when they are made and once more at the end.

/// All checks so far.
#[derive(Debug, Default)]
pub(super) struct Checks {
    done: Vec<(String, bool)>,
}

impl Checks {
    /// Records and prints a check.
    pub(super) fn expect(&mut self, what: impl Into<String>, holds: bool) {
        let what = what.into();
        println!("   {} {what}", word(holds));
        self.done.push((what, holds));
    }

    /// True if every check passed.
    pub(super) fn all_hold(&self) -> bool {
        !self.done.is_empty() && self.done.iter().all(|(_, holds)| *holds)
    }

    pub(super) fn count(&self) -> usize {
        self.done.len()
    }

    /// All checks, one line each.
    pub(super) fn list(&self) -> String {
        self.done.iter().map(|(what, holds)| format!("  {} {what}\n", word(*holds))).collect()
    }
}

const fn word(holds: bool) -> &'static str {
    if holds { "PASS" } else { "FAIL" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_failed_check_fails_all() {
        let mut checks = Checks::default();
        assert!(!checks.all_hold(), "nothing was checked");
        checks.expect("one", true);
        assert!(checks.all_hold());
        checks.expect("two", false);
        checks.expect("three", true);
        assert!(!checks.all_hold());
        assert_eq!((checks.count(), checks.list().as_str()), (3, "  PASS one\n  FAIL two\n  PASS three\n"));
    }
}
