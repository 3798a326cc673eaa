//! How a test says to the runner that it cannot run here: a test that returns without it counts as passed.

use std::fmt::Display;

/// The runner (`cargo xtask test`) counts a test that prints a line with this as skipped, for the reason behind it.
pub const MARK: &str = "SKIP: ";

/// Says that this test, or a part of it, is not run here, and why. The caller returns, or leaves that part out.
pub fn skip(reason: &(impl Display + ?Sized)) {
    println!("{MARK}{reason}");
}

/// The reason, where the output of a test holds one.
#[must_use]
pub fn reason(output: &str) -> Option<&str> {
    output.lines().find_map(|line| line.split_once(MARK)).map(|(_, reason)| reason.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_printed_is_read_as_the_reason() {
        // The harness prints the name of a test without an end of the line before the test runs.
        let output = format!("running 1 test\ntest a::b ... {MARK}no such hardware: 7\nok\n");
        assert_eq!(reason(&output), Some("no such hardware: 7"));
        assert_eq!(reason("test a::b ... ok\n"), None);
    }
}
