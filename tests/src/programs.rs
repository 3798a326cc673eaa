//! The CUDA programs under `tests/programs`: each checks itself, prints its results, and ends with PASS or FAIL.

use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::fs::symlink;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::{Context as _, Result, ensure};

use crate::paths;
use crate::process::Finished;
use crate::progress;
use crate::toolchain::{self, Toolkit};

/// A compiled program.
#[derive(Debug, Clone)]
pub struct Program {
    /// The name of its source file without the ending.
    pub name: String,
    /// The executable.
    pub path: PathBuf,
}

/// The programs of a bundle.
#[derive(Debug, Clone)]
pub struct BundledPrograms {
    /// Programs that check themselves.
    pub programs: Vec<Program>,
    /// Programs that attack, or that search for memory of others.
    pub hostile: Vec<Program>,
    /// The runtime that all of them load.
    pub runtime: PathBuf,
}

/// Fails with the output of a program if that found an error.
///
/// # Errors
/// When it failed, or its last line is not PASS.
pub fn passed(finished: &Finished) -> Result<()> {
    let Finished { status, stdout, stderr, .. } = finished;
    ensure!(status.success() && stdout.ends_with("PASS\n"), "{status}\n{stdout}\n{stderr}");
    Ok(())
}

/// Compiles all programs, or takes them from the cache if no input has changed. In order of name.
///
/// # Errors
/// When the compiler is missing and cannot be fetched, or does not accept a program.
pub fn compile_all() -> Result<Vec<Program>> {
    compile_folder(&paths::workspace().join("tests/programs"), &USUAL)
}

/// Compiles all programs for a bundle that travels to other machines: with the shared runtime, because each program with the static one has
/// 0.8 MiB. Returns the programs and the runtime, which must lie in the folder of the programs.
///
/// # Errors
/// As [`compile_all`].
pub fn compile_for_bundle() -> Result<BundledPrograms> {
    let programs = compile_folder(&paths::workspace().join("tests/programs"), &BUNDLED)?;
    let hostile = compile_folder(&paths::workspace().join("tests/programs/hostile"), &BUNDLED_HOSTILE)?;
    Ok(BundledPrograms { programs, hostile, runtime: Toolkit::fetch()?.shared_runtime()? })
}

/// Compiles the programs that attack, or that search for memory of others. They are of use only to tests that judge their
/// output.
///
/// # Errors
/// As [`compile_all`].
pub fn compile_hostile() -> Result<Vec<Program>> {
    compile_folder(&paths::workspace().join("tests/programs/hostile"), &USUAL)
}

/// One of those, by name.
///
/// # Errors
/// When it does not exist, or cannot be compiled.
pub fn hostile(name: &str) -> Result<PathBuf> {
    find(compile_hostile()?, name)
}

/// One of the other programs, by name.
///
/// # Errors
/// When it does not exist, or cannot be compiled.
pub fn program(name: &str) -> Result<PathBuf> {
    find(compile_all()?, name)
}

fn find(programs: Vec<Program>, name: &str) -> Result<PathBuf> {
    let found = programs.into_iter().find(|program| program.name == name);
    Ok(found.with_context(|| format!("no program {name}"))?.path)
}

/// A way to link programs. All are compiled in one way: that takes a second and more for each, and linking a tenth of one.
struct Linkage {
    flags: &'static [&'static str],
    /// Folder of the cache.
    built: &'static str,
}

const USUAL: Linkage = Linkage { flags: toolchain::LINK_FLAGS, built: "programs" };
const BUNDLED: Linkage = Linkage { flags: toolchain::BUNDLE_FLAGS, built: "programs-bundled" };
const BUNDLED_HOSTILE: Linkage =
    Linkage { flags: toolchain::BUNDLE_FLAGS, built: "programs-bundled-hostile" };
/// Folder of the cache for the objects of all programs.
const OBJECTS: &str = "programs-objects";

fn compile_folder(folder: &Path, way: &Linkage) -> Result<Vec<Program>> {
    let mut sources: Vec<PathBuf> = fs::read_dir(folder)
        .with_context(|| format!("reading {}", folder.display()))?
        .flatten()
        .map(|entry| entry.path())
        .collect();
    sources.sort();
    // Subfolders include files of the parent folder.
    let shared = paths::workspace().join("tests/programs/check.h");
    let common: Vec<&PathBuf> =
        sources.iter().filter(|path| has_extension(path, "h")).chain([&shared]).collect();
    let programs: Vec<&PathBuf> = sources.iter().filter(|path| has_extension(path, "cu")).collect();
    ensure!(!programs.is_empty(), "no programs in {}", folder.display());

    let _lock = paths::cache_lock(way.built)?;
    let _objects_lock = paths::cache_lock(OBJECTS)?;
    let [built, objects] = [way.built, OBJECTS].map(|name| paths::cache().map(|cache| cache.join(name)));
    let (built, objects) = (built?, objects?);
    for folder in [&built, &objects] {
        fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    }
    let compile = |source: &&PathBuf| compile(source, &common, (&objects, &built), way.flags);
    let processors = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        let parts = programs.chunks(programs.len().div_ceil(processors).max(1));
        let threads: Vec<_> = parts
            .map(|part| scope.spawn(move || part.iter().map(compile).collect::<Result<Vec<_>>>()))
            .collect();
        let mut compiled = Vec::with_capacity(programs.len());
        for thread in threads {
            compiled.extend(thread.join().unwrap_or_else(|panic| resume_unwind(panic))?);
        }
        Ok(compiled)
    })
}

fn compile(
    source: &Path,
    common: &[&PathBuf],
    (objects, built): (&Path, &Path),
    link: &[&str],
) -> Result<Program> {
    let name = source.file_stem().and_then(|stem| stem.to_str()).context("a program has a name")?.to_owned();
    let sources: Vec<&Path> = common.iter().map(|path| path.as_path()).chain([source]).collect();
    let compile = [toolchain::COMPILE_FLAGS, &["-c"]].concat();
    let way = toolchain::identity(&[&compile[..], link].concat());
    let path = cached(built, &name, &sources, &way, |unfinished| {
        let way = toolchain::identity(&compile);
        let object = cached(objects, &format!("{name}.o"), &sources, &way, |unfinished| {
            Toolkit::fetch()?.compile_with(&compile, source, unfinished)
        })?;
        // The compiler driver knows an object by the end of its name.
        let named = tempfile::tempdir().context("a folder for a link")?;
        let input = named.path().join("program.o");
        symlink(&object, &input).context("linking an object")?;
        Toolkit::fetch()?.compile_with(link, &input, unfinished)
    })?;
    Ok(Program { name, path })
}

/// The output of `make` for `sources` and a certain way, made now or before. The caller holds the lock of the folder.
pub(crate) fn cached(
    built: &Path,
    name: &str,
    sources: &[&Path],
    way: &str,
    make: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let mut hasher = DefaultHasher::new();
    way.hash(&mut hasher);
    for path in sources {
        fs::read(path).with_context(|| format!("reading {}", path.display()))?.hash(&mut hasher);
    }
    let path = built.join(format!("{name}-{:016x}", hasher.finish()));
    if !path.exists() {
        progress::step(format!("compiling {name}"));
        // Under another name first, so that an interrupted compiler leaves no file that looks finished.
        let unfinished = built.join(format!("{name}.unfinished"));
        make(&unfinished)?;
        remove_older(built, name)?;
        fs::rename(&unfinished, &path).with_context(|| format!("moving {name} into place"))?;
    }
    Ok(path)
}

fn remove_older(built: &Path, name: &str) -> Result<()> {
    for entry in fs::read_dir(built)?.flatten() {
        let file = entry.file_name();
        if file.to_str().and_then(|file| file.rsplit_once('-')).is_some_and(|(stem, _)| stem == name) {
            fs::remove_file(entry.path()).with_context(|| format!("removing the old {name}"))?;
        }
    }
    Ok(())
}

fn has_extension(path: &Path, extension: &str) -> bool {
    path.extension().is_some_and(|own| own == extension)
}
