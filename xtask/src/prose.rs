//! The rules of plain English that a program can check (CONTRIBUTING.md, "Write plainly").
//!
//! Pages for users must follow all of them. In comments the number of lines that break the first one may only fall.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::sources;

/// A sentence must not begin with a clause in the place of a noun, hence with none of these unless it is a question.
const OPENINGS: [&str; 7] = ["What", "Who", "Whose", "Which", "Whoever", "Whatever", "Whom"];
/// Words for persons that no page names.
const PRONOUNS: [&str; 5] = ["nobody", "somebody", "whoever", "anybody", "whom"];
/// Lines of comments that begin with one of [`OPENINGS`].
const COMMENTS: usize = 0;

/// The places that break a rule.
pub(crate) fn findings(root: &Path) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    for page in pages(root)? {
        let text = fs::read_to_string(&page).with_context(|| format!("reading {}", page.display()))?;
        let name = page.strip_prefix(root).unwrap_or(&page).display().to_string();
        findings.extend(of_page(&text).into_iter().map(|(line, text)| format!("{name}:{line}: {text}")));
    }
    let mut comments = 0;
    sources::for_each(root, |_, text| comments += text.lines().filter(|line| is_opening(line)).count())?;
    if comments > COMMENTS {
        findings.push(format!(
            "{comments} lines of comments begin with one of {OPENINGS:?}, {COMMENTS} did before: reword the new ones"
        ));
    }
    Ok(findings)
}

fn pages(root: &Path) -> Result<Vec<PathBuf>> {
    let mut pages = Vec::new();
    for folder in [root.to_path_buf(), root.join("docs")] {
        for entry in fs::read_dir(&folder).with_context(|| format!("reading {}", folder.display()))? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "md") {
                pages.push(path);
            }
        }
    }
    pages.sort();
    Ok(pages)
}

/// The lines of a page that break a rule, with the word.
fn of_page(text: &str) -> Vec<(usize, String)> {
    let mut findings = Vec::new();
    let (mut in_code, mut begins) = (false, true);
    let mut opening: Option<(usize, String)> = None;
    for (number, line) in (1..).zip(text.lines()) {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        }
        if in_code || line.trim().is_empty() || line.starts_with('#') {
            begins = true;
        }
        if in_code {
            continue;
        }
        for word in without_code(line).split_whitespace() {
            let is_mark = word.chars().all(|letter| !letter.is_alphanumeric());
            let bare = word.trim_matches(|letter: char| !letter.is_alphanumeric());
            if begins && !is_mark {
                // A question may begin so; any other sentence with this opening is reported at its end.
                findings.extend(opening.take());
                opening = OPENINGS.contains(&bare).then(|| (number, bare.to_owned()));
            }
            if PRONOUNS.contains(&bare.to_lowercase().as_str()) {
                findings.push((number, bare.to_owned()));
            }
            if word.contains('?') {
                opening = None;
            }
            begins = (begins && is_mark) || word == "|" || word.ends_with(['.', '!', '?', ':', ';']);
        }
    }
    findings.extend(opening);
    findings
}

/// A line without its spans of code and of quotation.
fn without_code(line: &str) -> String {
    let outside = |text: &str, mark: char| {
        let parts = text.split(mark).enumerate();
        parts.map(|(place, part)| if place % 2 == 0 { part } else { "code" }).collect::<Vec<_>>().join(" ")
    };
    outside(&outside(line, '`'), '"')
}

fn is_opening(line: &str) -> bool {
    let Some(comment) = line.trim_start().strip_prefix("//") else { return false };
    let text = comment.trim_start_matches(['/', '!']).trim_start();
    let word: String = text.chars().take_while(|letter| letter.is_alphanumeric()).collect();
    OPENINGS.contains(&word.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clause_in_the_place_of_a_noun_is_found_and_a_question_is_not() {
        let text = "Free memory. What is left\nis free. What now? It\nsays `What`.\n\n| a | Who asks |\n- Which one is it?\n";
        assert_eq!(of_page(text), [(1, "What".to_owned()), (5, "Who".to_owned())]);
    }

    #[test]
    fn word_for_no_person_is_found_outside_code_and_quotation() {
        assert_eq!(
            of_page("Nobody asks.\n\"nobody\" `whom`\n```\nnobody\n```\n"),
            [(1, "Nobody".to_owned())]
        );
    }

    #[test]
    fn comments_are_counted_by_their_first_word() {
        for line in ["    /// What it is.", "//! Who asks", "// Which one"] {
            assert!(is_opening(line), "{line}");
        }
        for line in ["let what = 1; // What", "/// Whatsoever", "/// The one."] {
            assert!(!is_opening(line), "{line}");
        }
    }
}
