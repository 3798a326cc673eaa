//! The root directory of a confined process: an empty file system with the files of a list, each at its path on the host.
//!
//! The launcher plans it ([`Root`]) and the new process makes it, between fork and exec ([`super::namespaces`]).

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::{CString, OsStr, OsString},
    fs, io,
    os::unix::ffi::OsStrExt as _,
    path::{Component, Path, PathBuf},
};

use super::files::{Access, EMPTY, FileList, OWN_THREADS};

/// The directory of the new root where the host's root is while the files are bound.
pub(super) const HOST: &str = "/.host";
/// Largest number of symbolic links in one path, as in the kernel.
const LINKS: usize = 40;

/// Attributes of a mount, of `mount_setattr(2)`.
pub(super) const READ_ONLY: u64 = 0x1;
pub(super) const NO_SUID: u64 = 0x2;
pub(super) const NO_DEVICES: u64 = 0x4;
pub(super) const NO_EXEC: u64 = 0x8;

/// The attributes of the mount of a file for this use.
const fn attributes(access: Access) -> u64 {
    match access {
        Access::Read => READ_ONLY | NO_SUID | NO_DEVICES | NO_EXEC,
        Access::Execute => READ_ONLY | NO_SUID | NO_DEVICES,
        // A node can be written on a read-only file system.
        Access::Device => READ_ONLY | NO_SUID | NO_EXEC,
        Access::Write => NO_SUID | NO_DEVICES | NO_EXEC,
    }
}

/// A step in making a root; paths are those in the new root.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Make a directory.
    Directory(CString),
    /// Make a file with these contents.
    File { path: CString, contents: Vec<u8> },
    /// Make a symbolic link.
    Link { target: CString, path: CString },
    /// Bind a file or directory there, usually one of the host.
    Bind { source: CString, path: CString, attributes: u64 },
}

/// The plan of a root.
#[derive(Debug, Default)]
pub(super) struct Root {
    steps: Vec<Step>,
    /// Paths that exist in the new root.
    placed: BTreeSet<PathBuf>,
    /// Paths of the host that were looked up, with the target of each symbolic link: most paths of a list share their first directories.
    links: BTreeMap<PathBuf, Option<PathBuf>>,
    /// Files of the host that are bound, and directories with all their files; later ones cover earlier ones.
    bound: Vec<(PathBuf, Access)>,
}

impl Root {
    /// The steps, in order.
    pub(super) fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// The root with the files of a list, the directory of its own process in `/proc`, and an empty directory.
    pub(super) fn of(list: &FileList) -> io::Result<Self> {
        let mut root = Self::default();
        // The mount of a directory covers those of its files that are there already.
        let (mut directories, files): (Vec<_>, Vec<_>) = list.files().partition(|file| file.is_directory);
        directories
            .sort_by_cached_key(|file| file.path.canonicalize().map_or(0, |path| path.components().count()));
        let mut all = directories.into_iter().chain(files);
        all.try_for_each(|file| root.add(&file.path, file.is_directory, file.access))?;
        list.replaced().try_for_each(|(path, contents)| root.replace(path, contents))?;
        root.add_own_process(list.names_threads())?;
        root.add_empty_directory(Path::new(EMPTY))?;
        Ok(root)
    }

    /// Adds a file or directory of the host at its absolute path. Symbolic links in the path exist in the new root, too.
    fn add(&mut self, path: &Path, is_directory: bool, access: Access) -> io::Result<()> {
        let file = self.follow(path)?;
        match self.bound.iter().rfind(|(bound, _)| file.starts_with(bound)) {
            Some((bound, granted)) if *bound == file || *granted == access => return Ok(()),
            // It is in the bound directory, which is for another use.
            Some(_) => {}
            None if is_directory => self.directory(&file)?,
            None => {
                self.steps.push(Step::File { path: c_string(&file)?, contents: Vec::new() });
                self.placed.insert(file.clone());
            }
        }
        self.bind(&file, &file, access)?;
        self.bound.push((file, access));
        Ok(())
    }

    /// Covers a file that is in the root already by one with these contents.
    fn replace(&mut self, path: &Path, contents: &[u8]) -> io::Result<()> {
        let source = c_string(&Path::new("/").join(format!(".replaced-{}", self.steps.len())))?;
        self.steps.push(Step::File { path: source.clone(), contents: contents.to_owned() });
        self.steps.push(Step::Bind { source, path: c_string(path)?, attributes: attributes(Access::Read) });
        Ok(())
    }

    /// Adds `/proc/self`: of all processes, the process sees only itself. It may name its threads there if `names_threads`.
    fn add_own_process(&mut self, names_threads: bool) -> io::Result<()> {
        let path = Path::new("/proc/self");
        self.directory(Path::new("/proc"))?;
        self.directory(path)?;
        self.bind(path, path, Access::Read)?;
        let threads = Path::new(OsStr::from_bytes(OWN_THREADS.to_bytes()));
        if names_threads { self.bind(threads, threads, Access::Write) } else { Ok(()) }
    }

    /// Adds an empty directory that the process cannot write to.
    fn add_empty_directory(&mut self, path: &Path) -> io::Result<()> {
        let mut parents: Vec<&Path> = path.ancestors().collect();
        parents.reverse();
        parents.into_iter().try_for_each(|directory| self.directory(directory))
    }

    fn bind(&mut self, source: &Path, path: &Path, access: Access) -> io::Result<()> {
        let mut host = OsString::from(HOST);
        host.push(source);
        let (source, path) = (c_string(Path::new(&host))?, c_string(path)?);
        self.steps.push(Step::Bind { source, path, attributes: attributes(access) });
        Ok(())
    }

    fn directory(&mut self, path: &Path) -> io::Result<()> {
        if path != Path::new("/") && self.placed.insert(path.to_owned()) {
            self.steps.push(Step::Directory(c_string(path)?));
        }
        Ok(())
    }

    /// The path of the file behind all symbolic links. Its parents, and the links, become part of the new root.
    fn follow(&mut self, path: &Path) -> io::Result<PathBuf> {
        let mut left = parts(path);
        let mut done = PathBuf::from("/");
        let mut links = 0;
        while let Some(name) = left.pop() {
            if name == ".." {
                done.pop();
                continue;
            }
            let next = done.join(name);
            let is_bound = self.bound.iter().any(|(bound, _)| next.starts_with(bound));
            if let Some(target) = self.target(&next)? {
                links += 1;
                if links > LINKS {
                    return Err(rustix::io::Errno::LOOP.into());
                }
                if !is_bound && self.placed.insert(next.clone()) {
                    self.steps.push(Step::Link { target: c_string(&target)?, path: c_string(&next)? });
                }
                if target.is_absolute() {
                    done = PathBuf::from("/");
                }
                left.extend(parts(&target));
            } else {
                if !is_bound && !left.is_empty() {
                    self.directory(&next)?;
                }
                done = next;
            }
        }
        Ok(done)
    }

    /// The target of a symbolic link of the host; `None` if the file is none.
    fn target(&mut self, path: &Path) -> io::Result<Option<PathBuf>> {
        if let Some(known) = self.links.get(path) {
            return Ok(known.clone());
        }
        let target = match fs::read_link(path) {
            Ok(target) => Some(target),
            // `EINVAL`, for every other kind of file.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => None,
            Err(error) => return Err(error),
        };
        self.links.insert(path.to_owned(), target.clone());
        Ok(target)
    }
}

/// The names in a path, the last one first.
fn parts(path: &Path) -> Vec<OsString> {
    let named = path.components().filter_map(|component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::Prefix(_) | Component::RootDir | Component::CurDir => None,
    });
    let mut names: Vec<OsString> = named.collect();
    names.reverse();
    names
}

fn c_string(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(root: &Root) -> Vec<String> {
        let text = |path: &CString| path.to_string_lossy().into_owned();
        let step = |step: &Step| match step {
            Step::Directory(path) => format!("directory {}", text(path)),
            Step::File { path, .. } => format!("file {}", text(path)),
            Step::Link { target, path } => format!("link {} -> {}", text(path), text(target)),
            Step::Bind { source, path, .. } => format!("bind {} {}", text(source), text(path)),
        };
        root.steps().iter().map(step).collect()
    }

    #[test]
    fn file_behind_links_is_bound_once_and_its_links_exist() {
        let place = tempfile::tempdir().unwrap();
        let base = place.path().canonicalize().unwrap();
        fs::create_dir(base.join("real")).unwrap();
        fs::write(base.join("real/lib.so.2"), "").unwrap();
        std::os::unix::fs::symlink("real", base.join("lib")).unwrap();
        std::os::unix::fs::symlink("lib.so.2", base.join("real/lib.so")).unwrap();
        let mut root = Root::default();
        root.add(&base.join("lib/lib.so"), false, Access::Execute).unwrap();
        root.add(&base.join("real/lib.so.2"), false, Access::Execute).unwrap();
        let base = base.display();
        let all = texts(&root);
        let end = &all[all.len() - 5..];
        assert_eq!(
            end,
            [
                format!("link {base}/lib -> real"),
                format!("directory {base}/real"),
                format!("link {base}/real/lib.so -> lib.so.2"),
                format!("file {base}/real/lib.so.2"),
                format!("bind /.host{base}/real/lib.so.2 {base}/real/lib.so.2"),
            ]
        );
    }

    #[test]
    fn file_of_a_bound_directory_is_bound_again_for_another_use_only() {
        let place = tempfile::tempdir().unwrap();
        let base = place.path().canonicalize().unwrap();
        fs::create_dir(base.join("inner")).unwrap();
        fs::write(base.join("inner/file"), "").unwrap();
        let mut root = Root::default();
        root.add(&base, true, Access::Write).unwrap();
        let before = root.steps().len();
        root.add(&base.join("inner/file"), false, Access::Write).unwrap();
        assert_eq!(root.steps().len(), before);
        root.add(&base.join("inner/file"), false, Access::Read).unwrap();
        let (base, all) = (base.display(), texts(&root));
        assert_eq!(all[before..], [format!("bind /.host{base}/inner/file {base}/inner/file")]);
    }

    // Promise: F90
    #[test]
    fn directories_are_bound_before_their_files_and_outer_ones_first() {
        let place = tempfile::tempdir().unwrap();
        let base = place.path().canonicalize().unwrap();
        fs::create_dir(base.join("inner")).unwrap();
        fs::write(base.join("inner/library"), "").unwrap();
        let mut list = FileList::default();
        list.add(&base.join("inner/library"), Access::Execute).unwrap();
        list.add(&base.join("inner"), Access::Device).unwrap();
        list.add(&base, Access::Read).unwrap();
        let root = Root::of(&list).unwrap();
        let binds = root.steps().iter().filter_map(|step| match step {
            Step::Bind { path, attributes, .. } => {
                Some((Path::new(OsStr::from_bytes(path.as_bytes())), *attributes))
            }
            _ => None,
        });
        assert_eq!(
            binds.filter(|(path, _)| path.starts_with(&base)).collect::<Vec<_>>(),
            [
                (base.as_path(), attributes(Access::Read)),
                (base.join("inner").as_path(), attributes(Access::Device)),
                (base.join("inner/library").as_path(), attributes(Access::Execute)),
            ]
        );
    }

    #[test]
    fn link_in_a_bound_directory_leads_to_a_file_elsewhere() {
        let place = tempfile::tempdir().unwrap();
        let base = place.path().canonicalize().unwrap();
        fs::create_dir(base.join("bound")).unwrap();
        fs::write(base.join("file"), "").unwrap();
        std::os::unix::fs::symlink("../file", base.join("bound/link")).unwrap();
        let mut root = Root::default();
        root.add(&base.join("bound"), true, Access::Read).unwrap();
        let before = root.steps().len();
        root.add(&base.join("bound/link"), false, Access::Read).unwrap();
        let (base, all) = (base.display(), texts(&root));
        assert_eq!(
            all[before..],
            [format!("file {base}/file"), format!("bind /.host{base}/file {base}/file")]
        );
    }

    // Promise: F90
    #[test]
    fn directory_of_a_listed_file_can_be_listed_itself() {
        let place = tempfile::tempdir().unwrap();
        let base = place.path().canonicalize().unwrap();
        fs::write(base.join("file"), "").unwrap();
        let mut root = Root::default();
        root.add(&base.join("file"), false, Access::Read).unwrap();
        root.add(&base, true, Access::Read).unwrap();
        let (base, all) = (base.display(), texts(&root));
        assert_eq!(all.last(), Some(&format!("bind /.host{base} {base}")));
        assert_eq!(all.iter().filter(|step| **step == format!("directory {base}")).count(), 1);
    }

    #[test]
    fn circle_of_links_is_an_error() {
        let place = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("b", place.path().join("a")).unwrap();
        std::os::unix::fs::symlink("a", place.path().join("b")).unwrap();
        let error = Root::default().add(&place.path().join("a"), false, Access::Read).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ELOOP));
    }
}
