//! The generated parts of `softgpu/README.md`: tables between marks, which name them. All other text of the page is written by hand.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use sluice_tests::paths;
use softgpu_device::{MODELS, SETTINGS};

use crate::coverage;

/// Files of the engine that choose the lowering of an opcode, and the area of their opcodes.
const OPCODES: [(&str, &str); 4] = [
    ("data.rs", "moves, arithmetic, conversions, memory"),
    ("control.rs", "control flow, barriers, warps"),
    ("matrix.rs", "matrices"),
    ("image.rs", "textures and surfaces"),
];

/// The path of the page.
pub(crate) fn path() -> PathBuf {
    paths::workspace().join("softgpu/README.md")
}

/// The page with its tables as the code has them.
pub(crate) fn page() -> Result<String> {
    let mut text = read(&path())?;
    for (name, table) in [
        ("models", models()),
        ("instructions", instructions()?),
        ("functions", functions()?),
        ("accuracy", accuracy()?),
        ("variables", variables()),
    ] {
        text = replaced(&text, name, &table)?;
    }
    Ok(text)
}

fn read(file: &Path) -> Result<String> {
    fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))
}

/// Replaces the text between the marks of a table.
fn replaced(text: &str, name: &str, table: &str) -> Result<String> {
    let (begin, end) = (format!("<!-- begin of {name}: "), format!("<!-- end of {name} -->"));
    let parts = text.split_once(&begin).and_then(|(before, rest)| {
        let (mark, rest) = rest.split_once("-->\n")?;
        let (_, after) = rest.split_once(&end)?;
        Some((before, mark, after))
    });
    let (before, mark, after) = parts.with_context(|| format!("the page has no marks of {name}"))?;
    Ok(format!("{before}{begin}{mark}-->\n{table}{end}{after}"))
}

fn models() -> String {
    let mut text =
        "| `--model` | name | capability | memory | multiprocessors | MIG |\n|---|---|---|---|---|---|\n"
            .to_owned();
    for model in MODELS {
        let sm = model.capability.sm();
        let mig = if model.division.is_some() { "yes" } else { "no" };
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "| `{}` | {} | {}.{} | {} MiB | {} | {mig} |",
            model.key,
            model.name,
            sm / 10,
            sm % 10,
            model.memory_mib,
            model.multiprocessors
        );
    }
    text
}

fn instructions() -> Result<String> {
    let folder = paths::workspace().join("softgpu/engine/src/lower");
    let mut text = "| area | opcodes |\n|---|---|\n".to_owned();
    let mut executed = BTreeSet::new();
    for (file, area) in OPCODES {
        let opcodes = opcodes(&read(&folder.join(file))?);
        ensure!(!opcodes.is_empty(), "{file} chooses no opcodes");
        let _ = writeln!(text, "| {area} | {} |", listed(&opcodes));
        executed.extend(opcodes);
    }
    let mut refused = quoted_list(&read(&folder.join("mod.rs"))?, "const KNOWN: &[&str] = &[");
    refused.retain(|opcode| !executed.contains(opcode));
    ensure!(!refused.is_empty(), "no opcode is refused");
    let _ = writeln!(text, "| valid, not executed | {} |", listed(&refused));
    let forms = between(&read(&folder.join("requirements.rs"))?, "const NOT_EXECUTED", "];");
    let forms: BTreeSet<String> = forms
        .lines()
        .filter(|line| line.trim_start().starts_with('('))
        .map(|line| quoted(line).collect::<Vec<_>>().join("."))
        .collect();
    let _ = writeln!(text, "| valid forms, not executed | {} |", listed(&forms));
    Ok(text)
}

/// The opcodes of the arms of the first choice by opcode in a file.
fn opcodes(source: &str) -> BTreeSet<String> {
    const ARM: &str = "            ";
    let arms = between(source, "match inst.opcode {\n", "\n        }\n");
    let mut found = BTreeSet::new();
    for line in arms.lines() {
        let is_arm = line.strip_prefix(ARM).is_some_and(|rest| rest.starts_with(['"', '|']));
        if is_arm {
            let patterns = line.split(" => ").next().unwrap_or(line).split(" if ").next().unwrap_or(line);
            found.extend(quoted(patterns).map(str::to_owned));
        }
    }
    found
}

/// The text between two others; empty if they are not there.
fn between(text: &str, begin: &str, end: &str) -> String {
    let rest = text.split_once(begin).map_or("", |(_, rest)| rest);
    rest.split_once(end).map_or("", |(inside, _)| inside).to_owned()
}

fn quoted(line: &str) -> impl Iterator<Item = &str> {
    line.split('"').skip(1).step_by(2)
}

/// The words in a list of the code; those that end in `_` are beginnings of none.
fn quoted_list(source: &str, begin: &str) -> BTreeSet<String> {
    let inside = between(source, begin, "];");
    quoted(&inside).filter(|word| !word.ends_with('_')).map(str::to_owned).collect()
}

fn listed(words: &BTreeSet<String>) -> String {
    words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(" ")
}

/// The functions that the driver defines: see `softgpu/cuda/build.rs`, which makes the others.
fn served() -> Result<BTreeSet<String>> {
    let root = paths::workspace();
    let mut names = BTreeSet::new();
    for folder in ["softgpu/cuda/src/api", "cuda-abi/images/src/calls"] {
        for file in fs::read_dir(root.join(folder)).context("reading the driver's functions")? {
            for line in read(&file?.path())?.lines() {
                let head = line.trim_start().strip_prefix("fn ").and_then(|rest| rest.split('(').next());
                let heads = head.into_iter().flat_map(|head| head.split(','));
                names.extend(heads.map(|name| name.trim().to_owned()));
            }
        }
    }
    Ok(names)
}

fn functions() -> Result<String> {
    let areas = coverage::areas(&served()?);
    let count = |of: fn(&coverage::Area) -> usize| areas.iter().map(of).sum::<usize>();
    let mut text = format!(
        "{} of {} functions of the driver API are served. The others return `CUDA_ERROR_NOT_SUPPORTED` (801).\n\n\
         | area | served | not served |\n|---|---|---|\n",
        count(|area| area.served),
        count(|area| area.served + area.missing.len()),
    );
    for area in &areas {
        let missing = area.missing.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(" ");
        let _ = writeln!(text, "| {} | {} | {missing} |", area.name, area.served);
    }
    Ok(text)
}

fn accuracy() -> Result<String> {
    let data = read(&paths::workspace().join("softgpu/engine/tests/data/accuracy.txt"))?;
    let mut text =
        "| instruction | largest error here, in ulp | bound of the language for hardware |\n|---|---|---|\n"
            .to_owned();
    for line in data.lines().filter(|line| !line.starts_with('#')) {
        let parts =
            line.split_once(" | ").and_then(|(measured, bound)| Some((measured.split_once(' ')?, bound)));
        let ((instruction, ulp), bound) = parts.with_context(|| format!("accuracy.txt has {line:?}"))?;
        let _ = writeln!(text, "| `{instruction}` | {ulp} | {bound} |");
    }
    Ok(text)
}

fn variables() -> String {
    let mut text =
        "| variable | key of the file | values | default | effect |\n|---|---|---|---|---|\n".to_owned();
    for setting in SETTINGS {
        let key = setting.key.map_or_else(String::new, |key| format!("`{key}`"));
        let _ = writeln!(
            text,
            "| `{}` | {key} | {} | {} | {} |",
            setting.variable, setting.values, setting.default, setting.meaning
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_of_instructions_has_the_opcodes_of_the_engine() {
        let text = instructions().unwrap();
        let row = |area: &str| text.lines().find(|line| line.starts_with(&format!("| {area}"))).unwrap();
        for (area, opcode) in [
            ("moves", "`mad24`"),
            ("moves", "`vadd`"),
            ("moves", "`prefetch`"),
            ("control", "`elect`"),
            ("control", "`brx`"),
            ("matrices", "`wmma`"),
            ("textures", "`sured`"),
        ] {
            assert!(row(area).contains(opcode), "{opcode}: {text}");
        }
        // Words inside of arms are modifiers.
        assert!(!text.contains("`bfly`") && !text.contains("`col`"), "{text}");
    }

    #[test]
    fn tables_of_the_page_are_those_of_the_code() {
        assert_eq!(read(&path()).unwrap(), page().unwrap(), "`cargo xtask docs` writes them");
    }

    #[test]
    fn only_text_between_the_marks_is_replaced() {
        let page = "a\n<!-- begin of x: from code -->\nold\n<!-- end of x -->\nb\n";
        let new = replaced(page, "x", "new\n").unwrap();
        assert_eq!(new, page.replace("old", "new"));
        assert!(replaced(page, "y", "new\n").is_err());
    }
}
