//! Reports to the runner that a test cannot run here: a test that returns without this report counts as passed.

use std::fmt::Display;

/// The runner (`cargo xtask test`) counts a test that prints a line with this mark as skipped, for the reason after it.
pub const MARK: &str = "SKIP: ";

/// Reports that this test, or a part of it, is not run here, and the reason. The caller returns, or leaves that part out.
pub fn skip(reason: &(impl Display + ?Sized)) {
    println!("{MARK}{reason}");
}

/// The reason in the output of a test, if it has one.
#[must_use]
pub fn reason(output: &str) -> Option<&str> {
    output.lines().find_map(|line| line.split_once(MARK)).map(|(_, reason)| reason.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_printed_is_read_as_the_reason() {
        // The harness prints the name of a test without a line end before the test runs.
        let output = format!("running 1 test\ntest a::b ... {MARK}no such hardware: 7\nok\n");
        assert_eq!(reason(&output), Some("no such hardware: 7"));
        assert_eq!(reason("test a::b ... ok\n"), None);
    }
}
