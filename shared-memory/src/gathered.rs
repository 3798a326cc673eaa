//! Pages that cannot be mapped contiguously: reached one by one, inside larger windows of their files.
//!
//! A piece of a huge page cannot be mapped, and the number of mappings of a process is limited. So a few ranges of the files
//! are mapped that together contain all the pages, and a table gives the place of each page. The windows never leave the
//! extents that the party naming the pages claims for itself, and are cut where most would be mapped in vain.

use crate::run::Run;
use crate::{
    Reservation,
    mapping::{MapError, Words},
};
use core::sync::atomic::{Ordering, fence};
use rustix::fd::BorrowedFd;
use sluice_protocol::shared::Shared;

const PAGE: u64 = 4096;
const PAGE_BYTES: usize = 4096;

/// Pages in one file, in the required order.
#[derive(Clone, Copy, Debug)]
pub struct Source<'f> {
    /// The memory file.
    pub file: BorrowedFd<'f>,
    /// The parts of it that may be mapped: ascending, apart from each other, inside the file.
    pub extents: &'f [Run],
    /// Size of the file's own pages, a power of two: more than 4096 for huge ones.
    pub granule: u64,
    /// The runs of pages.
    pub runs: &'f [Run],
}

/// A mapped range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Window {
    /// Index of its source.
    source: usize,
    /// Index of its extent.
    extent: usize,
    /// Offset of the first byte in the file.
    start: u64,
    /// Offset after the last byte.
    end: u64,
}

/// Mapped pages with the address of each.
#[derive(Debug)]
pub struct Gathered {
    /// The address of each page.
    pages: Box<[usize]>,
    /// The mapped windows.
    windows: Reservation,
}

impl Gathered {
    /// Maps at most `most` windows around the pages of `sources`, which are `bytes` long together. The caller has checked that
    /// the extents are inside their files: an access behind the end of a file is a SIGBUS.
    ///
    /// # Errors
    /// [`MapError`] if the pages do not add up or cannot be covered so, or the kernel refuses.
    pub fn map(bytes: u64, sources: &[Source<'_>], most: usize) -> Result<Gathered, MapError> {
        let layout = MapError::Layout(bytes);
        let runs = || sources.iter().flat_map(|source| source.runs);
        let whole = runs()
            .all(|run| run.bytes > 0 && run.bytes.is_multiple_of(PAGE) && run.offset.is_multiple_of(PAGE));
        let granules = sources
            .iter()
            .all(|source| source.granule.is_power_of_two() && source.granule.is_multiple_of(PAGE));
        let sum = runs().try_fold(0u64, |sum, run| sum.checked_add(run.bytes));
        let Some(count) = usize::try_from(bytes / PAGE).ok().filter(|count| *count > 0) else {
            return Err(layout);
        };
        if !whole || !granules || sum != Some(bytes) {
            return Err(layout);
        }
        let cover = cover(sources, most)?;
        let (places, length) = place(sources, &cover).ok_or(MapError::Layout(bytes))?;
        let align = sources.iter().map(|source| source.granule).max().unwrap_or(PAGE);
        let windows = Reservation::apart(length, align)?;
        let first = windows.base().next_multiple_of(align);
        for (window, place) in cover.iter().zip(&places) {
            let file = sources[window.source].file;
            windows.map(first + place, file, window.start, window.end - window.start)?;
        }

        let mut pages = Vec::with_capacity(count);
        for (index, source) in sources.iter().enumerate() {
            for run in source.runs {
                let after =
                    cover.partition_point(|window| (window.source, window.start) <= (index, run.offset));
                let found = after.checked_sub(1).and_then(|at| Some((cover.get(at)?, places.get(at)?)));
                let (window, place) = found.ok_or(MapError::Layout(bytes))?;
                let start = first + place + (run.offset - window.start);
                let addresses = (0..run.bytes / PAGE).map(|page| start + page * PAGE);
                pages.extend(addresses.filter_map(|address| usize::try_from(address).ok()));
            }
        }
        if pages.len() == count { Ok(Gathered { pages: pages.into(), windows }) } else { Err(layout) }
    }

    /// Total length of the pages, in bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.pages.len() as u64 * PAGE
    }

    /// Bytes of address space that the windows use.
    #[must_use]
    pub const fn mapped(&self) -> u64 {
        self.windows.bytes()
    }

    /// Copies bytes from the pages directly into other memory.
    pub fn copy_to(&self, at: usize, other: &Words, other_at: usize, bytes: usize) {
        self.parts(at, bytes, |page, offset, done, part| page.copy_to(offset, other, other_at + done, part));
    }

    /// Copies bytes from other memory directly into the pages.
    pub fn copy_from(&self, at: usize, other: &Words, other_at: usize, bytes: usize) {
        self.parts(at, bytes, |page, offset, done, part| other.copy_to(other_at + done, &page, offset, part));
    }

    /// The page that contains an offset.
    fn page(&self, at: usize) -> Words {
        // It panics like an index of a slice: offsets are constants of the protocol, or were checked.
        self.windows.words(self.pages[at / PAGE_BYTES], PAGE_BYTES)
    }

    /// Visits a range page by page: the page, the offset in it, the bytes before this part and its length.
    fn parts(&self, at: usize, bytes: usize, mut visit: impl FnMut(Words, usize, usize, usize)) {
        let mut done = 0;
        while done < bytes {
            let offset = (at + done) % PAGE_BYTES;
            let part = (bytes - done).min(PAGE_BYTES - offset);
            visit(self.page(at + done), offset, done, part);
            done += part;
        }
    }
}

// No word of the protocol crosses two pages, because each is aligned.
impl Shared for Gathered {
    fn load_u32(&self, at: usize, order: Ordering) -> u32 {
        self.page(at).load_u32(at % PAGE_BYTES, order)
    }
    fn store_u32(&self, at: usize, value: u32, order: Ordering) {
        self.page(at).store_u32(at % PAGE_BYTES, value, order);
    }
    fn swap_u32(&self, at: usize, value: u32) -> u32 {
        self.page(at).swap_u32(at % PAGE_BYTES, value)
    }
    fn load_u64(&self, at: usize, order: Ordering) -> u64 {
        self.page(at).load_u64(at % PAGE_BYTES, order)
    }
    fn store_u64(&self, at: usize, value: u64, order: Ordering) {
        self.page(at).store_u64(at % PAGE_BYTES, value, order);
    }
    fn read(&self, at: usize, into: &mut [u8]) {
        let bytes = into.len();
        self.parts(at, bytes, |page, offset, done, part| page.read(offset, &mut into[done..done + part]));
    }
    fn write(&self, at: usize, from: &[u8]) {
        self.parts(at, from.len(), |page, offset, done, part| page.write(offset, &from[done..done + part]));
    }
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

/// At most `most` windows that contain every run, made of whole pages of the files, in ascending order. Of all such covers, the one
/// that maps least: it is cut at the widest gaps.
fn cover(sources: &[Source<'_>], most: usize) -> Result<Vec<Window>, MapError> {
    let mut windows = Vec::with_capacity(sources.iter().map(|source| source.runs.len()).sum());
    for (index, source) in sources.iter().enumerate() {
        for run in source.runs {
            let outside = MapError::Outside { offset: run.offset, bytes: run.bytes };
            let start = run.offset - run.offset % source.granule;
            let end = run.offset.checked_add(run.bytes);
            let end = end.and_then(|end| end.checked_next_multiple_of(source.granule));
            let extent = source.extents.partition_point(|extent| extent.offset <= start).checked_sub(1);
            let inside = extent.and_then(|at| Some((at, source.extents.get(at)?))).zip(end);
            match inside {
                Some(((extent, of), end)) if end - of.offset <= of.bytes => {
                    windows.push(Window { source: index, extent, start, end });
                }
                _ => return Err(outside),
            }
        }
    }
    windows.sort_unstable_by_key(|window| (window.source, window.start));
    let same = |one: &Window, two: &Window| (one.source, one.extent) == (two.source, two.extent);
    merge(&mut windows, |one, two| same(one, two) && two.start <= one.end);

    let mut gaps: Vec<u64> = windows
        .windows(2)
        .filter(|pair| same(&pair[0], &pair[1]))
        .map(|pair| pair[1].start - pair[0].end)
        .collect();
    // Extents are always separate windows.
    let extents = windows.len() - gaps.len();
    let Some(cuts) = most.checked_sub(extents) else { return Err(MapError::Windows(most)) };
    if gaps.len() > cuts {
        let (_, widest_closed, _) = gaps.select_nth_unstable_by(cuts, |one, two| two.cmp(one));
        let closed = *widest_closed;
        merge(&mut windows, |one, two| same(one, two) && two.start - one.end <= closed);
    }
    Ok(windows)
}

/// Merges neighbours for which `joined` returns true.
fn merge(windows: &mut Vec<Window>, joined: impl Fn(&Window, &Window) -> bool) {
    windows.dedup_by(|next, last| {
        let join = joined(last, next);
        if join {
            last.end = last.end.max(next.end);
        }
        join
    });
}

/// The offset of each window after an aligned address, and the total length.
fn place(sources: &[Source<'_>], windows: &[Window]) -> Option<(Vec<u64>, u64)> {
    let mut places = Vec::with_capacity(windows.len());
    let mut length = 0u64;
    for window in windows {
        let place = length.checked_next_multiple_of(sources.get(window.source)?.granule)?;
        places.push(place);
        length = place.checked_add(window.end - window.start)?;
    }
    Some((places, length))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::{AsFd, OwnedFd};

    fn file() -> OwnedFd {
        rustix::fs::memfd_create("windows", rustix::fs::MemfdFlags::CLOEXEC).unwrap()
    }

    fn pages(page: u64, count: u64) -> Run {
        Run { offset: page * PAGE, bytes: count * PAGE }
    }

    fn covered(extents: &[Run], granule: u64, runs: &[Run], most: usize) -> Option<Vec<(u64, u64)>> {
        let file = file();
        let source = Source { file: file.as_fd(), extents, granule, runs };
        let windows = cover(&[source], most).ok()?;
        Some(windows.iter().map(|window| (window.start / PAGE, window.end / PAGE)).collect())
    }

    // Promise: V15
    #[test]
    fn windows_are_cut_at_the_widest_gaps() {
        let all = [pages(0, 1000)];
        let runs = [pages(500, 2), pages(10, 1), pages(11, 1), pages(20, 1), pages(502, 1), pages(900, 1)];
        assert_eq!(covered(&all, PAGE, &runs, 10), Some(vec![(10, 12), (20, 21), (500, 503), (900, 901)]));
        assert_eq!(covered(&all, PAGE, &runs, 4), Some(vec![(10, 12), (20, 21), (500, 503), (900, 901)]));
        assert_eq!(covered(&all, PAGE, &runs, 3), Some(vec![(10, 21), (500, 503), (900, 901)]));
        assert_eq!(covered(&all, PAGE, &runs, 2), Some(vec![(10, 21), (500, 901)]));
        assert_eq!(covered(&all, PAGE, &runs, 1), Some(vec![(10, 901)]));
        assert_eq!(covered(&all, PAGE, &runs, 0), None);
        // Gaps of equal width are all closed if one too many remained.
        let even: Vec<Run> = (0..100).map(|at| pages(at * 3, 1)).collect();
        assert_eq!(covered(&all, PAGE, &even, 50), Some(vec![(0, 298)]));
    }

    // Promise: V15
    #[test]
    fn windows_are_whole_huge_pages_and_never_leave_their_extent() {
        let huge = 512 * PAGE;
        let extents = [pages(0, 1024), pages(2048, 1024)];
        assert_eq!(covered(&extents, huge, &[pages(700, 1), pages(3, 1)], 8), Some(vec![(0, 1024)]));
        assert_eq!(
            covered(&extents, huge, &[pages(1023, 1), pages(2048, 1)], 8),
            Some(vec![(512, 1024), (2048, 2560)])
        );
        assert_eq!(covered(&extents, huge, &[pages(1023, 1), pages(2048, 1)], 1), None, "two extents");
        assert_eq!(covered(&extents, PAGE, &[pages(1023, 2)], 8), None, "across the end of an extent");
        assert_eq!(covered(&extents, PAGE, &[pages(1500, 1)], 8), None, "between extents");
        assert_eq!(
            covered(&[pages(0, 700)], huge, &[pages(600, 1)], 8),
            None,
            "a page that is not all there"
        );
        assert_eq!(covered(&[pages(1, 700)], PAGE, &[pages(0, 1)], 8), None, "before the first");
        let end = Run { offset: u64::MAX - 4095, bytes: PAGE };
        assert_eq!(covered(&extents, PAGE, &[end], 8), None, "would overflow");
    }
}
