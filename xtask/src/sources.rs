//! The Rust sources of the project, for checks that read them as text.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

/// Passes every source file below `root` to `each`: its relative path and its text. Hidden and target folders are left out.
pub(crate) fn for_each(root: &Path, mut each: impl FnMut(&Path, &str)) -> Result<()> {
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| format!("reading {}", folder.display()))? {
            let entry = entry?;
            let (path, name) = (entry.path(), entry.file_name());
            let name = name.to_string_lossy();
            if entry.file_type()?.is_dir() {
                if !name.starts_with('.') && !name.starts_with("target") {
                    folders.push(path);
                }
            } else if name.ends_with(".rs") {
                let text =
                    fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
                each(path.strip_prefix(root).unwrap_or(&path), &text);
            }
        }
    }
    Ok(())
}

/// The words and marks of a source, without comments and literals.
pub(crate) fn tokens(text: &str) -> Vec<&str> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let is_word = |letter: char| letter.is_alphanumeric() || letter == '_';
        let until = |end: &str| rest.find(end).map_or(rest.len(), |at| at + end.len());
        let (length, is_token) = if rest.starts_with("//") {
            (until("\n"), false)
        } else if rest.starts_with("/*") {
            (until("*/"), false)
        } else if let Some(length) = literal(rest) {
            (length, false)
        } else if is_word(first) {
            (rest.find(|letter| !is_word(letter)).unwrap_or(rest.len()), true)
        } else if rest.starts_with("::") {
            (2, true)
        } else {
            (first.len_utf8(), !first.is_whitespace())
        };
        let (token, after) = rest.split_at(length);
        if is_token {
            tokens.push(token);
        }
        rest = after;
    }
    tokens
}

/// The names of a source's tests.
pub(crate) fn tests_of(text: &str) -> Vec<&str> {
    let mut lines = text.lines().map(str::trim_start);
    let mut names = Vec::new();
    while lines.any(|line| line == "#[test]") {
        let function = lines.find_map(|line| line.strip_prefix("fn ")?.split_once('('));
        names.extend(function.map(|(name, _)| name));
    }
    names
}

/// Length of the string or character at the start of a text; `None` for anything else, lifetimes among it.
fn literal(text: &str) -> Option<usize> {
    let body = text.trim_start_matches(['b', 'c', 'r']);
    let prefix = text.len() - body.len();
    if text[..prefix].contains('r') {
        let quote = body.trim_start_matches('#').strip_prefix('"')?;
        let start = text.len() - quote.len();
        let end = format!("\"{}", "#".repeat(start - prefix - 1));
        return Some(quote.find(&end).map_or(text.len(), |at| start + at + end.len()));
    }
    let mut letters = body.char_indices();
    let quote = letters.next().filter(|(_, letter)| matches!(letter, '"' | '\''))?.1;
    let mut is_escaped = false;
    for (count, (at, letter)) in letters.enumerate() {
        if quote == '\'' && count > 0 && !body[1..].starts_with('\\') && letter != quote {
            return None;
        }
        if letter == quote && !is_escaped {
            return Some(prefix + at + 1);
        }
        is_escaped = letter == '\\' && !is_escaped;
    }
    None
}

/// Cuts out of a file what is compiled for its tests only, and returns the names of modules that were cut and lie in files of
/// their own.
pub(crate) fn cut_tests<'text>(tokens: &mut Vec<&'text str>) -> Vec<&'text str> {
    const ATTRIBUTE: [&str; 7] = ["#", "[", "cfg", "(", "test", ")", "]"];
    let mut files = Vec::new();
    let mut from = 0;
    while let Some(found) = tokens[from..].windows(ATTRIBUTE.len()).position(|window| window == ATTRIBUTE) {
        let start = from + found;
        let item = start + ATTRIBUTE.len();
        let mut depth = 0;
        let end = tokens[item..].iter().position(|token| {
            match *token {
                "{" | "(" | "[" => depth += 1,
                "}" | ")" | "]" => depth -= 1,
                _ => {}
            }
            // A field, or an arm, has no end of its own; the rest of what it stands in goes with it.
            depth < 0 || (depth == 0 && matches!(*token, ";" | "}"))
        });
        let end = end.map_or(tokens.len(), |at| item + at + usize::from(depth == 0));
        if let [.., "mod", name, ";"] = tokens[item..end] {
            files.push(name);
        }
        tokens.drain(start..end);
        from = start;
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comment_and_literal_are_no_tokens() {
        let text = "use a::b; // c\n/* d */ let e: &'f str = \"g \\\" \"; h(b'i', '\\'', 'j', r#\"k \" \"#, br\"\");";
        assert_eq!(tokens(text).join(" "), "use a :: b ; let e : & ' f str = ; h ( , , , , ) ;");
    }

    #[test]
    fn names_of_tests_are_read_past_their_attributes() {
        let text = "fn a() {}\n#[test]\n#[ignore]\n/// C.\nfn b() {\n    #[test]\n    fn c() -> D {}\n// #[test]\nfn e() {}\n";
        assert_eq!(tests_of(text), ["b", "c"]);
    }

    #[test]
    fn code_for_tests_is_cut() {
        let text = "mod a; #[cfg(test)] mod b; #[cfg(test)] #[expect(x)] pub(crate) fn c() { d(); } fn e() {} \
                    #[cfg(test)] mod f { g!(); }";
        let mut tokens = tokens(text);
        assert_eq!(cut_tests(&mut tokens), ["b"]);
        assert_eq!(tokens.join(" "), "mod a ; fn e ( ) { }");
    }
}
