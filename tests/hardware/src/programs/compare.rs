//! The comparison of two outputs.

use std::fmt;

use serde::Serialize;

/// Longest part of a line that a difference shows, in characters.
const SHOWN: usize = 160;

/// The first line that two outputs do not share. A missing line is `None`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct LineDifference {
    /// Number of the line, from 1.
    pub(crate) line: usize,
    /// The line of the native run.
    pub(crate) native: Option<String>,
    /// The line of the remoted run.
    pub(crate) remoted: Option<String>,
}

impl fmt::Display for LineDifference {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown =
            |line: &Option<String>| line.as_ref().map_or("nothing".to_owned(), |line| format!("{line:?}"));
        let (native, remoted) = (shown(&self.native), shown(&self.remoted));
        write!(formatter, "line {} is {native} natively and {remoted} remoted", self.line)
    }
}

/// The first difference, with line ends as part of the lines.
pub(crate) fn first_difference(native: &[u8], remoted: &[u8]) -> Option<LineDifference> {
    let [mut natives, mut remotes] =
        [native, remoted].map(|text| text.split_inclusive(|byte| *byte == b'\n'));
    for line in 1.. {
        let pair = (natives.next(), remotes.next());
        match pair {
            (None, None) => return None,
            (native, remoted) if native != remoted => {
                let [native, remoted] = [native, remoted].map(|text| text.map(shortened));
                return Some(LineDifference { line, native, remoted });
            }
            _ => {}
        }
    }
    None
}

/// A line for display. Bytes that are no UTF-8 are shown by their numbers, so that two of them look different.
fn shortened(line: &[u8]) -> String {
    let text = std::str::from_utf8(line).map_or_else(|_| line.escape_ascii().to_string(), str::to_owned);
    text.chars().take(SHOWN).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_outputs_have_no_difference() {
        assert_eq!(first_difference(b"", b""), None);
        assert_eq!(first_difference(b"a\nb\n", b"a\nb\n"), None);
    }

    #[test]
    fn first_other_line_is_the_difference() {
        let difference = first_difference(b"a\nb\nc\n", b"a\nx\ny\n").unwrap();
        assert_eq!(difference.line, 2);
        assert_eq!(difference.to_string(), r#"line 2 is "b\n" natively and "x\n" remoted"#);
    }

    #[test]
    fn missing_end_of_an_output_is_a_difference() {
        let difference = first_difference(b"a\nPASS\n", b"a\n").unwrap();
        assert_eq!(
            (difference.line, difference.native.as_deref(), difference.remoted),
            (2, Some("PASS\n"), None)
        );
        assert_eq!(first_difference(b"a\n", b"a").unwrap().line, 1);
    }

    #[test]
    fn long_line_is_shortened_in_the_difference() {
        let difference = first_difference("ä".repeat(1000).as_bytes(), b"").unwrap();
        assert_eq!(difference.native.unwrap().chars().count(), SHOWN);
    }

    #[test]
    fn bytes_that_are_no_text_are_compared_and_shown_by_their_numbers() {
        let difference = first_difference(b"\xff\n", b"\xfe\n").unwrap();
        assert_eq!(difference.native.as_deref(), Some(r"\xff\n"));
        assert_eq!(difference.remoted.as_deref(), Some(r"\xfe\n"));
    }
}
