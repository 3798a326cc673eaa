//! Log lines of the backend: the message is a fixed text, and each value has a field of its own.

use std::path::Path;

use anyhow::Result;

use crate::sources;

/// The macros that write a log line.
const MACROS: [&str; 5] = ["error!(", "warn!(", "info!(", "debug!(", "limited!("];

/// The log lines with a value in their message.
pub(crate) fn findings(root: &Path) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    sources::for_each(root, |path, text| {
        if path.starts_with("backend") {
            let lines = formatted(text).into_iter();
            findings.extend(lines.map(|line| {
                format!("{}:{line}: give the value in this log message a field", path.display())
            }));
        }
    })?;
    Ok(findings)
}

/// The lines of macros whose message has a placeholder.
fn formatted(text: &str) -> Vec<usize> {
    let mut lines = Vec::new();
    for name in MACROS {
        for (at, _) in text.match_indices(name) {
            let is_part = text[..at].ends_with(|letter: char| letter.is_alphanumeric() || letter == '_');
            let message = message(&text[at + name.len()..]).unwrap_or_default();
            if !is_part && message.replace("{{", "").contains('{') {
                lines.push(text[..at].matches('\n').count() + 1);
            }
        }
    }
    lines.sort_unstable();
    lines
}

/// The message among the arguments of a macro: the string that is an argument by itself.
fn message(mut arguments: &str) -> Option<&str> {
    let (mut depth, mut begins) = (1, true);
    loop {
        let letter = arguments.chars().next()?;
        arguments = &arguments[letter.len_utf8()..];
        match letter {
            '"' => {
                let escaped = |at: usize| {
                    arguments[..at].bytes().rev().take_while(|byte| *byte == b'\\').count() % 2 == 1
                };
                let (end, _) = arguments.match_indices('"').find(|(at, _)| !escaped(*at))?;
                if begins && depth == 1 {
                    return Some(&arguments[..end]);
                }
                arguments = &arguments[end + 1..];
            }
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' if depth == 1 => return None,
            ')' | ']' | '}' => depth -= 1,
            _ => {}
        }
        begins = letter == ',' || (begins && letter.is_whitespace());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn value_in_the_message_of_a_log_line_is_found() {
        for bad in [
            "tracing::warn!(\"VM {vm}\");",
            "warn!(vm, error = %error,\n    \"no {}\", it);",
            "limited!(log, error!(\"{what}\"));",
            "debug!(path = %f(\"a\", [1, 2]), \"say \\\"{x}\\\"\")",
        ] {
            assert_eq!(formatted(bad), [1], "{bad}");
        }
        assert_eq!(formatted("a();\nerror!(\"{a}\");\nwarn!(\"{b}\");"), [2, 3]);
    }

    #[test]
    fn value_in_a_field_and_a_brace_in_the_message_are_no_findings() {
        for good in [
            "tracing::warn!(vm, %error, \"cannot start\");",
            "error!(error = %format_args!(\"{error:#}\"), \"cannot start\");",
            "info!(path = format!(\"{a}\"), \"the line {{\");",
            "compile_error!(\"{x}\"); #[error(\"{x}\")]",
        ] {
            assert_eq!(formatted(good), [] as [usize; 0], "{good}");
        }
    }
}
