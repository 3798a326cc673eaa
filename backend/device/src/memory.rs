//! The memory table: the guest-physical pages, the files in which they lie, and the resource that owns each of them.
//!
//! A page belongs to one resource at most. So the sum of all page lists is bounded by guest RAM, and a page never goes back to
//! the guest while another resource still lends it to a worker.

use rustix::{
    fd::AsFd as _,
    fs::{SealFlags, fcntl_get_seals, fstat, fstatfs},
    io::Errno,
};
use sluice_protocol::{gpu::PAGE, limits};
use sluice_shared_memory::{residency::existing_pages, run};
use std::{fs::File, sync::Arc};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// A snapshot of guest memory. A front-end that replaces its memory creates a new one; this one stays as it was checked.
pub type MemorySnapshot = Arc<GuestMemoryMmap<()>>;

/// Changes between memory files within one resource: each costs a message to the worker.
pub const PIECES: usize = 64;
/// Effort of a search per part of a list of pages: a system call takes as long as the kernel takes for so many pages.
pub const PART_EFFORT: u64 = 32;
/// Largest number of memory regions of a front-end that is a process; it needs one.
const REGIONS: usize = 4;
const HUGETLBFS_MAGIC: u64 = 0x958458f6;
const TMPFS_MAGIC: u64 = 0x01021994;
/// Guest-physical addresses that exist on any machine.
const ADDRESS_LIMIT: u64 = 1 << 52;

/// The host memory that a front-end may make this process use for its guest's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Budget {
    /// Bytes of guest memory; each page takes one bit.
    bytes: u64,
    /// Page runs of all resources together; each takes eight bytes.
    runs: usize,
}

/// The kinds of memory that a front-end may bring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryPolicy {
    /// Only ordinary pages, sealed against shrinking: the front-end is a guest process.
    Sealed,
    /// Pages sealed against shrinking, or huge pages: the front-end is a VMM.
    Vmm,
    /// Any memory: the operator vouches for a VMM that cannot seal.
    Any,
}

impl MemoryPolicy {
    const fn budget(self) -> Budget {
        match self {
            // There are many processes, and each of their resources is one run.
            MemoryPolicy::Sealed => Budget { bytes: 1 << 40, runs: 1 << 18 },
            MemoryPolicy::Vmm | MemoryPolicy::Any => Budget { bytes: 1 << 46, runs: 1 << 22 },
        }
    }
}

/// The reason why a memory table or a list of pages is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// A region has no file, so no worker can map it.
    #[error("memory region at {0:#x} has no file; share guest memory (memory-backend-memfd,share=on)")]
    NoFile(u64),
    /// The file can be made shorter; then an access behind its end would end this process.
    #[error(
        "memory region at {0:#x} is a file that can shrink; it must be sealed with F_SEAL_SHRINK (memory-backend-memfd,share=on,seal=on)"
    )]
    Shrinkable(u64),
    /// The file is made of huge pages; if the host has none left when one is touched, the access would end this process.
    #[error("memory region at {0:#x} is made of huge pages, which a process may not bring")]
    Huge(u64),
    /// There are more regions than a process needs; each takes a descriptor.
    #[error("there are more than {REGIONS} memory regions")]
    Regions,
    /// The file is shorter than the region.
    #[error("memory region at {0:#x} reaches beyond the end of its file")]
    Short(u64),
    /// The file's pages have an impossible size.
    #[error("memory region at {0:#x} is made of pages of {1:#x} bytes")]
    Granule(u64, u64),
    /// Pages of the region do not match pages of its file.
    #[error("memory region at {0:#x} is not page-aligned")]
    Misaligned(u64),
    /// An entry is empty or not made of whole pages.
    #[error("entry {address:#x} + {bytes:#x} is not made of whole pages")]
    Entry {
        /// Guest-physical address.
        address: u64,
        /// Length of the entry.
        bytes: u64,
    },
    /// An entry's addresses are not in the memory table.
    #[error("entry at {0:#x} is not in the memory table")]
    Outside(u64),
    /// A page of an entry belongs to a resource already.
    #[error("the page at {0:#x} belongs to a resource already")]
    Taken(u64),
    /// The resource would have more bytes than allowed.
    #[error("the resource has more than {} bytes", limits::RESOURCE_BYTES)]
    TooLarge,
    /// All resources together would have more runs than allowed.
    #[error("the device has more than {0} page runs")]
    TooMany(usize),
    /// The guest memory is larger than allowed.
    #[error("there are more than {0:#x} bytes of guest memory")]
    TooMuch(u64),
    /// The check itself failed.
    #[error("cannot check guest memory")]
    Unchecked,
    /// The resource's pages change files too often.
    #[error("the resource has more than {PIECES} changes between memory files")]
    Scattered,
}

/// Neighbouring guest-physical pages: 40 bits of page number, 24 of count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRun(u64);

const COUNT_BITS: u32 = 24;
const _: () = assert!(limits::RESOURCE_BYTES / PAGE < 1 << COUNT_BITS);

impl PageRun {
    const fn new(page: u64, count: u64) -> PageRun {
        PageRun(page << COUNT_BITS | count)
    }

    /// Number of the first page.
    #[must_use]
    pub const fn page(self) -> u64 {
        self.0 >> COUNT_BITS
    }

    /// Number of pages.
    #[must_use]
    pub const fn count(self) -> u64 {
        self.0 & ((1 << COUNT_BITS) - 1)
    }
}

/// A part of the table that is contiguous in one file.
#[derive(Debug)]
struct Region {
    /// Number of the first page.
    first: u64,
    /// Number of pages.
    count: u64,
    /// Index in [`MemoryTable::files`].
    file: usize,
    /// Page of the file at which the region begins.
    offset: u64,
    /// One bit per page that belongs to a resource. Untouched parts take no memory.
    taken: Vec<u64>,
}

#[derive(Debug)]
struct GuestFile {
    file: Arc<File>,
    /// Device and inode: front-ends send one descriptor per region, mostly of one file.
    key: (u64, u64),
    /// The file's system.
    system: FileSystem,
    /// The parts of it that are in the table, ascending and apart from each other.
    extents: Vec<run::Run>,
}

/// The file system of a memory file.
#[derive(Clone, Copy, Debug)]
struct FileSystem {
    /// Size of its pages, in bytes.
    granule: u64,
    /// True if a page that does not exist is one that was freed: it is neither a huge page nor on a disk.
    counts_pages: bool,
}

/// A place in the list of pages of a resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PagePlace {
    run: usize,
    /// Page of the run.
    page: u64,
}

/// The result of a search for freed pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageSearch {
    /// No page of the resource is freed.
    Whole,
    /// No page before this place is freed; the effort is used up.
    Unfinished(PagePlace),
    /// Pages are freed.
    Freed,
}

/// The memory table.
#[derive(Debug, Default)]
pub struct MemoryTable {
    regions: Vec<Region>,
    files: Vec<GuestFile>,
    budget: Budget,
    runs: usize,
    /// Number of pages that belong to resources.
    pages: u64,
}

/// A part of a resource in one memory file.
#[derive(Debug)]
pub struct Piece {
    /// The memory file.
    pub file: Arc<File>,
    /// Size of the file's own pages: more than 4096 for huge ones.
    pub granule: u64,
    /// The parts of the file that are guest memory, ascending and apart from each other.
    pub extents: Vec<run::Run>,
    /// The resource's ranges of the file, in the order of the resource.
    pub runs: Vec<run::Run>,
}

impl MemoryTable {
    /// Checks a memory table and creates it.
    ///
    /// # Errors
    /// [`MemoryError`] if a region cannot be lent to workers or could crash this process.
    pub fn new(memory: &GuestMemoryMmap<()>, policy: MemoryPolicy) -> Result<MemoryTable, MemoryError> {
        let mut table = MemoryTable { budget: policy.budget(), ..MemoryTable::default() };
        let mut left = table.budget.bytes;
        if policy == MemoryPolicy::Sealed && memory.num_regions() > REGIONS {
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
            let (key, system) = check(backing.file(), offset.saturating_add(bytes), policy, start)?;
            let file = table.files.iter().position(|file| file.key == key).unwrap_or_else(|| {
                let file = Arc::clone(backing.arc());
                table.files.push(GuestFile { file, key, system, extents: Vec::new() });
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

    /// Number of page runs of all resources.
    #[must_use]
    pub const fn runs(&self) -> usize {
        self.runs
    }

    /// Number of pages of all resources.
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

    /// Claims the pages of a new resource: all of them or none.
    ///
    /// # Errors
    /// [`MemoryError`] if the list is not acceptable.
    pub fn claim(&mut self, entries: impl Iterator<Item = (u64, u32)>) -> Result<Vec<PageRun>, MemoryError> {
        let mut runs = Vec::new();
        let result = self.claim_into(entries, &mut runs);
        if let Err(error) = result {
            self.release(&runs);
            return Err(error);
        }
        runs.shrink_to_fit();
        Ok(runs)
    }

    /// Appends claimed pages to `runs`, so that the caller can release them if the rest is refused.
    fn claim_into(
        &mut self,
        entries: impl Iterator<Item = (u64, u32)>,
        runs: &mut Vec<PageRun>,
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

    /// Releases pages.
    pub fn release(&mut self, runs: &[PageRun]) {
        self.runs = self.runs.saturating_sub(runs.len());
        for run in runs {
            let (mut page, mut left) = (run.page(), run.count());
            self.pages = self.pages.saturating_sub(left);
            while left > 0 {
                let Some(region) = self.region(page).and_then(|index| self.regions.get_mut(index)) else {
                    // The front-end has removed the region meanwhile.
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

    /// The places of a resource's pages in files, in order.
    ///
    /// # Errors
    /// [`MemoryError::Outside`] if a page is gone; [`MemoryError::Scattered`] if there are too many pieces.
    pub fn pieces(&self, runs: &[PageRun]) -> Result<Vec<Piece>, MemoryError> {
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
                let GuestFile { file, system, extents, .. } = self.files.get(file)?;
                let (file, extents) = (Arc::clone(file), extents.clone());
                Some(Piece { file, granule: system.granule, extents, runs })
            })
            .collect())
    }

    /// Searches a resource's pages, from a place on, for pages that were freed in their file. The effort is counted in pages, and
    /// each part of the list costs as much as [`PART_EFFORT`] pages.
    ///
    /// # Errors
    /// The kernel's: NOSYS before Linux 6.5.
    pub fn search_freed(
        &self,
        runs: &[PageRun],
        from: PagePlace,
        effort: &mut u64,
    ) -> Result<PageSearch, Errno> {
        let mut place = from;
        while let Some(run) = runs.get(place.run) {
            let left = run.count().saturating_sub(place.page);
            let page = run.page().wrapping_add(place.page);
            let (Some((file, first, count)), true) = (self.part(page, left), left > 0) else {
                place = PagePlace { run: place.run.saturating_add(1), page: 0 };
                continue;
            };
            let Some(affordable) = effort.checked_sub(PART_EFFORT).filter(|pages| *pages > 0) else {
                return Ok(PageSearch::Unfinished(place));
            };
            let count = count.min(affordable);
            *effort = affordable.wrapping_sub(count);
            if let Some(GuestFile { file, system: FileSystem { counts_pages: true, .. }, .. }) =
                self.files.get(file)
                && existing_pages(file.as_fd(), first.wrapping_mul(PAGE), count.wrapping_mul(PAGE))? < count
            {
                return Ok(PageSearch::Freed);
            }
            place.page = place.page.wrapping_add(count);
        }
        Ok(PageSearch::Whole)
    }

    /// The pages from `page` on, at most `count`, that lie in one region: file, first page in it, pages.
    fn part(&self, page: u64, count: u64) -> Option<(usize, u64, u64)> {
        let region = self.regions.get(self.region(page)?)?;
        let inside = page.wrapping_sub(region.first);
        let count = count.min(region.count.wrapping_sub(inside));
        Some((region.file, region.offset.wrapping_add(inside), count))
    }

    /// The runs cut at region ends: file, first page in it, pages.
    fn parts<'t>(
        &'t self,
        runs: &'t [PageRun],
    ) -> impl Iterator<Item = Result<(usize, u64, u64), MemoryError>> + 't {
        runs.iter().flat_map(move |run| {
            let (mut page, mut left) = (run.page(), run.count());
            core::iter::from_fn(move || {
                if left == 0 {
                    return None;
                }
                let Some(part @ (_, _, count)) = self.part(page, left) else {
                    left = 0;
                    return Some(Err(MemoryError::Outside(page.wrapping_mul(PAGE))));
                };
                page = page.wrapping_add(count);
                left = left.wrapping_sub(count);
                Some(Ok(part))
            })
        })
    }

    /// Claims runs that were claimed under `old`, if they are the same bytes of the same files here; `false` if not.
    pub fn adopt(&mut self, old: &MemoryTable, runs: &[PageRun]) -> bool {
        let pages = |table: &MemoryTable| -> Option<Vec<((u64, u64), run::Run)>> {
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
    /// Marks pages as taken up to the first that is taken already; returns the number of newly taken pages.
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

/// Appends pages to a list; returns the number of new list entries.
fn append(runs: &mut Vec<PageRun>, page: u64, count: u64) -> usize {
    match runs.last_mut() {
        Some(last) if last.page().wrapping_add(last.count()) == page => {
            *last = PageRun::new(last.page(), last.count().wrapping_add(count));
            0
        }
        _ => {
            runs.push(PageRun::new(page, count));
            1
        }
    }
}

/// Sorts parts of a file and joins adjacent ones: front-ends may cut one file into many regions.
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

/// Checks the file of a region; returns the file's identity and its system.
fn check(
    file: &File,
    end: u64,
    policy: MemoryPolicy,
    start: u64,
) -> Result<((u64, u64), FileSystem), MemoryError> {
    // Before the size: the size of a sealed file can only grow; that of any other file may change at any time.
    let sealed = fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
    let status = fstat(file).map_err(|_| MemoryError::NoFile(start))?;
    if u64::try_from(status.st_size).unwrap_or(0) < end {
        return Err(MemoryError::Short(start));
    }
    let system = fstatfs(file).ok().and_then(|system| {
        Some((u64::try_from(system.f_type).ok()?, u64::try_from(system.f_bsize).unwrap_or(0)))
    });
    let huge = system.is_some_and(|(kind, _)| kind == HUGETLBFS_MAGIC);
    if policy == MemoryPolicy::Sealed && huge {
        return Err(MemoryError::Huge(start));
    }
    let granule = system.filter(|_| huge).map_or(PAGE, |(_, granule)| granule);
    if !granule.is_power_of_two() || granule < PAGE {
        return Err(MemoryError::Granule(start, granule));
    }
    let acceptable = match policy {
        MemoryPolicy::Sealed => sealed,
        MemoryPolicy::Vmm => sealed || huge,
        MemoryPolicy::Any => true,
    };
    if acceptable {
        let counts_pages = system.is_some_and(|(kind, _)| kind == TMPFS_MAGIC);
        Ok(((status.st_dev, status.st_ino), FileSystem { granule, counts_pages }))
    } else {
        Err(MemoryError::Shrinkable(start))
    }
}
