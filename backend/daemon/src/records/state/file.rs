//! A small file whose content was always written as a whole, even if its writer is killed or the power fails.
//!
//! The first line is a header: the version of the content and its SHA-256. The content, one JSON document, follows. A new file
//! is written beside the old one and flushed; the old one is renamed to be the previous, the new one to be the current, and the
//! directory is flushed. Only then is the write reported as done. A reader takes the current one; if there is none, a writer
//! was killed between the two renames, and the previous is the last one that was reported.
//!
//! A disk may take seconds, or for ever: a caller that must not wait as long writes by [`off_thread`]. The caller ensures that
//! one thread at a time writes a file.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use sha2::{Digest as _, Sha256};
use tokio::task::spawn_blocking;

use crate::fault;

/// Limit of a file that is read, in bytes.
const LARGEST: u64 = 256 << 20;

/// Runs work that may wait for a disk on another thread. The work continues if its caller has gone; a lock that `work` holds
/// keeps the order of writes.
pub(crate) async fn off_thread<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    spawn_blocking(work).await.map_err(io::Error::other)?
}

/// A file of a version.
#[derive(Clone, Debug)]
pub(crate) struct StateFile {
    path: PathBuf,
    version: u32,
}

/// The result of a read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum FoundState<T> {
    /// No file was ever written.
    Nothing,
    /// The content last written.
    Current(T),
    /// The content before the last, and the error in the last.
    Previous(T, String),
}

/// No content can be read.
#[derive(Debug, thiserror::Error)]
#[error("{path} cannot be understood ({current}), nor can the file before it ({previous})")]
pub(crate) struct Unreadable {
    path: String,
    current: String,
    previous: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StateHeader {
    version: u32,
    sha256: String,
}

impl StateFile {
    pub(crate) fn new(path: PathBuf, version: u32) -> Self {
        Self { path, version }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    fn previous(&self) -> PathBuf {
        self.path.with_extension("previous.json")
    }

    /// Reads the content last written without changing a file: for content that is of no use once it is not the last, and for
    /// checks.
    pub(crate) fn peek<T: DeserializeOwned>(&self) -> Result<Option<T>, String> {
        match self.read(&self.path)? {
            Some(content) => Ok(Some(content)),
            None => self.read(&self.previous()),
        }
    }

    /// Reads the content last written. A file that cannot be understood is set aside, for a person to inspect, so that it never
    /// replaces a valid one.
    pub(crate) fn load<T: DeserializeOwned>(&self) -> Result<FoundState<T>, Unreadable> {
        let current = match self.read(&self.path) {
            Ok(Some(content)) => return Ok(FoundState::Current(content)),
            Ok(None) => None,
            Err(why) => Some(why),
        };
        match (self.read(&self.previous()), current) {
            (Ok(Some(content)), None) => Ok(FoundState::Current(content)),
            (Ok(Some(content)), Some(why)) => {
                let aside = self.path.with_extension("corrupt.json");
                match fs::rename(&self.path, aside) {
                    Ok(()) => Ok(FoundState::Previous(content, why)),
                    Err(error) => Err(Unreadable {
                        path: self.path.display().to_string(),
                        current: why,
                        previous: format!("the first cannot be set aside: {error}"),
                    }),
                }
            }
            (Ok(None), None) => Ok(FoundState::Nothing),
            (previous, current) => Err(Unreadable {
                path: self.path.display().to_string(),
                current: current.unwrap_or_else(|| "it does not exist".to_owned()),
                previous: previous.err().unwrap_or_else(|| "it does not exist".to_owned()),
            }),
        }
    }

    fn read<T: DeserializeOwned>(&self, path: &Path) -> Result<Option<T>, String> {
        let bytes = match fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.to_string()),
            Ok(metadata) if metadata.len() > LARGEST => return Err("it is too long".to_owned()),
            Ok(_) => fs::read(path).map_err(|error| error.to_string())?,
        };
        self.decode(&bytes).map(Some)
    }

    fn decode<T: DeserializeOwned>(&self, bytes: &[u8]) -> Result<T, String> {
        let end = bytes.iter().position(|byte| *byte == b'\n').ok_or("it has no header")?;
        let (header, content) = (&bytes[..end], &bytes[end + 1..]);
        let header: StateHeader =
            serde_json::from_slice(header).map_err(|error| format!("header: {error}"))?;
        if header.version != self.version {
            return Err(format!("it is of version {}, not {}", header.version, self.version));
        }
        if header.sha256 != sum(content) {
            return Err("its checksum is wrong".to_owned());
        }
        serde_json::from_slice(content).map_err(|error| error.to_string())
    }

    /// Replaces the content; returns when the new one is durable. If that fails, the old content stays.
    pub(crate) fn store(&self, content: &impl Serialize) -> io::Result<()> {
        fault::point("state-begin");
        let file = self.write(content)?;
        fault::point("state-written");
        flush(&file)?;
        fault::point("state-flushed");
        self.put()?;
        fault::point("state-renamed");
        // The names, too, must survive a power cut.
        flush(&File::open(self.path.parent().unwrap_or(Path::new("/")))?)?;
        fault::point("state-done");
        Ok(())
    }

    /// As [`StateFile::store`], for content that need not survive the machine, only this process.
    pub(crate) fn store_for_processes(&self, content: &impl Serialize) -> io::Result<()> {
        self.write(content)?;
        self.put()
    }

    fn new_path(&self) -> PathBuf {
        self.path.with_extension("new")
    }

    fn write(&self, content: &impl Serialize) -> io::Result<File> {
        let content = serde_json::to_vec(content)?;
        let header = serde_json::to_vec(&StateHeader { version: self.version, sha256: sum(&content) })?;
        let mut new = OpenOptions::new();
        let mut file = new.write(true).create(true).truncate(true).mode(0o600).open(self.new_path())?;
        file.write_all(&[header.as_slice(), b"\n"].concat())?;
        fault::point("state-header");
        file.write_all(&content)?;
        Ok(file)
    }

    fn put(&self) -> io::Result<()> {
        match fs::rename(&self.path, self.previous()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        fault::point("state-between");
        fs::rename(self.new_path(), &self.path)
    }

    /// Removes all files.
    pub(crate) fn remove(&self) -> io::Result<()> {
        for path in [self.previous(), self.path.clone()] {
            match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Makes a file or directory survive a power cut.
fn flush(file: &File) -> io::Result<()> {
    #[cfg(test)]
    tests::note_flush(file);
    file.sync_all()
}

fn sum(content: &[u8]) -> String {
    use std::fmt::Write as _;
    let mut text = String::with_capacity(64);
    for byte in Sha256::digest(content) {
        // Writing to a String cannot fail.
        _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, os::unix::fs::MetadataExt as _};

    use super::*;
    use proptest::prelude::*;

    /// A flushed file: its inode, and the inode of the current state at that moment.
    #[derive(Debug, PartialEq, Eq)]
    struct Flush {
        of: u64,
        current: Option<u64>,
    }

    #[derive(Debug)]
    struct Watch {
        current: PathBuf,
        flushes: Vec<Flush>,
    }

    thread_local! {
        static WATCH: RefCell<Option<Watch>> = const { RefCell::new(None) };
    }

    fn inode(path: &Path) -> Option<u64> {
        fs::metadata(path).ok().map(|metadata| metadata.ino())
    }

    pub(super) fn note_flush(file: &File) {
        WATCH.with_borrow_mut(|watch| {
            let Some(watch) = watch else { return };
            let of = file.metadata().expect("an open file").ino();
            watch.flushes.push(Flush { of, current: inode(&watch.current) });
        });
    }

    // Promise: A9
    #[test]
    fn state_is_flushed_before_it_is_current_and_its_directory_is_flushed_after_it() {
        let (directory, file) = place();
        file.store(&"the old one").expect("written");
        let old = inode(file.path());
        WATCH.set(Some(Watch { current: file.path().to_owned(), flushes: Vec::new() }));
        file.store(&"the new one").expect("written");
        let watch = WATCH.take().expect("it was set");
        let (new, directory) = (inode(file.path()), inode(directory.path()).expect("a directory"));
        assert_ne!(old, new);
        let expected =
            [Flush { of: new.expect("there"), current: old }, Flush { of: directory, current: new }];
        assert_eq!(watch.flushes, expected);
    }

    fn place() -> (tempfile::TempDir, StateFile) {
        let directory = tempfile::tempdir().expect("a directory");
        let file = StateFile::new(directory.path().join("state.json"), 3);
        (directory, file)
    }

    /// Checks the content after one of two writes: the old or the new, never a third.
    fn either(file: &StateFile, old: &str, new: &str, what: &str) {
        match file.load::<String>() {
            Ok(FoundState::Current(found)) => assert_eq!(found, new, "{what}"),
            Ok(FoundState::Previous(found, _)) => assert_eq!(found, old, "{what}"),
            other => panic!("{what}: {other:?}"),
        }
    }

    // Promise: A2
    #[test]
    fn file_torn_or_corrupt_at_any_byte_reads_as_the_new_one_or_the_old_one() {
        let (_directory, file) = place();
        file.store(&"the old one").expect("written");
        file.store(&"the new one").expect("written");
        let good = fs::read(file.path()).expect("there");
        for end in 0..good.len() {
            fs::write(file.path(), &good[..end]).expect("written");
            either(&file, "the old one", "the new one", &format!("cut at {end}"));
        }
        for place in 0..good.len() {
            for flip in [1, 0x20, 0x80] {
                let mut bad = good.clone();
                bad[place] ^= flip;
                fs::write(file.path(), &bad).expect("written");
                match file.load::<String>() {
                    Ok(FoundState::Previous(found, _)) => assert_eq!(found, "the old one"),
                    other => panic!("byte {place} changed by {flip:#x}: {other:?}"),
                }
            }
        }
        let mut long = good.clone();
        long.push(b' ');
        fs::write(file.path(), &long).expect("written");
        assert!(
            matches!(file.load::<String>(), Ok(FoundState::Previous(..))),
            "bytes after the content are an error"
        );
        fs::write(file.previous(), &long).expect("written");
        assert!(file.load::<String>().is_err(), "two unreadable files are an error");
    }

    // Promise: A2
    #[test]
    fn writer_killed_at_any_step_leaves_the_new_one_or_the_old_one() {
        let (_directory, file) = place();
        assert_eq!(file.load::<String>().expect("nothing"), FoundState::Nothing);
        file.store(&"the old one").expect("written");
        // After a kill between the renames, the old file is the previous and there is no current.
        fs::rename(file.path(), file.previous()).expect("renamed");
        fs::write(file.path().with_extension("new"), "half").expect("written");
        assert_eq!(file.load().expect("there"), FoundState::Current("the old one".to_owned()));
        file.store(&"the new one").expect("written");
        assert_eq!(file.load().expect("there"), FoundState::Current("the new one".to_owned()));
    }

    // Promise: A2
    #[test]
    fn full_disk_leaves_the_old_content() {
        let (directory, file) = place();
        file.store(&"the old one").expect("written");
        std::os::unix::fs::symlink("/dev/full", directory.path().join("state.new")).expect("a link");
        let error = file.store(&"the new one").expect_err("no room");
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert_eq!(file.load().expect("there"), FoundState::Current("the old one".to_owned()));
    }

    #[test]
    fn file_of_another_version_is_an_error() {
        let (_directory, file) = place();
        file.store(&"something").expect("written");
        let newer = StateFile::new(file.path().to_owned(), 4);
        assert!(newer.load::<String>().is_err());
        file.remove().expect("removed");
        assert_eq!(file.load::<String>().expect("nothing"), FoundState::Nothing);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_never_read_as_a_file(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let file = StateFile::new("/nowhere".into(), 1);
            prop_assert!(file.decode::<String>(&bytes).is_err());
        }
    }
}
