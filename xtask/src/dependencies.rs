//! Dependencies that no code names. Sources are read as text: a name anywhere outside a comment counts as a use, and so does
//! the file of a library that is loaded at run time. And packages that a build of xtask would compile a second time.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use sluice_tests::process;

use crate::cargo::{Package, cargo};
use crate::sources;

/// Time limit of a question to cargo.
const QUESTION: Duration = Duration::from_secs(120);

/// Every unused dependency of a package, and every one of the workspace that no package has.
pub(crate) fn findings(root: &Path, packages: &[Package]) -> Result<Vec<String>> {
    let mut words: BTreeMap<&Path, BTreeSet<String>> = BTreeMap::new();
    let mut included: Vec<(&Path, PathBuf)> = Vec::new();
    sources::for_each(root, |path, text| {
        if let Some(package) = Package::of_file(packages, path) {
            words.entry(&package.folder).or_default().extend(words_of(text));
            let folder = root.join(path).parent().map(Path::to_owned).unwrap_or_default();
            let files =
                text.lines().filter_map(|line| line.trim().strip_prefix("#[path = \"")?.strip_suffix("\"]"));
            included.extend(files.map(|file| (&*package.folder, folder.join(file))));
        }
    })?;
    for (package, file) in included {
        let text = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
        words.entry(package).or_default().extend(words_of(&text));
    }
    let manifest = root.join("Cargo.toml");
    let manifest =
        fs::read_to_string(&manifest).with_context(|| format!("reading {}", manifest.display()))?;
    Ok([unnamed(packages, &words), unclaimed(packages, &manifest)].concat())
}

/// The words of a source outside comments.
fn words_of(text: &str) -> impl Iterator<Item = String> {
    let lines = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    let words = lines.flat_map(|line| line.split(|letter: char| !letter.is_alphanumeric() && letter != '_'));
    words.map(str::to_owned)
}

/// Dependencies whose name is not among the words of their package.
fn unnamed(packages: &[Package], words: &BTreeMap<&Path, BTreeSet<String>>) -> Vec<String> {
    let mut findings = Vec::new();
    for package in packages {
        let words = words.get(&*package.folder);
        let used = |name: &str| {
            words.is_some_and(|words| [name, &format!("lib{name}")].iter().any(|name| words.contains(*name)))
        };
        let idle = |name: &String| !used(name) && !package.for_features.contains(name);
        for dependency in package.dependencies.iter().filter(|dependency| idle(&dependency.name)) {
            findings.push(format!("{} does not use {}", package.folder.display(), dependency.name));
        }
    }
    findings
}

/// Packages that are compiled for xtask with other features than for the tests of the whole tree, hence twice.
pub(crate) fn compiled_twice() -> Result<Vec<String>> {
    let features = |packages: &[&str]| {
        let mut tree = cargo();
        tree.args(["tree", "--locked", "--prefix=none", "--no-dedupe", "--format={p} {f}"]).args(packages);
        process::output_of(&mut tree, QUESTION).context("asking cargo for features")
    };
    Ok(with_other_features(
        &features(&["--package=xtask", "--edges=normal,build"])?,
        &features(&["--workspace"])?,
    ))
}

/// The lines of xtask's tree of dependencies that the whole tree lacks.
fn with_other_features(of_xtask: &str, of_all: &str) -> Vec<String> {
    let lines =
        |text: &str| text.lines().map(|line| line.trim_end().to_owned()).collect::<BTreeSet<String>>();
    let other = &lines(of_xtask) - &lines(of_all);
    let finding = |line| format!("xtask/Cargo.toml enables other features than the rest of the tree: {line}");
    other.into_iter().map(finding).collect()
}

/// Dependencies of the workspace that no package has.
fn unclaimed(packages: &[Package], manifest: &str) -> Vec<String> {
    let claimed: BTreeSet<&str> =
        packages.iter().flat_map(|package| &package.dependencies).map(|own| own.name.as_str()).collect();
    manifest
        .lines()
        .skip_while(|line| *line != "[workspace.dependencies]")
        .skip(1)
        .take_while(|line| !line.starts_with('['))
        .filter_map(|line| line.split_once(" = "))
        .filter(|(name, _)| !claimed.contains(name.replace('-', "_").as_str()))
        .map(|(name, _)| format!("no package uses {name} of the workspace"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cargo::Dependency;

    fn package(folder: &str, names: &[&str]) -> Package {
        let dependency =
            |name: &&str| Dependency { name: (*name).to_owned(), folder: None, for_tests: false };
        Package {
            name: folder.into(),
            folder: folder.into(),
            targets: Vec::new(),
            dependencies: names.iter().map(dependency).collect(),
            for_features: vec!["only_for_features".to_owned()],
        }
    }

    #[test]
    fn package_with_other_features_than_in_the_whole_tree_is_found() {
        let found = with_other_features("xtask v1 \na v1 x\nb v1 y\n", "xtask v1\na v1 x,z\nb v1 y\nc v1\n");
        assert_eq!(found, ["xtask/Cargo.toml enables other features than the rest of the tree: a v1 x"]);
    }

    #[test]
    fn dependency_that_no_code_names_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write(
            "Cargo.toml",
            "[workspace]\n[workspace.dependencies]\n# Ours.\nserde-x = \"=1\"\nold = { a = 1 }\n[lints]\nx = 1\n",
        );
        write("a/src/lib.rs", "use serde_x::S;\n    // toml::from_str\nfn f() { tomlish() }\n");
        write("a/b/tests/t.rs", "fn f() { toml::g(); load(\"libdriver.so\") }\n");
        write("a/tests/t.rs", "#[path = \"../b/tests/common.rs\"]\nmod common;\n");
        write("a/b/tests/common.rs", "use shared::S;");
        let packages = [
            package("a/b", &["toml", "driver"]),
            package("a", &["serde_x", "shared", "toml", "only_for_features"]),
        ];
        let found = findings(folder.path(), &packages).unwrap();
        assert_eq!(found, ["a does not use toml", "no package uses old of the workspace"]);
    }
}
