//! Calls of cargo.

use std::env;
use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;
use sluice_tests::paths::{self, Binaries};

/// The pinned cargo, in the root of the checkout.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(paths::workspace());
    command
}

/// Cargo's description of the workspace with this manifest.
fn metadata(manifest: &Path) -> Result<Value> {
    let metadata = cargo()
        .args(["metadata", "--no-deps", "--format-version=1", "--manifest-path"])
        .arg(manifest)
        .stderr(Stdio::inherit())
        .output()
        .context("starting cargo metadata")?;
    ensure!(metadata.status.success(), "cargo metadata: {}", metadata.status);
    serde_json::from_slice(&metadata.stdout).context("reading cargo metadata")
}

/// Folder of cargo's build outputs.
pub(crate) fn target_folder() -> Result<PathBuf> {
    let metadata = metadata(&paths::workspace().join("Cargo.toml"))?;
    Ok(metadata["target_directory"].as_str().context("cargo metadata names a target directory")?.into())
}

/// Folder of the release builds.
pub(crate) fn release() -> Result<Binaries> {
    Ok(Binaries::at(target_folder()?.join("release")))
}

/// Builds all programs and libraries of the tree for release: a part of Sluice runs others, which are in other packages.
pub(crate) fn build_release() -> Result<Binaries> {
    run_visibly(cargo().args(["build", "--release", "--workspace"]))?;
    release()
}

/// A package of this tree.
#[derive(Debug)]
pub(crate) struct Package {
    pub name: String,
    /// Relative to the root of the tree.
    pub folder: PathBuf,
    /// Names in code of its libraries and programs.
    pub targets: Vec<String>,
    pub dependencies: Vec<Dependency>,
    /// Names in code of dependencies that only enable features: `for-features` of its `package.metadata.sluice`.
    pub for_features: Vec<String>,
}

/// A dependency of a package.
#[derive(Debug)]
pub(crate) struct Dependency {
    /// Its name in code.
    pub name: String,
    /// Its folder in the tree, unless it comes from a registry.
    pub folder: Option<PathBuf>,
    /// True if only tests have it.
    pub for_tests: bool,
}

impl Package {
    /// The packages of all workspaces, the innermost first.
    pub(crate) fn all() -> Result<Vec<Self>> {
        let root = paths::workspace();
        let mut packages = Vec::new();
        for manifest in ["Cargo.toml", "fuzz/Cargo.toml"] {
            let metadata = metadata(&root.join(manifest))?;
            let described = metadata["packages"].as_array().context("cargo metadata lists packages")?;
            for package in described {
                packages.push(Self::described(&root, package).context("a package in cargo metadata")?);
            }
        }
        packages.sort_by_key(|package| std::cmp::Reverse(package.folder.components().count()));
        Ok(packages)
    }

    fn described(root: &Path, package: &Value) -> Option<Self> {
        let in_code = |name: &str| name.replace('-', "_");
        let inside = |path: &str| Some(Path::new(path).strip_prefix(root).ok()?.to_owned());
        let dependency = |dependency: &Value| {
            let name = dependency["rename"].as_str().or_else(|| dependency["name"].as_str())?;
            Some(Dependency {
                name: in_code(name),
                folder: dependency["path"].as_str().and_then(inside),
                for_tests: dependency["kind"] == "dev",
            })
        };
        Some(Self {
            name: package["name"].as_str()?.to_owned(),
            folder: inside(package["manifest_path"].as_str()?)?.parent()?.to_owned(),
            targets: package["targets"]
                .as_array()?
                .iter()
                .filter(|target| target["kind"][0] != "test")
                .filter_map(|target| Some(in_code(target["name"].as_str()?)))
                .collect(),
            dependencies: package["dependencies"]
                .as_array()?
                .iter()
                .map(dependency)
                .collect::<Option<_>>()?,
            for_features: package["metadata"]["sluice"]["for-features"]
                .as_array()
                .map_or_else(Vec::new, |names| names.iter().filter_map(Value::as_str).map(in_code).collect()),
        })
    }

    /// The package to which a file belongs.
    pub(crate) fn of_file<'all>(packages: &'all [Self], file: &Path) -> Option<&'all Self> {
        packages.iter().find(|package| file.starts_with(&package.folder))
    }
}

/// Runs a command that shows its own progress.
pub(crate) fn run_visibly(command: &mut Command) -> Result<()> {
    let name = sluice_tests::process::display(command);
    let status = command.status().with_context(|| format!("starting {name}"))?;
    ensure!(status.success(), "{name}: {status}");
    Ok(())
}

/// True if a command can be run and succeeds. Its output is dropped.
pub(crate) fn works<I: AsRef<OsStr>>(program: &str, arguments: impl IntoIterator<Item = I>) -> bool {
    let mut command = Command::new(program);
    command.args(arguments).env_remove("RUSTUP_TOOLCHAIN").stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// One compiled test binary.
#[derive(Debug, Clone)]
pub(crate) struct TestBinary {
    /// The crate of unit tests, or the target of integration tests.
    pub name: String,
    pub path: PathBuf,
    /// The package's folder, in which cargo runs its tests.
    pub folder: PathBuf,
}

impl TestBinary {
    /// The target of a package's integration tests. Its modules are the files of `tests/`, and name the tests alone.
    const OF_FILES: &str = "main";

    /// `crate::path::test`, or `file::path::test` of integration tests.
    pub(crate) fn full_name(&self, test: &str) -> String {
        if self.name == Self::OF_FILES { test.to_owned() } else { format!("{}::{test}", self.name) }
    }
}

/// Builds tests with `command`, a `cargo test --no-run` with its options, and lists the test binaries.
pub(crate) fn build_tests(command: &mut Command) -> Result<Vec<TestBinary>> {
    command.args(["--no-run", "--message-format=json-render-diagnostics"]).stdout(Stdio::piped());
    let name = sluice_tests::process::display(command);
    let mut child = command.spawn().with_context(|| format!("starting {name}"))?;
    let messages = BufReader::new(child.stdout.take().context("standard output is piped")?);
    let mut binaries = Vec::new();
    for line in messages.lines() {
        let message: Value = serde_json::from_str(&line?).context("reading cargo's messages")?;
        binaries.extend(test_binary(&message));
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("{name}: {status}");
    }
    binaries.sort_by(|a, b| (&a.name, &a.folder).cmp(&(&b.name, &b.folder)));
    Ok(binaries)
}

fn test_binary(message: &Value) -> Option<TestBinary> {
    let is_test = message["profile"]["test"].as_bool()?;
    let path = message["executable"].as_str()?;
    let manifest = Path::new(message["manifest_path"].as_str()?);
    is_test.then_some(TestBinary {
        name: message["target"]["name"].as_str()?.replace('-', "_"),
        path: path.into(),
        folder: manifest.parent()?.to_path_buf(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn package_is_read_from_cargos_description() {
        let described = json!({"name": "a-b", "manifest_path": "/w/a/b/Cargo.toml", "targets": [
            {"name": "a-b", "kind": ["lib"]}, {"name": "main", "kind": ["test"]}], "dependencies": [
            {"name": "one-c", "rename": null, "kind": null, "path": "/w/one"},
            {"name": "two", "rename": "second", "kind": "dev"},
        ], "metadata": {"sluice": {"for-features": ["one-c"]}}});
        let package = Package::described(Path::new("/w"), &described).unwrap();
        assert_eq!(package.folder, Path::new("a/b"));
        assert_eq!(package.targets, ["a_b"]);
        let dependency = |index: usize| {
            let Dependency { name, folder, for_tests } = &package.dependencies[index];
            (name.as_str(), folder.as_deref(), *for_tests)
        };
        assert_eq!(dependency(0), ("one_c", Some(Path::new("one")), false));
        assert_eq!(dependency(1), ("second", None, true));
        assert_eq!(package.for_features, ["one_c"]);
        let outer = Package {
            name: "a".into(),
            folder: "a".into(),
            targets: Vec::new(),
            dependencies: Vec::new(),
            for_features: Vec::new(),
        };
        let packages = [package, outer];
        let folder = |file| Package::of_file(&packages, Path::new(file)).map(|found| found.folder.clone());
        assert_eq!(folder("a/b/src/lib.rs"), Some("a/b".into()));
        assert_eq!(folder("a/src/lib.rs"), Some("a".into()));
        assert_eq!(folder("c/src/lib.rs"), None);
    }

    #[test]
    fn only_test_binaries_are_taken_from_cargos_messages() {
        let message = |test: bool| {
            json!({"reason": "compiler-artifact", "profile": {"test": test}, "executable": "/t/deps/vm-1",
                   "manifest_path": "/w/tests/Cargo.toml", "target": {"name": "sluice-protocol"}})
        };
        let binary = test_binary(&message(true)).unwrap();
        assert_eq!(
            (binary.name.as_str(), binary.folder.as_path()),
            ("sluice_protocol", Path::new("/w/tests"))
        );
        assert!(test_binary(&message(false)).is_none());
        assert!(test_binary(&json!({"reason": "build-finished", "success": true})).is_none());
    }

    #[test]
    fn test_is_named_by_its_crate_or_by_its_file() {
        let binary =
            |name: &str| TestBinary { name: name.to_owned(), path: "/t".into(), folder: "/w".into() };
        assert_eq!(binary("sluice_protocol").full_name("ring::full"), "sluice_protocol::ring::full");
        assert_eq!(binary("main").full_name("vm::boots"), "vm::boots");
    }
}
