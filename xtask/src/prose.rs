//! The rules of plain English that a program can check (CONTRIBUTING.md, "Write plainly").
//!
//! Pages, texts of packages and messages of errors must follow all of them. In comments the number of lines that break the first
//! one may only fall.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

use crate::sources;

/// A sentence must not begin with a clause in the place of a noun, hence with none of these unless it is a question.
const OPENINGS: [&str; 9] = ["What", "Who", "Whose", "Which", "Whoever", "Whatever", "Whom", "Where", "How"];
/// Words for persons that no page names.
const PRONOUNS: [&str; 5] = ["nobody", "somebody", "whoever", "anybody", "whom"];
/// Lines of comments that begin with one of [`OPENINGS`].
const COMMENTS: usize = 0;
/// Folders with texts for people. In files that are no pages these are comments and quoted texts.
const FOLDERS: [&str; 6] = ["", "docs", ".github", "packaging", "vmm-configs", "fuzz"];
/// Files that hold no text of ours, by the ending of their names.
const FOREIGN: [&str; 3] = [".lock", ".json", ".svg"];

/// The places that break a rule.
pub(crate) fn findings(root: &Path) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    for folder in FOLDERS {
        of_folder(root, Path::new(folder), &mut findings)?;
    }
    let mut comments = 0;
    sources::for_each(root, |path, text| {
        comments += text.lines().filter(|line| is_opening(line)).count();
        for (number, message) in error_messages(text) {
            let broken = of_page(&message).into_iter();
            findings.extend(broken.map(|(_, word)| format!("{}:{number}: {word}", path.display())));
        }
    })?;
    if comments > COMMENTS {
        findings.push(format!(
            "{comments} lines of comments begin with one of {OPENINGS:?}, {COMMENTS} did before: reword the new ones"
        ));
    }
    Ok(findings)
}

/// Adds the findings in the texts of a folder. Of the root only its own pages are read, because every other folder has its turn;
/// the folders in `fuzz` hold code, and inputs that programs made.
fn of_folder(root: &Path, folder: &Path, findings: &mut Vec<String>) -> Result<()> {
    let is_root = folder.as_os_str().is_empty();
    let path = root.join(folder);
    let mut names: Vec<_> = fs::read_dir(&path)
        .and_then(|entries| entries.map(|entry| entry.map(|entry| entry.file_name())).collect())
        .with_context(|| format!("reading {}", path.display()))?;
    names.sort();
    for name in names {
        let file = folder.join(&name);
        let name = name.to_string_lossy();
        let is_page = name.ends_with(".md");
        if root.join(&file).is_dir() {
            if !is_root && !folder.starts_with("fuzz") {
                of_folder(root, &file, findings)?;
            }
        } else if is_page || !(is_root || FOREIGN.iter().any(|ending| name.ends_with(ending))) {
            let text = fs::read_to_string(root.join(&file))
                .with_context(|| format!("reading {}", file.display()))?;
            let broken = if is_page { of_page(&text) } else { of_page(&texts(&text)) };
            findings
                .extend(broken.into_iter().map(|(line, word)| format!("{}:{line}: {word}", file.display())));
        }
    }
    Ok(())
}

/// The comments and quoted texts of a file of another language; an empty line for every line without either.
fn texts(text: &str) -> String {
    let of_line = |line: &str| {
        let line = line.trim();
        match line.strip_prefix('#') {
            Some(comment) => comment.trim_start_matches('#').trim_start().to_owned(),
            None => line.split('"').skip(1).step_by(2).collect::<Vec<_>>().join("\n"),
        }
    };
    text.lines().map(|line| of_line(line).replace('\n', " | ") + "\n").collect()
}

/// The messages of error types, `#[error("…")]`, each with its line. They begin in lower case, hence the first letter is raised.
fn error_messages(text: &str) -> Vec<(usize, String)> {
    let mut messages = Vec::new();
    let mut line = 1;
    for (place, part) in text.split("#[error(\"").enumerate() {
        // Only what follows an attribute is a message.
        if place > 0
            && let Some(end) =
                part.char_indices().find(|(at, letter)| *letter == '"' && !part[..*at].ends_with('\\'))
        {
            let message = &part[..end.0];
            let mut letters = message.chars();
            let first = letters.next().map(char::to_uppercase).into_iter().flatten();
            messages.push((line, first.chain(letters).collect()));
        }
        line += part.matches('\n').count();
    }
    messages
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
        // A heading is no sentence, and names its topic as it likes.
        let is_heading = line.starts_with('#');
        if in_code || is_heading || line.trim().is_empty() {
            begins = true;
        }
        if in_code {
            continue;
        }
        for word in without_code(line).split_whitespace() {
            let is_mark = word.chars().all(|letter| !letter.is_alphanumeric());
            let bare = word.trim_matches(|letter: char| !letter.is_alphanumeric());
            if begins && !is_mark && !is_heading {
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
        begins |= is_heading;
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
    fn heading_may_be_a_clause_and_the_sentence_after_it_may_not() {
        assert_eq!(of_page("## How it works\nHow it works is shown.\n"), [(2, "How".to_owned())]);
    }

    #[test]
    fn word_for_no_person_is_found_outside_code_and_quotation() {
        assert_eq!(
            of_page("Nobody asks.\n\"nobody\" `whom`\n```\nnobody\n```\n"),
            [(1, "Nobody".to_owned())]
        );
    }

    #[test]
    fn comments_and_quoted_texts_of_other_languages_are_read() {
        let text = "# What is left\nwhat: x\nsummary: \"Nobody asks\"\n# is free.\n";
        assert_eq!(of_page(&texts(text)), [(1, "What".to_owned()), (3, "Nobody".to_owned())]);
    }

    #[test]
    fn message_of_an_error_is_read_like_a_sentence() {
        let text = "#[error(\"what {0} is\")]\nA,\n#[error(\"no \\\"x\\\": nobody\")]\nB,\n#[error(transparent)]\nC,\n";
        let messages = error_messages(text);
        assert_eq!(messages, [(1, "What {0} is".to_owned()), (3, "No \\\"x\\\": nobody".to_owned())]);
        assert_eq!(of_page(&messages[0].1), [(1, "What".to_owned())]);
        assert_eq!(of_page(&messages[1].1), [(1, "nobody".to_owned())]);
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
