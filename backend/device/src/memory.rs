//! The memory table: the guest-physical pages, the files in which they lie, and the resource that owns each of them.
//!
//! A page belongs to one resource at most. So the sum of all page lists is bounded by guest RAM, and a page never goes back to
//! the guest while another resource still lends it to a worker.

use rustix::fs::{SealFlags, fcntl_get_seals, fstat, fstatfs};
use sluice_protocol::{gpu::PAGE, limits};
use sluice_shared_memory::run;
use std::{fs::File, sync::Arc};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// A snapshot of guest memory. A front-end that replaces its memory makes another one, and this one stays as it was checked.
pub type Memory = Arc<GuestMemoryMmap<()>>;

/// Changes from one memory file to another within one resource: each costs a message to the worker.
pub const PIECES: usize = 64;
/// Memory regions of a front-end that is a process; it needs one.
const REGIONS: usize = 4;
const HUGETLBFS_MAGIC: u64 = 0x958458f6;
/// Guest-physical addresses that exist on any machine.
const ADDRESS_LIMIT: u64 = 1 << 52;

/// How much host memory a front-end may make this process spend on its guest's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Budget {
    /// Bytes of guest memory; a bit is kept for each page.
    bytes: u64,
    /// Page runs that all resources may have together; eight bytes are kept for each.
    runs: usize,
}

/// Which memory a front-end may bring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Sealed against shrinking and of ordinary pages, nothing else: the front-end is a guest process.
    Sealed,
    /// Sealed against shrinking, or huge pages: the front-end is a VMM.
    Vmm,
    /// Anything: the operator vouches for a VMM that cannot seal.
    Any,
}

impl Policy {
    const fn budget(self) -> Budget {
        match self {
            // Processes are many, and each of their resources is one run.
            Policy::Sealed => Budget { bytes: 1 << 40, runs: 1 << 18 },
            Policy::Vmm | Policy::Any => Budget { bytes: 1 << 46, runs: 1 << 22 },
        }
    }
}

/// Why a memory table or a list of pages is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// A region has no file, so no worker can map it.
    #[error("memory region at {0:#x} has no file; share guest memory (memory-backend-memfd,share=on)")]
    NoFile(u64),
    /// The file can be made shorter, and then touching the pages behind its end would end this process.
    #[error(
        "memory region at {0:#x} is a file that can shrink; it must be sealed with F_SEAL_SHRINK (memory-backend-memfd,share=on,seal=on)"
    )]
    Shrinkable(u64),
    /// The file is made of huge pages, of which the host may have none left when one is touched, and then touching it
    /// would end this process.
    #[error("memory region at {0:#x} is made of huge pages, which a process cannot bring")]
    Huge(u64),
    /// There are more regions than a process has any use for; each is a descriptor.
    #[error("more than {REGIONS} memory regions")]
    Regions,
    /// The file is shorter than the region.
    #[error("memory region at {0:#x} reaches beyond the end of its file")]
    Short(u64),
    /// The file's pages are of a size that cannot be.
    #[error("memory region at {0:#x} is made of pages of {1:#x} bytes")]
    Granule(u64, u64),
    /// Pages of the region are not pages of its file.
    #[error("memory region at {0:#x} is not page-aligned")]
    Misaligned(u64),
    /// An entry is empty or not made of whole pages.
    #[error("entry {address:#x} + {bytes:#x} is not made of whole pages")]
    Entry {
        /// Guest-physical address.
        address: u64,
        /// Bytes.
        bytes: u64,
    },
    /// An entry names addresses that are not in the memory table.
    #[error("entry at {0:#x} is not in the memory table")]
    Outside(u64),
    /// An entry names a page that a resource has already.
    #[error("the page at {0:#x} belongs to a resource")]
    Taken(u64),
    /// More bytes than a resource may have.
    #[error("more than {} bytes", limits::RESOURCE_BYTES)]
    TooLarge,
    /// More runs than all resources may have together.
    #[error("more than {0} page runs on this device")]
    TooMany(usize),
    /// More guest memory than the front-end may bring.
    #[error("more than {0:#x} bytes of guest memory")]
    TooMuch(u64),
    /// It could not be checked.
    #[error("guest memory could not be checked")]
    Unchecked,
    /// The pages change files too often.
    #[error("more than {PIECES} changes between memory files")]
    Scattered,
}

/// Neighbouring guest-physical pages: 40 bits of page number, 24 of count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run(u64);

const COUNT_BITS: u32 = 24;
const _: () = assert!(limits::RESOURCE_BYTES / PAGE < 1 << COUNT_BITS);

impl Run {
    const fn new(page: u64, count: u64) -> Run {
        Run(page << COUNT_BITS | count)
    }

    /// First page.
    #[must_use]
    pub const fn page(self) -> u64 {
        self.0 >> COUNT_BITS
    }

    /// Pages.
    #[must_use]
    pub const fn count(self) -> u64 {
        self.0 & ((1 << COUNT_BITS) - 1)
    }
}

/// Part of the table that lies in one file without a gap.
#[derive(Debug)]
struct Region {
    /// First page.
    first: u64,
    /// Pages.
    count: u64,
    /// Index in [`Table::files`].
    file: usize,
    /// Page of the file at which the region begins.
    offset: u64,
    /// A bit per page that belongs to a resource. Untouched parts cost no memory.
    taken: Vec<u64>,
}

#[derive(Debug)]
struct GuestFile {
    file: Arc<File>,
    /// Device and inode: front-ends send one descriptor per region, mostly of one file.
    key: (u64, u64),
    /// Bytes of its own pages.
    granule: u64,
    /// What of it is in the table: in ascending order, apart from each other.
    extents: Vec<run::Run>,
}

/// The table.
#[derive(Debug, Default)]
pub struct Table {
    regions: Vec<Region>,
    files: Vec<GuestFile>,
    budget: Budget,
    runs: usize,
    /// Pages that resources have.
    pages: u64,
}

/// A part of a resource in one memory file.
#[derive(Debug)]
pub struct Piece {
    /// The file.
    pub file: Arc<File>,
    /// Bytes of the file's own pages: more than 4096 for huge ones.
    pub granule: u64,
    /// What of the file is guest memory: in ascending order, apart from each other.
    pub extents: Vec<run::Run>,
    /// Where in it, in the order of the resource.
    pub runs: Vec<run::Run>,
}

impl Table {
    /// Checks a memory table.
    ///
    /// # Errors
    /// [`MemoryError`] when a region cannot be lent to workers or could crash this process.
    pub fn new(memory: &GuestMemoryMmap<()>, policy: Policy) -> Result<Table, MemoryError> {
        let mut table = Table { budget: policy.budget(), ..Table::default() };
        let mut left = table.budget.bytes;
        if policy == Policy::Sealed && memory.num_regions() > REGIONS {
            return Err(MemoryError::Regions);
        }
        for region in memory.iter() {
            let start = region.start_addr().raw_value();
            let bytes = region.len();
            let backing = region.file_offset().ok_or(MemoryError::NoFile(start))?;
            let offset = backing.start();
            if [start, bytes, offset].iter().any(|value| !value.is_multiple_of(PAGE))
                || start >= ADDRESS_LIMIT
            {
                return Err(MemoryError::Misaligned(start));
            }
            left = left.checked_sub(bytes).ok_or(MemoryError::TooMuch(table.budget.bytes))?;
            let (key, granule) = check(backing.file(), offset.saturating_add(bytes), policy, start)?;
            let file = table.files.iter().position(|file| file.key == key).unwrap_or_else(|| {
                let file = Arc::clone(backing.arc());
                table.files.push(GuestFile { file, key, granule, extents: Vec::new() });
                table.files.len().saturating_sub(1)
            });
            if let Some(file) = table.files.get_mut(file) {
                file.extents.push(run::Run { offset, bytes });
            }
            let count = bytes / PAGE;
            let words = usize::try_from(count.div_ceil(64)).unwrap_or(usize::MAX);
            table.regions.push(Region {
                first: start / PAGE,
                count,
                file,
                offset: offset / PAGE,
                taken: vec![0; words],
            });
        }
        table.regions.sort_by_key(|region| region.first);
        table.files.iter_mut().for_each(|file| join(&mut file.extents));
        Ok(table)
    }

    /// Page runs of all resources.
    #[must_use]
    pub const fn runs(&self) -> usize {
        self.runs
    }

    /// Pages of all resources.
    #[must_use]
    pub const fn pages(&self) -> u64 {
        self.pages
    }

    fn region(&self, page: u64) -> Option<usize> {
        let after = self.regions.partition_point(|region| region.first <= page);
        let index = after.checked_sub(1)?;
        let region = self.regions.get(index)?;
        (page.wrapping_sub(region.first) < region.count).then_some(index)
    }

    /// Takes the pages of a new resource: all of them or none.
    ///
    /// # Errors
    /// [`MemoryError`] when the list is not acceptable.
    pub fn claim(&mut self, entries: impl Iterator<Item = (u64, u32)>) -> Result<Vec<Run>, MemoryError> {
        let mut runs = Vec::new();
        let result = self.claim_into(entries, &mut runs);
        if let Err(error) = result {
            self.release(&runs);
            return Err(error);
        }
        runs.shrink_to_fit();
        Ok(runs)
    }

    /// Appends what is claimed to `runs`, so that the caller can give it back when the rest is refused.
    fn claim_into(
        &mut self,
        entries: impl Iterator<Item = (u64, u32)>,
        runs: &mut Vec<Run>,
    ) -> Result<(), MemoryError> {
        let mut total = 0u64;
        for (address, bytes) in entries {
            let bytes = u64::from(bytes);
            if bytes == 0 || !address.is_multiple_of(PAGE) || !bytes.is_multiple_of(PAGE) {
                return Err(MemoryError::Entry { address, bytes });
            }
            total = total.saturating_add(bytes);
            if total > limits::RESOURCE_BYTES {
                return Err(MemoryError::TooLarge);
            }
            let mut page = address / PAGE;
            let mut left = bytes / PAGE;
            // An entry may cross from one region into the next (the PCI hole).
            while left > 0 {
                let outside = MemoryError::Outside(page.saturating_mul(PAGE));
                let region =
                    self.region(page).and_then(|index| self.regions.get_mut(index)).ok_or(outside)?;
                let inside = page.wrapping_sub(region.first);
                let count = left.min(region.count.wrapping_sub(inside));
                let free = region.claim(inside, count);
                self.pages = self.pages.saturating_add(free);
                if free > 0 {
                    self.runs = self.runs.saturating_add(append(runs, page, free));
                }
                if free < count {
                    return Err(MemoryError::Taken(page.wrapping_add(free).wrapping_mul(PAGE)));
                }
                page = page.wrapping_add(count);
                left = left.wrapping_sub(count);
            }
            if self.runs > self.budget.runs {
                return Err(MemoryError::TooMany(self.budget.runs));
            }
        }
        Ok(())
    }

    /// Gives pages back.
    pub fn release(&mut self, runs: &[Run]) {
        self.runs = self.runs.saturating_sub(runs.len());
        for run in runs {
            let (mut page, mut left) = (run.page(), run.count());
            self.pages = self.pages.saturating_sub(left);
            while left > 0 {
                let Some(region) = self.region(page).and_then(|index| self.regions.get_mut(index)) else {
                    // The front-end took the region away meanwhile.
                    page = page.wrapping_add(1);
                    left = left.wrapping_sub(1);
                    continue;
                };
                let inside = page.wrapping_sub(region.first);
                let count = left.min(region.count.wrapping_sub(inside));
                region.release(inside, count);
                page = page.wrapping_add(count);
                left = left.wrapping_sub(count);
            }
        }
    }

    /// Where the pages of a resource lie in files, in order.
    ///
    /// # Errors
    /// [`MemoryError::Outside`] when a page is gone, [`MemoryError::Scattered`].
    pub fn pieces(&self, runs: &[Run]) -> Result<Vec<Piece>, MemoryError> {
        let mut pieces: Vec<(usize, Vec<run::Run>)> = Vec::new();
        for part in self.parts(runs) {
            let (file, page, count) = part?;
            let (offset, bytes) = (page.wrapping_mul(PAGE), count.wrapping_mul(PAGE));
            let full = pieces.len() >= PIECES;
            match pieces.last_mut() {
                Some((last, list)) if *last == file => match list.last_mut() {
                    Some(run) if run.offset.wrapping_add(run.bytes) == offset => {
                        run.bytes = run.bytes.wrapping_add(bytes);
                    }
                    _ => list.push(run::Run { offset, bytes }),
                },
                _ if full => return Err(MemoryError::Scattered),
                _ => pieces.push((file, vec![run::Run { offset, bytes }])),
            }
        }
        Ok(pieces
            .into_iter()
            .filter_map(|(file, runs)| {
                let GuestFile { file, granule, extents, .. } = self.files.get(file)?;
                Some(Piece { file: Arc::clone(file), granule: *granule, extents: extents.clone(), runs })
            })
            .collect())
    }

    /// The runs cut at region ends: file, first page in it, pages.
    fn parts<'t>(
        &'t self,
        runs: &'t [Run],
    ) -> impl Iterator<Item = Result<(usize, u64, u64), MemoryError>> + 't {
        runs.iter().flat_map(move |run| {
            let (mut page, mut left) = (run.page(), run.count());
            core::iter::from_fn(move || {
                if left == 0 {
                    return None;
                }
                let Some(region) = self.region(page).and_then(|index| self.regions.get(index)) else {
                    left = 0;
                    return Some(Err(MemoryError::Outside(page.wrapping_mul(PAGE))));
                };
                let inside = page.wrapping_sub(region.first);
                let count = left.min(region.count.wrapping_sub(inside));
                let part = (region.file, region.offset.wrapping_add(inside), count);
                page = page.wrapping_add(count);
                left = left.wrapping_sub(count);
                Some(Ok(part))
            })
        })
    }

    /// Whether these runs, claimed under `old`, are the same bytes of the same files here; if so they are claimed.
    pub fn adopt(&mut self, old: &Table, runs: &[Run]) -> bool {
        let pages = |table: &Table| -> Option<Vec<((u64, u64), run::Run)>> {
            let mut list: Vec<((u64, u64), run::Run)> = Vec::new();
            for part in table.parts(runs) {
                let (file, page, count) = part.ok()?;
                let key = table.files.get(file)?.key;
                match list.last_mut() {
                    Some((last, run)) if *last == key && run.offset.wrapping_add(run.bytes) == page => {
                        run.bytes = run.bytes.wrapping_add(count);
                    }
                    _ => list.push((key, run::Run { offset: page, bytes: count })),
                }
            }
            Some(list)
        };
        if pages(old).is_none_or(|old| pages(self).is_none_or(|new| new != old)) {
            return false;
        }
        for run in runs {
            let (mut page, mut left) = (run.page(), run.count());
            while left > 0 {
                let Some(region) = self.region(page).and_then(|index| self.regions.get_mut(index)) else {
                    break;
                };
                let inside = page.wrapping_sub(region.first);
                let count = left.min(region.count.wrapping_sub(inside));
                self.pages = self.pages.saturating_add(region.claim(inside, count));
                page = page.wrapping_add(count);
                left = left.wrapping_sub(count);
            }
        }
        self.runs = self.runs.saturating_add(runs.len());
        true
    }
}

impl Region {
    /// Marks pages as taken up to the first that is; answers how many that are.
    fn claim(&mut self, first: u64, count: u64) -> u64 {
        for done in 0..count {
            let page = first.wrapping_add(done);
            let bit = 1 << (page % 64);
            match usize::try_from(page / 64).ok().and_then(|word| self.taken.get_mut(word)) {
                Some(word) if *word & bit == 0 => *word |= bit,
                _ => return done,
            }
        }
        count
    }

    fn release(&mut self, first: u64, count: u64) {
        for page in first..first.wrapping_add(count) {
            if let Some(word) = usize::try_from(page / 64).ok().and_then(|word| self.taken.get_mut(word)) {
                *word &= !(1 << (page % 64));
            }
        }
    }
}

/// Appends pages to a list and answers how much longer the list became.
fn append(runs: &mut Vec<Run>, page: u64, count: u64) -> usize {
    match runs.last_mut() {
        Some(last) if last.page().wrapping_add(last.count()) == page => {
            *last = Run::new(last.page(), last.count().wrapping_add(count));
            0
        }
        _ => {
            runs.push(Run::new(page, count));
            1
        }
    }
}

/// Sorts parts of a file and joins those that touch: front-ends may cut one file into many regions.
fn join(extents: &mut Vec<run::Run>) {
    let end = |run: &run::Run| run.offset.saturating_add(run.bytes);
    extents.sort_by_key(|run| run.offset);
    extents.dedup_by(|next, last| {
        let touch = next.offset <= end(last);
        if touch {
            last.bytes = end(last).max(end(next)).wrapping_sub(last.offset);
        }
        touch
    });
}

/// Checks the file of a region and answers which file it is, and the size of its pages.
fn check(file: &File, end: u64, policy: Policy, start: u64) -> Result<((u64, u64), u64), MemoryError> {
    // Before the size: of a file that is sealed the size can only grow, of any other it may be another one by now.
    let sealed = fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
    let status = fstat(file).map_err(|_| MemoryError::NoFile(start))?;
    if u64::try_from(status.st_size).unwrap_or(0) < end {
        return Err(MemoryError::Short(start));
    }
    let system = fstatfs(file).ok().filter(|system| u64::try_from(system.f_type) == Ok(HUGETLBFS_MAGIC));
    let huge = system.is_some();
    if policy == Policy::Sealed && huge {
        return Err(MemoryError::Huge(start));
    }
    let granule = system.map_or(PAGE, |system| u64::try_from(system.f_bsize).unwrap_or(0));
    if !granule.is_power_of_two() || granule < PAGE {
        return Err(MemoryError::Granule(start, granule));
    }
    let acceptable = match policy {
        Policy::Sealed => sealed,
        Policy::Vmm => sealed || huge,
        Policy::Any => true,
    };
    if acceptable {
        Ok(((status.st_dev, status.st_ino), granule))
    } else {
        Err(MemoryError::Shrinkable(start))
    }
}
