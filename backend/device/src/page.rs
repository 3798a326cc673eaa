//! The device's few words in a control resource: the state that shows a guest that its worker is lost, and attach-table entries
//! that the device refuses itself. It also reads the nonce in the first page of any resource.

use crate::memory::PageRun;
use core::sync::atomic::Ordering;
use sluice_protocol::{
    gpu::PAGE,
    session::{self, Nonce},
    shared::Shared,
};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// The address of a resource's nonce.
fn nonce_at(runs: &[PageRun]) -> Option<GuestAddress> {
    let page = runs.first()?.page().wrapping_mul(PAGE);
    Some(GuestAddress(page.wrapping_add(session::NONCE_AT as u64)))
}

/// The nonce in the first page of a resource, if there is one.
#[must_use]
pub fn nonce(runs: &[PageRun], memory: &GuestMemoryMmap<()>) -> Option<Nonce> {
    let mut bytes = [0; Nonce::BYTES];
    memory.read_slice(&mut bytes, nonce_at(runs)?).ok()?;
    Nonce::new(bytes)
}

/// Clears the nonce in the first page of a resource, after its use.
pub fn clear_nonce(runs: &[PageRun], memory: &GuestMemoryMmap<()>) {
    if let Some(at) = nonce_at(runs) {
        // An error means that the front-end removed the page from the memory table, so there is nothing left to clear.
        let _ = memory.write_slice(&[0; Nonce::BYTES], at);
    }
}

/// Guest-physical addresses of the first two pages of a control resource: its header and its attach table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlPages {
    addresses: [u64; 2],
}

const _: () = assert!(session::SEQUENCES_AT as u64 <= 2 * PAGE, "header and attach table lie in two pages");

impl ControlPages {
    /// The pages of a resource, if it has two.
    #[must_use]
    pub fn new(runs: &[PageRun]) -> Option<ControlPages> {
        let mut pages = runs.iter().flat_map(|run| {
            (0..run.count().min(2)).map(|page| run.page().wrapping_add(page).wrapping_mul(PAGE))
        });
        Some(ControlPages { addresses: [pages.next()?, pages.next()?] })
    }

    /// Access through a memory table. A page that is no longer in it reads as zero and ignores writes.
    #[must_use]
    pub const fn words<'m>(&self, memory: &'m GuestMemoryMmap<()>) -> ControlWords<'m> {
        ControlWords { pages: *self, memory }
    }
}

/// Access to the two pages; offsets beyond them read as zero and ignore writes.
#[derive(Clone, Copy, Debug)]
pub struct ControlWords<'m> {
    pages: ControlPages,
    memory: &'m GuestMemoryMmap<()>,
}

impl ControlWords<'_> {
    fn address(&self, at: usize) -> Option<GuestAddress> {
        let at = u64::try_from(at).ok()?;
        let page = self.pages.addresses.get(usize::try_from(at / PAGE).ok()?)?;
        Some(GuestAddress(page.wrapping_add(at % PAGE)))
    }
}

// A failed access means that the front-end removed the page from the memory table: no guest is left to tell.
impl Shared for ControlWords<'_> {
    fn load_u32(&self, at: usize, order: Ordering) -> u32 {
        self.address(at).and_then(|address| self.memory.load(address, order).ok()).unwrap_or(0)
    }
    fn store_u32(&self, at: usize, value: u32, order: Ordering) {
        if let Some(address) = self.address(at) {
            let _ = self.memory.store(value, address, order);
        }
    }
    fn swap_u32(&self, at: usize, value: u32) -> u32 {
        // The device never parks and never answers a parking thread, so this need not be one atomic step.
        let old = self.load_u32(at, Ordering::SeqCst);
        self.store_u32(at, value, Ordering::SeqCst);
        old
    }
    fn load_u64(&self, at: usize, order: Ordering) -> u64 {
        self.address(at).and_then(|address| self.memory.load(address, order).ok()).unwrap_or(0)
    }
    fn store_u64(&self, at: usize, value: u64, order: Ordering) {
        if let Some(address) = self.address(at) {
            let _ = self.memory.store(value, address, order);
        }
    }
    fn read(&self, at: usize, into: &mut [u8]) {
        if let Some(address) = self.address(at) {
            let _ = self.memory.read_slice(into, address);
        }
    }
    fn write(&self, at: usize, from: &[u8]) {
        if let Some(address) = self.address(at) {
            let _ = self.memory.write_slice(from, address);
        }
    }
    fn fence(&self) {
        core::sync::atomic::fence(Ordering::SeqCst);
    }
}
