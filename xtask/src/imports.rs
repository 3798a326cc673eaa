//! The directions of imports: no circle of files in a crate, nor of its folders, no import against the order of folders that a crate
//! states, and no import of a crate against the table of docs/architecture.md.
//!
//! A crate with several folders states their order in its first lines, as `//! Folders from top to bottom: a, b, c.`
//!
//! Files are read as text. An arrow leads from a file to each file whose items it names by path; re-exports are followed, and
//! code for tests is left out. A module owns the modules inside it, so its arrows to those are not counted.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

use crate::cargo::Package;
use crate::sources;

/// Every circle of files or folders, and every import against the order of a crate's folders or against the table.
pub(crate) fn findings(root: &Path, packages: &[Package]) -> Result<Vec<String>> {
    let mut crates: BTreeMap<&Path, BTreeMap<PathBuf, String>> = BTreeMap::new();
    sources::for_each(root, |path, text| {
        if let Some(package) = Package::of_file(packages, path)
            && let Ok(path) = path.strip_prefix(package.folder.join("src"))
        {
            crates.entry(&package.folder).or_default().insert(path.to_owned(), text.to_owned());
        }
    })?;
    let mut findings = Vec::new();
    for (folder, files) in &crates {
        let found = against_direction(files);
        findings.extend(found.iter().map(|found| format!("{}: {found}", folder.display())));
    }
    let page = root.join("docs/architecture.md");
    let page = fs::read_to_string(&page).with_context(|| format!("reading {}", page.display()))?;
    findings.extend(upward(&page, packages)?);
    Ok(findings)
}

// ---- files of a crate ----

/// Names from the root of a crate to a module or an item.
type Names<'text> = Vec<&'text str>;

/// A file's names for items of other files, and all that it names by path. All paths begin at the root of the crate.
#[derive(Default)]
struct Imports<'text> {
    names: BTreeMap<&'text str, Names<'text>>,
    paths: BTreeSet<Names<'text>>,
}

/// Circles of a crate's files, which come by their paths below `src`, and of its folders; and imports against the order of its folders.
fn against_direction(files: &BTreeMap<PathBuf, String>) -> Vec<String> {
    let mut modules = BTreeMap::new();
    let mut for_tests: Vec<Names<'_>> = Vec::new();
    for (path, text) in files {
        let (module, mut tokens) = (module_of(path), sources::tokens(text));
        let cut = sources::cut_tests(&mut tokens);
        for_tests.extend(cut.into_iter().map(|name| [&module[..], &[name]].concat()));
        modules.insert(module, (path, tokens));
    }
    modules.retain(|module, _| !for_tests.iter().any(|cut| module.starts_with(cut)));
    let is_module = |names: &[&str]| modules.contains_key(names);
    let imports: BTreeMap<&[&str], Imports<'_>> =
        modules.iter().map(|(module, (_, tokens))| (&module[..], read(module, tokens, &is_module))).collect();
    let arrows: Arrows<'_> = imports
        .iter()
        .map(|(from, own)| {
            let to = own.paths.iter().filter_map(|path| file_of(&imports, path, 0));
            (*from, to.filter(|to| !to.starts_with(from)).collect())
        })
        .collect();
    let file = |module: &&[&str]| modules[*module].0.display().to_string();
    let mut found: Vec<String> = ways_back(&arrows, file);
    // A circle of files would be one of their folders, too.
    if found.is_empty() {
        let folders: BTreeSet<_> =
            arrows.keys().flat_map(|module| (0..module.len()).map(move |length| &module[..length])).collect();
        let circles =
            folders.iter().map(|folder| ways_back(&inside(&arrows, folder), |entry| entry.join("/")));
        found = circles.flatten().collect();
    }
    if found.is_empty() {
        let root = ["lib.rs", "main.rs"].iter().find_map(|root| files.get(Path::new(root)));
        found = against_order(&inside(&arrows, &[]), &arrows, root.map_or("", String::as_str));
    }
    found
}

/// Imports of top folders against the order in the first lines of the crate's root, by way of files beside the folders, too.
fn against_order(tops: &Arrows<'_>, all: &Arrows<'_>, root: &str) -> Vec<String> {
    let folders: BTreeSet<&str> =
        all.keys().filter(|module| module.len() > 1 && module[0] != "bin").map(|module| module[0]).collect();
    if folders.len() < 2 {
        return Vec::new();
    }
    let text: Vec<&str> = root.lines().map_while(|line| line.strip_prefix("//!")).collect();
    let text = text.concat();
    let order = text.split_once(ORDER).and_then(|(_, rest)| rest.split_once('.'));
    let order: Vec<&str> = order.map_or(Vec::new(), |(order, _)| order.split(',').map(str::trim).collect());
    if order.iter().copied().collect::<BTreeSet<_>>() != folders {
        let folders = folders.into_iter().collect::<Vec<_>>().join(", ");
        return vec![format!("its root must state the order of its folders as `{ORDER} …`: {folders}")];
    }
    let mut found = Vec::new();
    for (place, folder) in order.iter().enumerate() {
        let below = reached(tops, folder);
        let above = order[..place].iter().filter(|above| below.contains(*above));
        found.extend(above.map(|above| format!("{folder} imports {above}, which its order puts above it")));
    }
    found
}

/// The beginning of the sentence in which a crate states the order of its folders.
const ORDER: &str = "Folders from top to bottom:";

/// The entries that one imports, directly or by others.
fn reached<'files>(tops: &Arrows<'files>, from: &'files str) -> BTreeSet<&'files str> {
    let (mut open, mut seen) = (vec![from], BTreeSet::new());
    while let Some(next) = open.pop() {
        let to = tops.iter().filter(|(from, _)| from[0] == next).flat_map(|(_, to)| to).map(|to| to[0]);
        open.extend(to.filter(|to| seen.insert(*to)));
    }
    seen
}

/// An arrow to each module whose items a module names.
type Arrows<'files> = BTreeMap<&'files [&'files str], BTreeSet<&'files [&'files str]>>;

/// The arrows between the entries of a folder, files and folders; the root of a crate is a folder, too. The folder's own `mod.rs` is in
/// none of them.
fn inside<'files>(arrows: &Arrows<'files>, folder: &[&str]) -> Arrows<'files> {
    let entry = |module: &&'files [&'files str]| {
        (module.len() > folder.len() && module.starts_with(folder)).then(|| &module[..=folder.len()])
    };
    let mut entries = Arrows::new();
    for (from, all) in arrows {
        let Some(from) = entry(from) else { continue };
        let to = all.iter().filter_map(entry);
        entries.entry(from).or_default().extend(to.filter(|to| *to != from));
    }
    entries
}

/// The circles of arrows, each once, with the names of their modules.
fn ways_back<'files>(
    arrows: &Arrows<'files>,
    name: impl Fn(&&'files [&'files str]) -> String,
) -> Vec<String> {
    let (mut found, mut seen) = (Vec::new(), BTreeSet::new());
    for module in arrows.keys() {
        if let Some(circle) = circle(arrows, module)
            && circle.iter().all(|module| seen.insert(*module))
        {
            found.push(circle.iter().chain([module]).map(&name).collect::<Vec<_>>().join(" -> "));
        }
    }
    found
}

fn module_of(file: &Path) -> Names<'_> {
    let names = file.iter().filter_map(|name| name.to_str());
    let mut names: Names<'_> = names.map(|name| name.strip_suffix(".rs").unwrap_or(name)).collect();
    if names == ["lib"] || names == ["main"] || names.last() == Some(&"mod") {
        names.pop();
    }
    names
}

/// Reads the code of a file.
fn read<'text>(
    file: &[&'text str],
    tokens: &[&'text str],
    is_module: &dyn Fn(&[&str]) -> bool,
) -> Imports<'text> {
    let mut imports = Imports::default();
    // The module that paths are relative to, with the depths of blocks at which the modules inside this file begin.
    let (mut module, mut inner, mut depth) = (file.to_vec(), Vec::new(), 0);
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        let next = tokens.get(at + 1).copied().unwrap_or_default();
        let mut trees = Vec::new();
        match *token {
            "{" => depth += 1,
            "}" => {
                depth -= 1;
                if inner.last() == Some(&depth) {
                    inner.pop();
                    module.pop();
                }
            }
            "mod" if tokens.get(at + 2) == Some(&"{") => {
                inner.push(depth);
                module.push(next);
                at += 1;
            }
            "use" if next != "<" => {
                at += 1;
                tree(tokens, &mut at, &[], &mut trees);
                for (path, name) in &trees {
                    if let Some(path) = absolute(&module, path, &imports, is_module) {
                        imports.names.insert(name, path);
                    }
                }
            }
            word if next == "::" && is_name(word) => {
                tree(tokens, &mut at, &[], &mut trees);
                at -= 1;
            }
            _ => {}
        }
        let paths = trees.iter().filter_map(|(path, _)| absolute(&module, path, &imports, is_module));
        imports.paths.extend(paths.collect::<Vec<_>>());
        at += 1;
    }
    imports
}

/// Reads a path, or a tree of paths after `use`: each with the name that it gives. Ends at the token behind it.
fn tree<'text>(
    tokens: &[&'text str],
    at: &mut usize,
    prefix: &[&'text str],
    found: &mut Vec<(Names<'text>, &'text str)>,
) {
    let (mut path, mut name, mut after_colons) = (prefix.to_vec(), "", true);
    while let Some(&token) = tokens.get(*at) {
        match token {
            "::" => after_colons = true,
            "{" if after_colons => {
                while matches!(tokens.get(*at), Some(&("{" | ","))) {
                    *at += 1;
                    tree(tokens, at, &path, found);
                }
                *at += 1;
                return;
            }
            "as" => {
                *at += 1;
                name = tokens.get(*at).copied().unwrap_or_default();
            }
            "self" if !path.is_empty() => after_colons = false,
            "*" if after_colons => after_colons = false,
            _ if after_colons && is_name(token) => {
                path.push(token);
                after_colons = false;
            }
            _ => break,
        }
        *at += 1;
    }
    if name.is_empty() {
        name = path.last().copied().unwrap_or_default();
    }
    found.push((path, name));
}

fn is_name(token: &str) -> bool {
    token.starts_with(|letter: char| letter.is_alphabetic() || letter == '_')
}

/// The same path from the root of the crate; `None` if it leads out of the crate.
fn absolute<'text>(
    module: &[&'text str],
    path: &[&'text str],
    imports: &Imports<'text>,
    is_module: &dyn Fn(&[&str]) -> bool,
) -> Option<Names<'text>> {
    let (first, rest) = path.split_first()?;
    let child = [module, &[*first]].concat();
    Some(match *first {
        "crate" => rest.to_vec(),
        "self" => [module, rest].concat(),
        "super" => {
            let ups = path.iter().take_while(|name| **name == "super").count();
            [&module[..module.len().checked_sub(ups)?], &path[ups..]].concat()
        }
        _ if is_module(&child) => [&child, rest].concat(),
        name => [imports.names.get(name)?, rest].concat(),
    })
}

/// The file that defines what a path names.
fn file_of<'files, 'text>(
    files: &BTreeMap<&'files [&'text str], Imports<'text>>,
    path: &[&'text str],
    followed: usize,
) -> Option<&'files [&'text str]> {
    let length = (0..=path.len()).rev().find(|length| files.contains_key(&path[..*length]))?;
    let (file, imports) = files.get_key_value(&path[..length])?;
    let target = path.get(length).and_then(|name| imports.names.get(name));
    match target.filter(|target| target[..] != path[..=length] && followed < 8) {
        Some(target) => file_of(files, &[&target[..], &path[length + 1..]].concat(), followed + 1),
        None => Some(file),
    }
}

/// The shortest way from a module back to it.
fn circle<'files>(
    arrows: &Arrows<'files>,
    start: &&'files [&'files str],
) -> Option<Vec<&'files [&'files str]>> {
    let mut ways = VecDeque::from([vec![*start]]);
    let mut seen = BTreeSet::new();
    while let Some(way) = ways.pop_front() {
        for to in way.last().and_then(|last| arrows.get(last))? {
            if to == start {
                return Some(way);
            }
            if seen.insert(to) {
                ways.push_back([&way[..], &[*to]].concat());
            }
        }
    }
    None
}

// ---- folders of crates ----

/// Imports of crates that the table of folders does not allow. Tests may import anything.
fn upward(page: &str, packages: &[Package]) -> Result<Vec<String>> {
    let table: Vec<(Vec<&Path>, &str)> = page
        .lines()
        .skip_while(|line| !line.starts_with("| folder | may import |"))
        .skip(2)
        .map_while(|line| line.strip_prefix('|')?.split_once('|'))
        .map(|(folders, allowed)| (named(folders), allowed))
        .collect();
    ensure!(!table.is_empty(), "docs/architecture.md has no table of folders");
    let row = |folder: &Path| {
        table.iter().enumerate().find_map(|(index, (folders, allowed))| {
            Some((index, *folders.iter().find(|own| folder.starts_with(own))?, *allowed))
        })
    };
    let mut findings = Vec::new();
    for package in packages {
        let Some((index, own, allowed)) = row(&package.folder) else {
            findings
                .push(format!("{} is not in the table of docs/architecture.md", package.folder.display()));
            continue;
        };
        let below = || table[index + 1..].iter().flat_map(|(folders, _)| folders.clone()).collect();
        let allowed = if allowed.contains("all of the below") { below() } else { named(allowed) };
        for dependency in package.dependencies.iter().filter(|dependency| !dependency.for_tests) {
            let Some(folder) = &dependency.folder else { continue };
            if !folder.starts_with(own) && !allowed.iter().any(|allowed| folder.starts_with(allowed)) {
                findings.push(format!(
                    "{} imports {}, which the table of docs/architecture.md does not allow",
                    package.folder.display(),
                    folder.display()
                ));
            }
        }
    }
    Ok(findings)
}

/// The folders in backticks.
fn named(cell: &str) -> Vec<&Path> {
    cell.split('`').skip(1).step_by(2).map(Path::new).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cargo::Dependency;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let files = files.iter().map(|(path, text)| (PathBuf::from(path), (*text).to_owned()));
        against_direction(&files.collect())
    }

    #[test]
    fn circle_of_files_is_found_however_it_is_written() {
        for (a, b) in [
            ("use crate::b::B;", "use crate::a::A;"),
            ("use super::b::B;", "fn f() { super::a::g() }"),
            ("use crate::{b::{self, B}, c};", "fn f() -> crate::a::A { todo() }"),
            ("fn f() { g(crate::b::B { h: i }) }", "mod inner { use super::super::a::A; }"),
            // By way of a re-export, of a name, and of a macro.
            ("use crate::B;", "use crate::a as other; fn f() { other::g() }"),
            ("use crate::{c::*, b}; fn f() { b::g() }", "macro_rules! m { () => { $crate::a::A } }"),
        ] {
            let files =
                [("lib.rs", "mod a; mod b; mod c; pub use b::B;"), ("a.rs", a), ("b.rs", b), ("c.rs", "")];
            assert_eq!(found(&files), ["a.rs -> b.rs -> a.rs"], "{a} / {b}");
        }
    }

    #[test]
    fn circle_of_three_files_in_folders_is_found_once() {
        let files = [
            ("lib.rs", "mod x; mod z;"),
            ("x/mod.rs", "mod y; use super::z::Z;"),
            ("x/y.rs", "use super::X;"),
            ("z.rs", "use crate::x::y::Y;"),
        ];
        assert_eq!(found(&files), ["x/mod.rs -> z.rs -> x/y.rs -> x/mod.rs"]);
    }

    #[test]
    fn circle_of_top_folders_is_found() {
        let files = [
            ("lib.rs", "//! Folders from top to bottom: a, b.\nmod a; mod b; use a::x::X;"),
            ("a/mod.rs", "pub mod x; pub mod y;"),
            ("a/x.rs", "use crate::b::v::V; use crate::Root;"),
            ("a/y.rs", "use super::x::X;"),
            ("b/mod.rs", "pub mod v; pub mod w;"),
            ("b/v.rs", ""),
            ("b/w.rs", "use crate::a::y::Y;"),
        ];
        assert_eq!(found(&files), ["a -> b -> a"]);
        assert_eq!(found(&files[..6]), [] as [&str; 0]);
    }

    #[test]
    fn circle_of_folders_in_a_folder_is_found() {
        let files = [
            ("lib.rs", "mod x;"),
            ("x/mod.rs", "mod a; mod b;"),
            ("x/a/mod.rs", "pub mod u; pub mod v; use crate::x::b::w::W;"),
            ("x/a/u.rs", ""),
            ("x/a/v.rs", ""),
            ("x/b/mod.rs", "pub mod w; use super::a::u::U;"),
            ("x/b/w.rs", ""),
        ];
        assert_eq!(found(&files), ["x/a -> x/b -> x/a"]);
    }

    #[test]
    fn import_against_the_stated_order_of_folders_is_found() {
        fn files(root: &str) -> [(&str, &str); 6] {
            [
                ("lib.rs", root),
                ("a/mod.rs", "mod x;"),
                ("a/x.rs", "use crate::f::F;"),
                ("b/mod.rs", "mod y;"),
                ("b/y.rs", ""),
                ("f.rs", "use crate::b::B;"),
            ]
        }
        let modules = "mod a; mod b; mod f;";
        let order =
            |order| format!("//! A crate.\n//!\n//! Folders from top\n//! to bottom: {order}.\n{modules}");
        assert_eq!(found(&files(&order("a, b"))), [] as [&str; 0]);
        assert_eq!(found(&files(&order("b, a"))), ["a imports b, which its order puts above it"]);
        for wrong in ["a", "a, b, f", ""] {
            assert!(found(&files(&order(wrong)))[0].starts_with("its root must state the order"), "{wrong}");
        }
        assert!(found(&files(modules))[0].ends_with("a, b"));
    }

    #[test]
    fn arrows_down_are_no_circle() {
        let files = [
            ("main.rs", "mod a; mod b; fn main() { a::run(); } pub(crate) struct Root;"),
            ("a.rs", "mod c; use crate::b::B; use crate::Root; // use crate::a::A\n"),
            ("a/c.rs", "use super::A; use std::a::b; fn b() { \"crate::a\"; }"),
            ("b.rs", "use crate::Root; #[cfg(test)] mod tests { use crate::a::A; } #[cfg(test)] mod kit;"),
            ("b/kit.rs", "use crate::a::A;"),
        ];
        assert_eq!(found(&files), [] as [&str; 0]);
    }

    #[test]
    fn import_of_a_crate_against_the_table_is_found() {
        let page = "\n| folder | may import |\n|---|---|\n| `top/` | all of the below |\n| `host/a`, `host/b` | `low/` |\n\
                    | `low/` | no other folder |\n";
        let package = |folder: &str, imports: &[(&str, bool)]| {
            let dependency = |(folder, for_tests): &(&str, bool)| Dependency {
                name: String::new(),
                folder: Some(folder.into()),
                for_tests: *for_tests,
            };
            Package {
                name: folder.into(),
                folder: folder.into(),
                targets: Vec::new(),
                for_features: Vec::new(),
                dependencies: imports.iter().map(dependency).collect(),
            }
        };
        let good = [
            package("top", &[("host/a", false), ("low/x", false)]),
            package("host/a", &[("low", false), ("host/b", true)]),
            package("low", &[("low/x", false)]),
        ];
        assert_eq!(upward(page, &good).unwrap(), [] as [&str; 0]);
        for (folder, import) in [("host/a", "host/b"), ("low/x", "host/a"), ("host/b", "top")] {
            let findings = upward(page, &[package(folder, &[(import, false)])]).unwrap();
            assert!(findings[0].starts_with(&format!("{folder} imports {import}")), "{findings:?}");
        }
        assert!(upward(page, &[package("new", &[])]).unwrap()[0].starts_with("new is not in the table"));
        assert!(upward("", &good).is_err());
    }
}
