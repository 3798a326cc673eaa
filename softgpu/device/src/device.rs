//! Opens a device: creates the directory and files, or checks that they agree with the configuration.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::PAGE_BYTES;
use crate::config::{Config, ConfigError, DEFAULT_SCALE};
use crate::header::{self, Header};
use crate::model::{MODELS, Model};
use crate::sys;

/// File of exported allocations, in the directory of its device.
const EXPORTED: &str = "exported";

/// The fixed properties of a device.
#[derive(Debug, Clone, Copy)]
pub struct Identity {
    /// GPU model.
    pub model: &'static Model,
    /// Divisor of memory sizes.
    pub scale: u64,
    /// Number of pages.
    pub pages: u64,
    /// UUID, chosen at creation.
    pub uuid: [u8; 16],
    /// Index among the devices of its state directory; the PCI bus is this plus one.
    pub index: u32,
}

/// A device cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A file or directory of the device cannot be used.
    #[error("{path}: {source}")]
    File {
        /// Path of the file or directory.
        path: PathBuf,
        /// Cause of the failure.
        source: io::Error,
    },
    /// The default directory belongs to another user.
    #[error("{0} is not a private directory of this user")]
    NotPrivate(PathBuf),
    /// The device exists with another model or scale than configured.
    #[error("{path} is a {found} at scale {scale}; remove it, or configure that model and scale")]
    Geometry {
        /// Directory of the device.
        path: PathBuf,
        /// Model of the device.
        found: String,
        /// Scale of the device.
        scale: u64,
    },
}

/// An open device.
pub struct Device {
    identity: Identity,
    pub(crate) header: Header,
    pub(crate) header_file: File,
    pub(crate) hbm: File,
    /// The directory of the device. A process that changes instances locks it.
    pub(crate) directory: File,
    /// The same lock among the threads of this process, which share the file's lock.
    pub(crate) changing: Mutex<()>,
    /// True if an instance gets the UUID of the last one of its number.
    pub(crate) same_uuids: bool,
    /// Nanoseconds after which the pages of a process that ended are free.
    pub(crate) late_free: u64,
    /// Bytes of storage that the device keeps while no process computes on it; `None` means all.
    pub(crate) idle_bytes: Option<u64>,
    /// The file that exported allocations open, this process's own descriptor of it, and its device and inode numbers.
    pub(crate) exported_path: PathBuf,
    pub(crate) exported: File,
    pub(crate) exported_identity: (u64, u64),
    /// The PID namespace of this process.
    pub(crate) namespace: Option<u64>,
    /// The slots of this process, and the right to reap: locks of one open file do not conflict with each other.
    pub(crate) own_slots: Mutex<Vec<usize>>,
    /// Start of the search for an empty record and a free page: below, there was none when this process last searched.
    pub(crate) record_hint: AtomicUsize,
    pub(crate) page_hint: AtomicUsize,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("identity", &self.identity).finish_non_exhaustive()
    }
}

impl Device {
    /// Opens device `index`, and creates it if it does not exist. No file is opened later, except to export.
    ///
    /// # Errors
    /// The device's files cannot be used, or belong to another device than configured.
    pub fn open(config: &Config, index: u32) -> Result<Device, OpenError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| OpenError::File { path, source }
        };
        let state = &config.state;
        match DirBuilder::new().recursive(!config.private).mode(0o700).create(state) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(state)(error)),
            _ => {}
        }
        let metadata = state.symlink_metadata().map_err(failed(state))?;
        if config.private
            && !(metadata.is_dir() && metadata.uid() == sys::user() && metadata.mode() & 0o077 == 0)
        {
            return Err(OpenError::NotPrivate(state.clone()));
        }
        // A user with access to the directory gets access to the device.
        let mode = metadata.mode() & 0o666;

        let directory = state.join(format!("gpu{index}"));
        match DirBuilder::new().mode(metadata.mode() & 0o777).create(&directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(failed(&directory)(error));
            }
            _ => {}
        }
        // Creation is serialised by the kernel, which also ends the lock of a creator that is killed.
        let guard = File::open(&directory).map_err(failed(&directory))?;
        sys::lock_file(&guard).map_err(failed(&directory))?;

        let open = |name: &str| -> Result<File, OpenError> {
            let path = directory.join(name);
            OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(mode)
                .open(&path)
                .map_err(failed(&path))
        };
        let header_file = open("header")?;
        let hbm = open("hbm")?;
        let exported = open(EXPORTED)?;
        let identity = match read_identity(&header_file) {
            Some(identity) => {
                let matches = config.model.is_none_or(|model| model.key == identity.model.key)
                    && config.scale.is_none_or(|scale| scale == identity.scale);
                if !matches {
                    return Err(OpenError::Geometry {
                        path: directory,
                        found: identity.model.key.to_owned(),
                        scale: identity.scale,
                    });
                }
                identity
            }
            None => create(config, index, &header_file, &hbm).map_err(failed(&directory))?,
        };
        let pages = usize::try_from(identity.pages).unwrap_or(usize::MAX);
        let header = Header::map(&header_file, pages).map_err(failed(&directory))?;
        let exported_identity = sys::identity(exported.as_fd()).map_err(failed(&directory))?;
        sys::unlock_file(&guard).map_err(failed(&directory))?;
        Ok(Device {
            identity,
            directory: guard,
            changing: Mutex::default(),
            same_uuids: config.same_uuids,
            late_free: u64::try_from(config.late_free.as_nanos()).unwrap_or(u64::MAX),
            idle_bytes: config.idle_bytes,
            header,
            header_file,
            hbm,
            exported_path: directory.join(EXPORTED),
            exported,
            exported_identity,
            namespace: sys::namespace(),
            own_slots: Mutex::default(),
            record_hint: AtomicUsize::new(0),
            page_hint: AtomicUsize::new(0),
        })
    }

    /// Returns the properties of the device.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Returns the memory size of the device in bytes.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.identity.pages * PAGE_BYTES
    }
}

/// Reads a complete header; `None` if there is none yet.
fn read_identity(file: &File) -> Option<Identity> {
    let length = usize::try_from(file.metadata().ok()?.len()).ok()?;
    let mapped = Header::map(file, 0).ok()?;
    let words = mapped.identity();
    if words.magic.load(Acquire) != header::MAGIC {
        return None;
    }
    let mut key = Vec::new();
    for word in &words.model {
        key.extend_from_slice(&word.load(Relaxed).to_le_bytes());
    }
    let key = String::from_utf8(key).ok()?;
    let mut uuid = [0; 16];
    uuid[..8].copy_from_slice(&words.uuid[0].load(Relaxed).to_le_bytes());
    uuid[8..].copy_from_slice(&words.uuid[1].load(Relaxed).to_le_bytes());
    let pages = words.pages.load(Relaxed);
    if length < header::bytes(usize::try_from(pages).ok()?) {
        return None;
    }
    Some(Identity {
        model: Model::find(key.trim_end_matches('\0'))?,
        scale: words.scale.load(Relaxed),
        pages,
        uuid,
        index: u32::try_from(words.index.load(Relaxed)).ok()?,
    })
}

/// Writes a new header, its magic last.
fn create(config: &Config, index: u32, header_file: &File, hbm: &File) -> io::Result<Identity> {
    let model = config.model.unwrap_or(&MODELS[0]);
    let scale = config.scale.unwrap_or(DEFAULT_SCALE);
    let pages = model.pages(scale);
    let count = usize::try_from(pages).map_err(io::Error::other)?;

    header_file.set_len(0)?;
    header_file.set_len(header::bytes(count) as u64)?;
    hbm.set_len(pages * PAGE_BYTES)?;
    if let Some(byte) = config.fill {
        let page = vec![byte; usize::try_from(PAGE_BYTES).map_err(io::Error::other)?];
        for number in 0..pages {
            hbm.write_all_at(&page, number * PAGE_BYTES)?;
        }
    }

    let mut uuid = [0; 16];
    sys::random(&mut uuid)?;
    uuid[6] = uuid[6] & 0x0f | 0x40;
    uuid[8] = uuid[8] & 0x3f | 0x80;

    let mapped = Header::map(header_file, count)?;
    let words = mapped.identity();
    words.pages.store(pages, Relaxed);
    words.scale.store(scale, Relaxed);
    words.index.store(u64::from(index), Relaxed);
    let mut key = [0; 32];
    key[..model.key.len()].copy_from_slice(model.key.as_bytes());
    for (word, bytes) in words.model.iter().zip(key.as_chunks::<8>().0) {
        word.store(u64::from_le_bytes(*bytes), Relaxed);
    }
    for (word, bytes) in words.uuid.iter().zip(uuid.as_chunks::<8>().0) {
        word.store(u64::from_le_bytes(*bytes), Relaxed);
    }
    if config.mig && model.division.is_some() {
        mapped.instances().copies[0][0].store(1, Relaxed);
    }
    words.magic.store(header::MAGIC, Release);
    Ok(Identity { model, scale, pages, uuid, index })
}
